"""Merging a few rows at a time is the formula."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from pi_lora.merging.deltas import LowRank
from pi_lora.models.weights import StoredTensor, read_header

SIDES = st.integers(1, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deltas")


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """So small that most tensors take several, with a shorter last one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pi_lora.models.weights.BLOCK", 17)
        yield


def stored(folder: Path, **tensors: torch.Tensor) -> dict[str, StoredTensor]:
    path = folder / "tensors.safetensors"
    path.write_bytes(save(tensors))
    return read_header(path)


@given(SIDES, SIDES, st.integers(1, 3), st.floats(0.1, 4), st.integers(0, 99))
def test_blocks_of_a_low_rank_delta_equal_the_formula(
    folder: Path, outputs: int, inputs: int, rank: int, scaling: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=random).to(torch.bfloat16)
    a, b = torch.randn(rank, inputs, generator=random), torch.randn(outputs, rank, generator=random)
    tensors = stored(folder, w=weight, a=a, b=b)
    change = LowRank(tensors["a"], tensors["b"], scaling)
    assert change.shape == tensors["w"].shape
    merged = torch.cat(list(change.blocks(tensors["w"])))

    expected = weight.double() + scaling * b.double() @ a.double()
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged.double(), expected, rtol=1e-4, atol=1e-5)

"""Liger's kernels, which need a GPU."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import small_recipe

from pi_lora.errors import RecipeError
from pi_lora.preflight import check


@pytest.mark.skipif(find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
def test_it_needs_a_gpu_and_the_package(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RecipeError) as raised:
        check(small_recipe(small_model, model={"name": str(small_model), "kernels": "liger"}), tmp_path / "run")
    assert raised.value.problems == (
        "model.kernels: liger needs a GPU; leave it out",
        "model.kernels: liger: needs the package liger_kernel; pip install 'pi-lora[liger]'",
    )


def test_the_package_itself_has_what_is_called() -> None:
    patches = pytest.importorskip("liger_kernel.transformers.monkey_patch", reason="pip install pi-lora[liger]")
    assert {"llama", "mistral", "qwen3"} < set(patches.MODEL_TYPE_TO_APPLY_LIGER_FN)

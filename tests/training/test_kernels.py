"""Attention's kernels agree on losses and gradients as far as they run here; and which of them `auto` stands for."""

import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from test_chunked_mlp import IDS, tuned_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_3_available

from pi_lora.models import machine as kernels
from pi_lora.models.model import find
from pi_lora.recipe.files import load_recipe
from pi_lora.recipe.schema import Tuning

KERNELS = {
    "eager": ("eager", None),
    "SDPA, flash": ("sdpa", SDPBackend.FLASH_ATTENTION),
    "SDPA, memory-efficient": ("sdpa", SDPBackend.EFFICIENT_ATTENTION),
    "SDPA, cuDNN": ("sdpa", SDPBackend.CUDNN_ATTENTION),
    "flash-attn": ("flash_attention_2", None),
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")],
    ),
]
ON_A_GPU = {"SDPA, memory-efficient", "SDPA, cuDNN", "flash-attn"}


def loss_and_gradient(device: str, attention: str, backend: SDPBackend | None) -> torch.Tensor:
    """The loss and all gradients in a row, in float32; on a GPU the model computes in bfloat16, as kernels there do."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = tuned_model("llama", Tuning(method="full"), dtype).to(device)
    model.set_attn_implementation(attention)
    ids = IDS.to(device)
    with sdpa_kernel(backend) if backend else nullcontext():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return torch.cat([loss.detach().flatten(), *(weight.grad.flatten() for weight in model.parameters())]).float()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_agree(device: str, kernel: str) -> None:
    if device == "cpu" and kernel in ON_A_GPU:
        pytest.skip(f"{kernel} needs a GPU")
    if kernel == "flash-attn" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed: pip install pi-lora[flash-attn]")
    plain = loss_and_gradient(device, "sdpa", SDPBackend.MATH)
    found = loss_and_gradient(device, *KERNELS[kernel])
    error = (found - plain).norm() / plain.norm()
    assert error < (2e-2 if device == "cuda" else 1e-5)


def supported(model: PreTrainedModel, kernel: str) -> str:
    return kernel


def unsupported(model: PreTrainedModel, kernel: str) -> str:
    raise ValueError(f"{kernel} is not supported yet")


@pytest.mark.parametrize(
    ("generation", "installed", "settings", "chosen"),
    [
        (9, {3, 4}, {}, "flash_attention_3"),
        (10, {3, 4}, {}, "flash_attention_4"),
        (8, {3, 4}, {}, "sdpa"),
        (9, {3}, {"in_bfloat16": False}, "sdpa"),
        (9, {3}, {"context_parallel": 2}, "sdpa"),
        (9, {3}, {"supports": False}, "sdpa"),
        (None, {3, 4}, {}, "sdpa"),
    ],
)
def test_auto_takes_what_is_made_for_the_gpu(
    generation: int | None,
    installed: set[int],
    settings: dict[str, Any],
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "device", lambda: torch.device("cuda" if generation else "cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (generation, 0))
    present = {9: ("flash_attention_3", lambda: 3 in installed), 10: ("flash_attention_4", lambda: 4 in installed)}
    monkeypatch.setattr(kernels, "_MADE_FOR", present)
    supports = settings.pop("supports", True)
    model = find("builtin:tiny")
    model.skeleton._compatible_flash_implementations = None
    monkeypatch.setattr(PreTrainedModel, "get_correct_attn_implementation", supported if supports else unsupported)
    assert model.attention(**{"asked": "auto", "in_bfloat16": True, **settings}) == chosen


@pytest.mark.skipif(is_flash_attn_3_available(), reason="FlashAttention 3 is installed")
def test_a_kernel_that_transformers_cannot_use_is_left_out(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(kernels, "_MADE_FOR", {9: ("flash_attention_3", lambda: True)})
    assert find(str(small_model)).attention("auto", in_bfloat16=True) == "sdpa"


def test_a_run_says_which_kernel_it_had(lora_run: Path) -> None:
    assert load_recipe(lora_run / "recipe.yaml").recipe.model.attention == "auto"
    assert json.loads((lora_run / "run.json").read_text())["attention"] == "sdpa"

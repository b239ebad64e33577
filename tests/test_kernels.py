"""Attention's kernels agree: losses and gradients of a small model under each that can run here."""

import importlib.util
from contextlib import nullcontext

import pytest
import torch
from test_chunked_mlp import IDS, tuned_model
from test_offload import DEVICES
from torch.nn.attention import SDPBackend, sdpa_kernel

from pi_lora.recipe.schema import Tuning

KERNELS = {
    "eager": ("eager", None),
    "SDPA, flash": ("sdpa", SDPBackend.FLASH_ATTENTION),
    "SDPA, memory-efficient": ("sdpa", SDPBackend.EFFICIENT_ATTENTION),
    "SDPA, cuDNN": ("sdpa", SDPBackend.CUDNN_ATTENTION),
    "flash-attn": ("flash_attention_2", None),
}
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

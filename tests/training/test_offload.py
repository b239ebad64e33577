"""Offloaded activations give the same gradients; where there is no GPU, to another place in the host's memory."""

from typing import Any

import pytest
import torch
from test_chunked_mlp import IDS, SHAPE, tuned_model
from transformers import modeling_utils

from pi_lora.recipe.schema import Tuning
from pi_lora.training.chunked_mlp import chunk_mlps

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")],
    ),
]
Moved = list[torch.Size]


def move_aside(monkeypatch: pytest.MonkeyPatch) -> Moved:
    """Let transformers offload without pinned memory, which wants a GPU; the shapes of what is moved, as it is."""
    moved: Moved = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.shape)
        return tensor.detach().clone()

    def save(pin_memory: bool, device_type: str) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    monkeypatch.setattr(modeling_utils, "save_on_cpu", save)
    return moved


def gradients(device: str, tuning: Tuning, offload: bool, pieces: int | None) -> dict[str, torch.Tensor]:
    model = tuned_model("llama", tuning, torch.float32).to(device)
    if pieces:
        chunk_mlps(model, pieces)
    base = model if tuning.method == "full" else model.get_base_model()
    base.activation_checkpointing_enable(offload=offload)
    ids = IDS.to(device)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pieces", [None, 8], ids=["whole", "in pieces"])
@pytest.mark.parametrize("tuning", [Tuning(rank=4), Tuning(method="full")], ids=["lora", "full"])
def test_gradients_are_the_same(
    device: str, pieces: int | None, tuning: Tuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gradients(device, tuning, offload=False, pieces=pieces)
    moved = move_aside(monkeypatch) if device == "cpu" else None
    offloaded = gradients(device, tuning, offload=True, pieces=pieces)
    torch.testing.assert_close(offloaded, plain)
    if moved is not None:
        # The input of every layer, and nothing of what is inside of one.
        assert moved.count(torch.Size([*IDS.shape, SHAPE["hidden_size"]])) == SHAPE["num_hidden_layers"]
        assert all(SHAPE["intermediate_size"] not in shape for shape in moved)

"""Layers that are computed again in the backward pass: the same losses, and so many calls of attention."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import small_recipe, train
from pi_lora.run import Run

STEPS, LAYERS = 2, 2
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class AttentionCalls(TorchDispatchMode):
    """Counts the forward passes of attention."""

    number = 0

    def __torch_dispatch__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += function is ATTENTION
        return function(*args, **(kwargs or {}))


def losses_and_calls(
    model: Path, output: Path, checkpointing: object, tuning: dict[str, object]
) -> tuple[list[float], float]:
    """The losses of a training, and the calls of attention for each step and layer."""
    training = {**small_recipe(model).training.model_dump(), "steps": STEPS, "precision": "float32"}
    recipe = small_recipe(
        model, tuning=tuning, training={**training, "activation_checkpointing": checkpointing, "mlp_chunk_tokens": 96}
    )
    with AttentionCalls() as calls:
        train(recipe, output)
    return [line["loss"] for line in Run(output).log], calls.number / STEPS / LAYERS


@pytest.mark.parametrize("tuning", [{"rank": 4}, {"method": "qlora", "rank": 4}, {"method": "full"}], ids=str)
def test_checkpointed_layers_give_the_same_losses(small_model: Path, tmp_path: Path, tuning: dict[str, object]) -> None:
    """With 2, one of the two layers is checkpointed; `selective` keeps the output of attention."""
    if tuning.get("method") == "qlora":
        pytest.importorskip("bitsandbytes")
    kept, calls = losses_and_calls(small_model, tmp_path / "kept", False, tuning)
    assert calls == 1
    for checkpointing, expected in ((True, 2), (2, 1.5), ("selective", 1)):
        losses, calls = losses_and_calls(small_model, tmp_path / str(checkpointing), checkpointing, tuning)
        assert losses == pytest.approx(kept, abs=1e-6)
        assert calls == expected, checkpointing

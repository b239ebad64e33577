"""What all measurements know of a model: what results say of it, how many tokens at a time, padding, input lengths."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from pi_lora.errors import ModelError
from pi_lora.models.machine import nf4_kernel
from pi_lora.models.model import Model
from pi_lora.scaling.config import Config, constant_longrope, full_attention_rope
from pi_lora.types import Json

# Tokens that keep the hardware busy in a forward pass, and stay in a processor's caches.
PASS_TOKENS, PASS_TOKENS_ON_CPU = 16384, 2048
# Tokens, shared ones included, of the inputs that go through a model together: this bounds the memory of their keys.
HELD_TOKENS = 16384


def described(loaded: Model) -> Json:
    """Return what every result says of a loaded model."""
    quantized = getattr(loaded.model, "is_loaded_in_4bit", False)
    return {
        "model": loaded.name,
        "scale": loaded.scale,
        "dtype": str(loaded.model.dtype).removeprefix("torch.") + ", computed in bfloat16" * loaded.autocast,
        "kernel": loaded.kernel,
        **({"quantized_kernel": nf4_kernel(loaded.model.device.type)} if quantized else {}),
        "window": loaded.window,
    }


def pass_tokens(model: Any) -> int:
    """Return how many tokens keep the hardware busy in a forward pass, and stay in a processor's caches."""
    return PASS_TOKENS_ON_CPU if model.device.type == "cpu" else PASS_TOKENS


def prompts_at_once(window: int) -> int:
    """Return how many prompts of RULER are continued together by default."""
    return max(1, HELD_TOKENS // window)


def is_sharded(model: Any) -> bool:
    """Whether FSDP2 has spread a model over processes."""
    return isinstance(model, FSDPModule)


def padded(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return token ids (rows, longest) padded on the right, which needs no mask: attention is causal."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=model.device)


def depends_on_length(config: Config) -> bool:
    """Return whether the length of an input changes how a model computes its first tokens: rope follows the length."""
    rope = full_attention_rope(config)
    return rope.get("rope_type") in ("dynamic", "longrope") and constant_longrope(rope) is None


@torch.no_grad()
def forget_lengths(model: Any) -> None:
    """Reset `dynamic` frequencies: transformers keeps those of the longest input until one shorter than L comes."""
    model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)


def check_numbers(name: str, dtype: torch.dtype, finite: bool) -> None:
    """Raise ModelError unless what was measured of a model is `finite`."""
    if not finite:
        gives = f"gives infinite or NaN numbers in {str(dtype).removeprefix('torch.')}"
        raise ModelError(f"{name}: {gives}; try another --dtype")


def check_ids(loaded: Model, ids: Sequence[int]) -> None:
    """Raise ModelError if the tokenizer gives ids that the model does not have."""
    known: Any = loaded.model.config.get_text_config().vocab_size
    if max(ids) >= known:
        given = f"its tokenizer gives the id {max(ids)}, and the model knows {known} tokens"
        raise ModelError(f"{loaded.name}: {given}; put the tokenizer beside it that it was trained with")

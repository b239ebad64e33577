"""Whether weights are finite, at little more than what reading them costs."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import core_model_loading

from pi_lora.errors import ModelError


def finite(values: torch.Tensor) -> bool:
    """Return whether all numbers are finite; their sum tells in one pass, unless it overflows itself."""
    total = values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)
    return math.isfinite(total.item()) or bool(values.isfinite().all())


def check_finite(name: str, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ModelError if the model `name` has infinite or NaN weights, also in the scales of NF4 ones."""
    for key, weight in weights:
        state = getattr(weight, "quant_state", None)
        # The mean of the scales, which double quantization subtracts from them, is NaN if one of them is.
        values = weight.detach() if state is None else state.offset
        if values.itemsize > 1 and not finite(values):
            raise ModelError(f"{name}: {key} has infinite or NaN values; it is damaged, download or tune it again")


@contextlib.contextmanager
def finite_as_read() -> Iterator[list[bool]]:
    """Have transformers look at each weight when it reads it, and give what it finds.

    Twice as fast as looking at a model that is loaded: bfloat16 numbers that become float32 ones are half as many
    bytes, and are in the processor's cache for their conversion.
    """
    found: list[bool] = []
    read = core_model_loading._materialize_copy

    def looked_at(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        stored: torch.Tensor = read(tensor)
        weight = stored.to(device=device, dtype=dtype)
        # float32 holds every number of 16 bits, so that none becomes infinite in it.
        as_stored = weight.device == stored.device and weight.dtype == torch.float32 and stored.itemsize == 2
        values = stored if as_stored else weight
        found.append(values.itemsize == 1 or finite(values))
        return weight

    core_model_loading._materialize_copy = looked_at
    try:
        yield found
    finally:
        core_model_loading._materialize_copy = read

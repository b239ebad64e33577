"""Whether weights are finite."""

import math
from collections.abc import Iterable

import torch

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

"""Base weights as QLoRA's training saw them: rounded to NF4 with double quantization, and back."""

from dataclasses import dataclass
from functools import cached_property

import torch

from pi_lora.errors import ModelError
from pi_lora.merge.shards import StoredTensor
from pi_lora.model import device


@dataclass(frozen=True)
class Dequantized:
    """A stored tensor after NF4 (Dettmers et al. 2023); held whole, since the second quantization is over all of it."""

    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the stored tensor."""
        return self.stored.shape

    @property
    def where(self) -> str:
        """How an error names the stored tensor."""
        return self.stored.where

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` in bfloat16, the type that a quantized base computes in."""
        return self._values[start:stop].clone()

    @cached_property
    def _values(self) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        weight = self.stored.whole().to(device(), torch.bfloat16)
        values: torch.Tensor = dequantize_4bit(*quantize_4bit(weight, compress_statistics=True, quant_type="nf4"))
        return values.cpu()


def check_bitsandbytes() -> None:
    """Nothing, where bitsandbytes is installed.

    Raises:
        ModelError: it is not.
    """
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise ModelError("--onto quantized: needs bitsandbytes; pip install pi-lora[qlora]") from None

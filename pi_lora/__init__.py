"""Stretch the context window of RoPE language models by Position Interpolation: tune, measure, merge."""

import logging
from typing import TYPE_CHECKING, Any

from pi_lora.errors import PiLoraError

if TYPE_CHECKING:
    from pi_lora.models.load import LoadedModel, Stretch, load

# On processors with AVX512-BF16, bitsandbytes 0.50 warns when it or PEFT is imported and the package `kernels` is not
# installed. That package's kernel is for repacked NF4 weights, and there are none here: see pi_lora/models/nf4.py.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")
)

__all__ = ["LoadedModel", "PiLoraError", "Stretch", "load"]


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for, so that the command line starts at once."""
    if name in __all__:
        import pi_lora.models.load

        return getattr(pi_lora.models.load, name)
    raise AttributeError(f"module 'pi_lora' has no attribute {name!r}")

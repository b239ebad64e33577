"""Stretch the context window of RoPE language models by Position Interpolation: tune, measure, merge."""

from pi_lora.errors import PiLoraError

# Nothing else is imported here, not even `typing`: until `pi_lora.__main__` runs, Ctrl-C ends in a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pi_lora.api import evaluate_passkey, evaluate_perplexity, generate, merge, plan, train
    from pi_lora.models.model import Model, load
    from pi_lora.scaling.config import Extension

__all__ = [
    "Extension",
    "Model",
    "PiLoraError",
    "evaluate_passkey",
    "evaluate_perplexity",
    "generate",
    "load",
    "merge",
    "plan",
    "train",
]


def __getattr__(name: str) -> object:
    """Import what needs torch only when it is asked for, so that the command line starts at once."""
    if name in ("Extension", "Model", "load"):
        import pi_lora.models.model

        return getattr(pi_lora.models.model, name)
    if name in __all__:
        import pi_lora.api

        return getattr(pi_lora.api, name)
    raise AttributeError(f"module 'pi_lora' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""What every result says of the model that it was measured on, and how it is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi_lora.errors import DataError

if TYPE_CHECKING:  # writing a file takes no torch
    from pi_lora.run import LoadedModel

Progress = Callable[[int, int], None]
Scores = dict[str, Any]


def write_scores(scores: Scores | list[Scores], file: Path) -> None:
    """Write a result, or those of several models, as JSON, whole or not at all.

    Raises:
        DataError: the file cannot be written.
    """
    part = file.with_name(f".{file.name}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
        part.replace(file)
    except OSError as error:
        raise DataError(f"{file}: cannot be written ({error.strerror}); choose another file") from None


def described(loaded: "LoadedModel") -> Scores:
    """Name, scale, dtype and attention kernel of a model."""
    return {
        "model": loaded.name,
        "scale": loaded.scale,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "kernel": loaded.model.config._attn_implementation,
    }

"""Tokenizers, loaded with a window and checked, and saved for both generations of transformers."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pi_lora.errors import ModelError, first_line
from pi_lora.models import tokenizer_files
from pi_lora.models.location import find_file, why_unreadable


def load_tokenizer(
    path: str | Path,
    window: int,
    revision: str = "main",
    trust_remote_code: bool = False,
    vocabulary: int | None = None,
) -> Any:
    """Load the tokenizer of a model or run, with `window` tokens as its longest input; raise ModelError if its files
    are damaged, or it gives tokens that a model of so large a `vocabulary` does not have.
    """
    tokenizer_files.check_files(lambda name: find_file(str(path), name, revision))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises `Exception` itself
        reason = why_unreadable(error, f"has no tokenizer that can be read ({first_line(error)})")
        raise ModelError(f"{path}: {reason}") from None
    tokenizer.model_max_length = window
    tokenizer_files.read_special_tokens_as_text(tokenizer)
    tokenizer_files.try_out(tokenizer, str(path), vocabulary)
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer that transformers 4 reads as well, which does not know the class name that 5 writes."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings["tokenizer_class"] == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    # Ours is how texts are read here; others may write special tokens into a chat.
    settings |= {key: tokenizer.init_kwargs[key] for key in ("split_special_tokens",) if key in settings}
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

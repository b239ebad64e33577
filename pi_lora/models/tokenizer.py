"""Tokenizers, loaded with a window and checked, and saved for both generations of transformers."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers.models import Unigram
from transformers import AutoTokenizer

from pi_lora.errors import ModelError
from pi_lora.models.files import CHAT_TEMPLATE, SETTINGS_FILE, find_file, locate, readable

SAMPLE = "The 3rd text, 1999: naïve “café”\n\n\t  if x_1 != 0:   # 中文 здесь 🦋 aaaaaaaaaaaaaaaa ---------- 00000000\n"
# A log probability below that of any text with the length of a special token.
LOWEST_SCORE = -1e4


def load_tokenizer(
    path: str | Path,
    window: int,
    *,
    revision: str = "main",
    trust_remote_code: bool = False,
    vocabulary: int | None = None,
) -> Any:
    """Load the tokenizer of a model or run, with `window` tokens as its longest input.

    Raise ModelError if it cannot be read, or gives tokens that are not in the `vocabulary` of the model.
    """
    with readable(path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    tokenizer.model_max_length = window
    _let_special_tokens_be_split(tokenizer)
    highest = max(tokenizer(SAMPLE, verbose=False)["input_ids"], default=0)
    if vocabulary and highest >= vocabulary:
        raise ModelError(
            f"{path}: its tokenizer gives token {highest}, and the model has {vocabulary}; use the model's own"
        )
    return tokenizer


def has_chat_template(name: str) -> bool:
    """Return whether a model has a chat template, without loading the tokenizer; False if the hub is not reached."""
    path = locate(name)
    with suppress(ModelError):
        settings_file = find_file(path, SETTINGS_FILE)
        if settings_file:
            settings = json.loads(settings_file.read_text(encoding="utf-8"))
            if settings.get("chat_template"):
                return True
        return find_file(path, CHAT_TEMPLATE) is not None
    return False


def _let_special_tokens_be_split(tokenizer: Any) -> None:
    """Make a call with `split_special_tokens` read `</s>` in a text as four characters.

    A Unigram model has special tokens among its pieces, as the likeliest (tokenizers 0.22): they get the lowest score.
    """
    if not tokenizer.is_fast or not isinstance(tokenizer.backend_tokenizer.model, Unigram):
        return
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    special_tokens = set(tokenizer.all_special_tokens)
    pieces = []
    for piece, score in model["vocab"]:
        pieces.append((piece, LOWEST_SCORE if piece in special_tokens else score))
    tokenizer.backend_tokenizer.model = Unigram(pieces, model["unk_id"], model["byte_fallback"])


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer that transformers 4 reads as well: it does not know the class name that version 5 writes."""
    tokenizer.save_pretrained(folder)
    file = folder / SETTINGS_FILE
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings["tokenizer_class"] == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

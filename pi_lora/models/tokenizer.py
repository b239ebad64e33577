"""Tokenizers, loaded with a window and checked, and saved for both generations of transformers."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers.models import Unigram
from transformers import AutoTokenizer

from pi_lora.errors import ModelError
from pi_lora.models.files import find_file, locate, readable

SETTINGS_FILE = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (SETTINGS_FILE, "tokenizer.json", "tokenizer.model", CHAT_TEMPLATE)
SAMPLE = "The 3rd text, 1999: naïve “café”\n\n\t  if x_1 != 0:   # 中文 здесь 🦋 aaaaaaaaaaaaaaaa ---------- 00000000\n"
# A logarithm of a probability that is lower than that of any text of a special token's length.
NEVER = -1e4


def load_tokenizer(
    path: str | Path,
    window: int,
    revision: str = "main",
    trust_remote_code: bool = False,
    vocabulary: int | None = None,
) -> Any:
    """Load the tokenizer of a model or run, with `window` tokens as its longest input; raise ModelError if it cannot be
    read, or gives tokens that a model of so large a `vocabulary` does not have.
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
    """Return whether a model has a chat template, without its tokenizer; of one on the hub, if that can be reached."""
    path = locate(name)
    with suppress(ModelError):
        settings = find_file(path, SETTINGS_FILE)
        in_settings = settings is not None and json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
        return bool(in_settings or find_file(path, CHAT_TEMPLATE))
    return False


def _let_special_tokens_be_split(tokenizer: Any) -> None:
    """Let `</s>` in a text be four characters where a call asks for it by `split_special_tokens`. A Unigram model has
    special tokens among its pieces, as the likeliest (tokenizers 0.22): they get the lowest score.
    """
    if tokenizer.is_fast and isinstance(tokenizer.backend_tokenizer.model, Unigram):
        model, special = json.loads(tokenizer.backend_tokenizer.to_str())["model"], set(tokenizer.all_special_tokens)
        pieces = [(piece, NEVER if piece in special else score) for piece, score in model["vocab"]]
        tokenizer.backend_tokenizer.model = Unigram(pieces, model["unk_id"], model["byte_fallback"])


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer that transformers 4 reads as well, which does not know the class name that 5 writes."""
    tokenizer.save_pretrained(folder)
    file = folder / SETTINGS_FILE
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings["tokenizer_class"] == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

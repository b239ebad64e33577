"""Tokenizers, loaded with a window and checked, and saved for both generations of transformers."""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers.models import Unigram
from transformers import AutoTokenizer

from pi_lora.errors import ModelError
from pi_lora.models.files import (
    CHAT_TEMPLATE,
    PROCESSOR_TEMPLATE,
    SETTINGS_FILE,
    find_file,
    find_files,
    model_folder,
    readable,
)
from pi_lora.models.quiet import quiet_loading
from pi_lora.storage import read_json, write_json
from pi_lora.types import Json

SAMPLE = "The 3rd text, 1999: naïve “café”\n\n\t  if x_1 != 0:   # 中文 здесь 🦋 aaaaaaaaaaaaaaaa ---------- 00000000\n"
CHAT = [{"role": "user", "content": "a"}]
ANSWER = "An answer."
# A log probability below that of any text with the length of a special token.
LOWEST_SCORE = -1e4


def load_tokenizer(
    path: str | Path,
    window: int,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    vocabulary: int | None = None,
) -> Any:
    """Load the tokenizer of a model or run, with `window` tokens as its longest input.

    Raise ModelError if it cannot be read, has no EOS, or gives tokens that are not in the `vocabulary` of the model. A
    padding token that is not there is left out: the model never reads it.
    """
    try:
        with readable(path, "tokenizer"), quiet_loading():
            tokenizer = AutoTokenizer.from_pretrained(
                path,
                revision=revision,
                trust_remote_code=trust_remote_code,
                # The tokenizer of mistral-common, where it is installed, cannot read special tokens as text.
                mistral_format=False,
            )
    except ModelError:
        # transformers (5.23) asks for tiktoken, which does not read such a file.
        file = find_file(Path(path), "tokenizer.model")
        if file and find_spec("sentencepiece") is None and not find_file(Path(path), "tokenizer.json"):
            raise ModelError(f"{file}: needs the package sentencepiece; pip install sentencepiece") from None
        raise
    if tokenizer.eos_token_id is None:
        # As that of a tekken.json alone, which would not add BOS either.
        remedy = f"name eos_token, bos_token and add_bos_token in {SETTINGS_FILE}"
        raise ModelError(f"{path}: its tokenizer has no EOS; {remedy}")
    tokenizer.model_max_length = window
    template_file = find_file(Path(path), PROCESSOR_TEMPLATE)
    if template_file and tokenizer.chat_template is None:
        # transformers (5.23) reads this file for processors alone.
        tokenizer.chat_template = read_json(template_file, Json, "download it again").get("chat_template")
    _let_special_tokens_be_split(tokenizer)
    if vocabulary:
        highest = max(_ids_given(tokenizer))
        if highest >= vocabulary:
            raise ModelError(
                f"{path}: its tokenizer gives token {highest}, and the model has {vocabulary}; use the model's own, "
                "or resize its embeddings (resize_token_embeddings) and save it"
            )
        if (tokenizer.pad_token_id or 0) >= vocabulary:
            tokenizer.pad_token = None
    return tokenizer


def _ids_given(tokenizer: Any) -> list[int]:
    """Return ids that texts and chats become. Special tokens that nothing writes are left out: models may lack them, as
    Gemma 3 of text lacks that of an image.
    """
    ids: list[int] = tokenizer(SAMPLE, verbose=False)["input_ids"]
    ids += [number for number, token in tokenizer.added_tokens_decoder.items() if not token.special]
    ids.append(tokenizer.eos_token_id)
    with suppress(Exception):  # there is no template, or it raises an error of its own
        ids += tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    return ids


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the token by which the chat template ends the last answer, or else an earlier one, as that of GLM by the
    role of the next turn; None without a template, or if it writes no such token.
    """
    numbers: dict[str, int] = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    for later in ([], CHAT):
        for content in (ANSWER, [{"type": "text", "text": ANSWER}]):
            turns = [*CHAT, {"role": "assistant", "content": content}, *later]
            with suppress(Exception):  # there is no template, or it raises an error of its own
                _, _, after = tokenizer.apply_chat_template(turns, tokenize=False).partition(ANSWER)
                for token, number in numbers.items():
                    if after.lstrip().startswith(token):
                        return number
    return None


def has_chat_template(name: str) -> bool:
    """Return whether a model has a chat template, without loading the tokenizer; False if the hub is not reached."""
    with suppress(ModelError):
        folder, _ = model_folder(name)
        if find_files(folder, (CHAT_TEMPLATE, PROCESSOR_TEMPLATE)):
            return True
        return bool(read_json(folder / SETTINGS_FILE, Json, "").get("chat_template"))
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


def save_tokenizer(tokenizer: Any, folder: Path, shipped: Mapping[str, Path] | None = None) -> None:
    """Write a tokenizer for transformers 4 and 5 and for other engines.

    The `shipped` files of the tokenizer are copied as they are: transformers 5 leaves out `tokenizer.model`, whether
    BOS is added, and more. Settings of version 5 that version 4 does not read are rewritten: the name of a class, and a
    list of special tokens where a dictionary is expected.
    """
    tokenizer.save_pretrained(folder)
    file = folder / SETTINGS_FILE
    settings = read_json(file, Json, "")
    for name, path in (shipped or {}).items():
        shutil.copyfile(path, folder / name)
    if "auto_map" not in settings:  # which says where the code is
        settings = read_json(file, Json, "")
    settings["model_max_length"] = tokenizer.model_max_length
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    write_json(file, settings)

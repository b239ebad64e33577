"""The files of a tokenizer, which others may have made: a checked reader for each, before a library reads them.

transformers and tokenizers (0.23) take what has another type for something else, or panic, which no `except Exception`
catches and which prints a trace of its own.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from tokenizers.models import Unigram

from pi_lora.errors import ModelError, first_line
from pi_lora.recipe.places import cache_folder
from pi_lora.writing import read_json

TOKENIZER_FILE, SETTINGS_FILE, SPECIAL_FILE = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
# Three times the longest there is.
MOST_BYTES = 100_000_000
# Of a regular expression, and by how much all that a normalizer replaces can lengthen a text.
MOST_CHARACTERS, MOST_GROWTH = 4_000, 10_000
# A text of some kinds of characters, of which more and more is tokenized: what takes longer for so little would take
# hours for a book.
TRIAL = "The 3rd text, 1999: naïve “café”\n\n\t  if x_1 != 0:   # 中文 здесь 🦋 aaaaaaaaaaaaaaaa ---------- 00000000\n"
TRIAL_LENGTHS, MOST_SECONDS = (60, 200, 800), 2.0
# A logarithm of a probability that is lower than that of any text of a special token's length.
NEVER = -1e4
REMEDY = "correct it, or download it again"

_TOKEN = re.compile(
    r"\\[pPx]\{\^?\w+\}|\\.|\[\^?\]?|\]|\(\?[:=!>i]*|\(\?<[=!]|\(|\)|\{\d+,?\d*\}|\{,\d+\}|[*+?|]|.", re.DOTALL
)


def check_expression(expression: str) -> str:
    r"""Return a regular expression by which a tokenizer splits text if it repeats no choice: such as `(a+)+` or
    `(a|aa)*` take time that doubles with every character.

    >>> check_expression(r"(?i:'s|'t)|[^\r\n\p{L}]?\p{L}+|(?=(\d{3})+(?!\d))|\s+(?!\S)")
    "(?i:'s|'t)|[^\\r\\n\\p{L}]?\\p{L}+|(?=(\\d{3})+(?!\\d))|\\s+(?!\\S)"
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"has more than {MOST_CHARACTERS:,} characters")
    choices, depth_of_set = [False], 0
    ends_choice = False  # whether a group with a choice ends just here
    for part in _TOKEN.findall(expression):
        after_choice, ends_choice = ends_choice, False
        if depth_of_set or part[0] == "[":
            depth_of_set += (part[0] == "[") - (part == "]")
        elif part[0] == "(":
            choices.append(False)
        elif part == ")":
            ends_choice = choices.pop() if len(choices) > 1 else False
            choices[-1] |= ends_choice
        elif part in "*+?|" or (len(part) > 1 and part[0] == "{"):
            if after_choice and part not in "?|":
                raise ValueError(f"{expression[:60]!r} is a regular expression that may take very long")
            choices[-1] |= not re.fullmatch(r"\{\d+\}", part)
    return expression


class _File(BaseModel):
    """Fields that are checked; there are others."""

    model_config = ConfigDict(strict=True, extra="ignore")


_Id = Annotated[int, Field(ge=0, lt=2**31)]


class _Token(_File):
    content: str
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False
    special: bool = False


class _SavedToken(_Token):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: str = Field("AddedToken", alias="__type")


class _AddedToken(_Token):
    id: _Id
    content: str = Field(min_length=1)


class _Pattern(_File):
    string: str | None = Field(None, alias="String", min_length=1)
    regex: Annotated[str, AfterValidator(check_expression)] | None = Field(None, alias="Regex")


class _Piece(_File):
    special: dict[str, Any] = Field({}, alias="SpecialToken")


class _Step(_File):
    """A part of a pipeline, of which sequences have parts."""

    type: str
    pattern: _Pattern | None = None
    content: str = ""
    normalizers: "list[_Step]" = []
    pretokenizers: "list[_Step]" = []
    processors: "list[_Step]" = []
    special_tokens: dict[str, Any] = {}
    single: list[_Piece] = []
    pair: list[_Piece] = []

    @model_validator(mode="after")
    def _frames_with_its_own(self) -> Self:
        named = {str(piece.special.get("id")) for piece in self.single + self.pair if piece.special}
        if missing := named - self.special_tokens.keys():
            raise ValueError(f"special token {min(missing)[:60]!r} is not among its special_tokens")
        return self

    @property
    def growth(self) -> float:
        """By how much it can lengthen a text."""
        longer = len(self.content) if self.type == "Replace" and len(self.content) > 1 else 1
        return math.prod((longer, *(step.growth for step in self.normalizers)))


class _Vocabulary(_File):
    type: str | None = None
    dropout: Annotated[float, Field(ge=0, le=0)] | None = None
    vocab: dict[str, _Id] | list[tuple[str, float]] = Field(min_length=1)
    unk_id: _Id | None = None

    @model_validator(mode="after")
    def _unknown_is_known(self) -> Self:
        if self.unk_id is not None and self.unk_id >= len(self.vocab):
            raise ValueError(f"unk_id is {self.unk_id}, beyond its vocabulary")
        return self


class _Tokenizer(_File):
    added_tokens: list[_AddedToken] = []
    normalizer: _Step | None = None
    pre_tokenizer: _Step | None = None
    post_processor: _Step | None = None
    model: _Vocabulary

    @model_validator(mode="after")
    def _grows_little(self) -> Self:
        if self.normalizer and self.normalizer.growth > MOST_GROWTH:
            raise ValueError("its normalizer makes texts thousands of times longer")
        return self


_Special = str | _SavedToken | None


class TokenizerSettings(_File):
    """What `tokenizer_config.json` says, as far as it is checked."""

    tokenizer_class: str | None = None
    model_max_length: float | int | None = None
    bos_token: _Special = None
    eos_token: _Special = None
    unk_token: _Special = None
    pad_token: _Special = None
    sep_token: _Special = None
    cls_token: _Special = None
    mask_token: _Special = None
    additional_special_tokens: list[str | _SavedToken] | None = None
    extra_special_tokens: dict[str, str | _SavedToken] | list[str | _SavedToken] | None = None
    added_tokens_decoder: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], _Token] | None = None
    model_input_names: list[str] | None = None
    padding_side: Literal["left", "right"] | None = None
    truncation_side: Literal["left", "right"] | None = None


def read_settings(file: Path) -> TokenizerSettings:
    """Read `tokenizer_config.json`; raise ModelError if it is damaged."""
    return read_json(file, TokenizerSettings, REMEDY)


_FILES: dict[str, tuple[Any, int]] = {
    TOKENIZER_FILE: (_Tokenizer, MOST_BYTES),
    SETTINGS_FILE: (TokenizerSettings, 2**24),
    SPECIAL_FILE: (dict[str, _Special | list[str | _SavedToken]], 2**24),
}


def check_files(find: Callable[[str], Path | None]) -> None:
    """Raise ModelError, in a line with file and field, if a file of a tokenizer is damaged or does harm."""
    for name in _FILES:
        if file := find(name):
            check_file(file)


def check_file(file: Path) -> None:
    """Raise ModelError as `check_files` does. Bytes that were found sound before are known by their digest, which takes
    a tenth of the time.
    """
    (kind, limit), sound = _FILES[file.name], None
    if file.is_file() and file.stat().st_size <= limit:
        digest = hashlib.sha256(b"\0".join([Path(__file__).read_bytes(), file.name.encode(), file.read_bytes()]))
        sound = cache_folder() / "sound" / digest.hexdigest()
        if sound.exists():
            return
    read_json(file, kind, REMEDY)
    with contextlib.suppress(OSError):
        if sound:
            sound.parent.mkdir(parents=True, exist_ok=True)
            sound.touch()


def read_special_tokens_as_text(tokenizer: Any) -> None:
    """Let `</s>` in a text be four characters and not the end of it, unless a call of the tokenizer asks otherwise. A
    Unigram model has special tokens among its pieces, as the likeliest (tokenizers 0.22): they get the lowest score.
    """
    tokenizer.split_special_tokens = True
    # Those that a chat template writes are what they stand for.
    as_such = {"split_special_tokens": False}
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, tokenizer_kwargs=as_such)
    if tokenizer.is_fast and isinstance(tokenizer.backend_tokenizer.model, Unigram):
        model, special = json.loads(tokenizer.backend_tokenizer.to_str())["model"], set(tokenizer.all_special_tokens)
        pieces = [(piece, NEVER if piece in special else score) for piece, score in model["vocab"]]
        tokenizer.backend_tokenizer.model = Unigram(pieces, model["unk_id"], model["byte_fallback"])


def try_out(tokenizer: Any, where: str, vocabulary: int | None) -> None:
    """Raise ModelError if a tokenizer fails, takes very long, or gives ids beyond the `vocabulary` of its model."""
    started = time.monotonic()
    for length in TRIAL_LENGTHS:
        try:
            with _without_traces():
                ids = tokenizer((8 * TRIAL)[:length], verbose=False)["input_ids"]
        except BaseException as error:
            # A panic of tokenizers is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ModelError(f"{where}: its tokenizer cannot tokenize ({first_line(error)}); {REMEDY}") from None
        if time.monotonic() - started > MOST_SECONDS:
            raise ModelError(f"{where}: its tokenizer takes very long for {length} characters; {REMEDY}")
        if vocabulary and ids and max(ids) >= vocabulary:
            has = f"gives token {max(ids)}, and the model has {vocabulary}"
            raise ModelError(f"{where}: its tokenizer {has}; use the model's own")


@contextlib.contextmanager
def _without_traces() -> Iterator[None]:
    """Keep off the terminal what Rust prints when it panics."""
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)

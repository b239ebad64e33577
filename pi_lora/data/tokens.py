"""Text to token ids: special tokens in a text are text, and a long text is tokenized in pieces."""

import itertools
import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pi_lora.errors import DataError
from pi_lora.storage import digest_of

Item = TypeVar("Item")
Tokens = MutableSequence[int]


# A fast tokenizer works on the texts of a call in parallel. Its own records of a call take some 100 bytes a token,
# 200 MB for so many novels.
TEXTS_AT_ONCE = 16
# How many characters of a long text are tokenized together.
PIECE = 500_000


class Labelled(NamedTuple):
    """Token ids, whether the loss counts each of them, and the name of the row they come from."""

    ids: Sequence[int]
    loss_mask: Sequence[bool]
    name: str = ""


def tokenized(
    tokenizer: Any, texts: Sequence[str], special_tokens: bool = False, *, enough: float = math.inf
) -> list[Tokens]:
    """Return the ids of texts with the BOS and EOS of the tokenizer. With `special_tokens`, special tokens in a
    text keep their meaning, and a text may begin with BOS itself; else they are text.

    A text of more than `2 * PIECE` characters is tokenized in pieces that end with a line. A token that would span two
    pieces is two tokens, and a tokenizer that puts a space before a text puts one before each piece. No further piece
    is tokenized if there are `enough` tokens.
    """
    encode = partial(tokenizer, split_special_tokens=not special_tokens, verbose=False)
    short = list(filter(_is_short, texts))
    encoded = iter(encode(short)["input_ids"] if short else [])
    sequences = [next(encoded) if _is_short(text) else _in_pieces(tokenizer, encode, text, enough) for text in texts]
    # Without `special_tokens`, no text begins with a special token.
    prefix = added_prefix(tokenizer) if special_tokens else []
    return [with_one_prefix(ids, prefix) for ids in sequences]


def token_spans(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """Return the first character and the one after the last for each token of a text, without the EOS that some
    tokenizers add; equal ones for the tokens added before it. Raise DataError if the tokenizer does not know them.
    """
    check_offsets(tokenizer)
    encode = partial(tokenizer, split_special_tokens=True, return_offsets_mapping=True, verbose=False)
    before, after = _added(tokenizer)
    if _is_short(text):
        spans: list[tuple[int, int]] = encode(text)["offset_mapping"]
        return spans[: len(spans) - len(after)]
    spans = [(0, 0)] * len(before)
    start = 0
    for piece in pieces(text):
        offsets = encode(piece, add_special_tokens=False)["offset_mapping"]
        spans += [(start + first, start + last) for first, last in offsets]
        start += len(piece)
    return spans


def check_offsets(tokenizer: Any) -> None:
    """Raise DataError if the tokenizer does not know the characters of its tokens, as those written in Python."""
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__}: does not know the characters of its tokens, which chats, examples, eval "
            "context and check-server need; convert it to tokenizer.json"
        )


def added_prefix(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts before a text: BOS, two tokens as that of GLM-4, or none."""
    before, _ = _added(tokenizer)
    return before


def _added(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer puts before and after a text."""
    framed: list[int] = tokenizer("a")["input_ids"]
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    start = framed.index(bare[0])
    return framed[:start], framed[start + len(bare) :]


def special_tokens_of(tokenizer: Any) -> tuple[str, ...]:
    """Return the special tokens of a tokenizer. `all_special_tokens` lacks those that its settings do not name, as most
    of Llama 3.
    """
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)


def with_one_prefix(ids: Any, prefix: list[int]) -> Any:
    """Return the tokens of a text without a second `prefix`, such as BOS, if text and tokenizer both give one."""
    added = len(prefix)
    next_tokens = list(ids[added : 2 * added])
    return ids[added:] if next_tokens == prefix else ids


def strip_eos(ids: Any, eos: int | None) -> Any:
    """Return the tokens of a text without the EOS that some tokenizers add."""
    return ids[:-1] if eos in ids[-1:] else ids


def prompt_ids(tokenizer: Any, text: str, special_tokens: bool = True) -> Any:
    """Return the tokens of a text with the BOS of the tokenizer, without EOS. Without `special_tokens`, special tokens
    in the text are text.
    """
    ids = tokenizer(text, split_special_tokens=not special_tokens, verbose=False)["input_ids"]
    return strip_eos(with_one_prefix(ids, added_prefix(tokenizer)), tokenizer.eos_token_id)


def _is_short(text: str) -> bool:
    return len(text) <= 2 * PIECE


def _in_pieces(tokenizer: Any, encode: Callable[..., Any], text: str, enough: float) -> Tokens:
    before, after = _added(tokenizer)
    ids = array("i", before)
    for piece in pieces(text):
        ids.extend(encode(piece, add_special_tokens=False)["input_ids"])
        if len(ids) >= enough:
            break
    ids.extend(after)
    return ids


def pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of at most `PIECE` characters, cut after a line break where there is one."""
    start = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def in_batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield lists of at most `TEXTS_AT_ONCE` items: texts tokenized together, or rows written together."""
    remaining = iter(items)
    while batch := list(itertools.islice(remaining, TEXTS_AT_ONCE)):
        yield batch


def padding_id(tokenizer: Any) -> int:
    """Return the id of padding tokens: EOS if the tokenizer has no padding token."""
    if tokenizer.pad_token_id is None:
        return int(tokenizer.eos_token_id)
    return int(tokenizer.pad_token_id)


def tokenizer_identity(tokenizer: Any) -> str:
    """Return a digest of everything that determines the token ids of a text."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # Options of the last call, not properties of the tokenizer.
        del state["truncation"]
        del state["padding"]
    else:
        state = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    return digest_of({"end": tokenizer.eos_token_id, **state})

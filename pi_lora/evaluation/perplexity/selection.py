"""The documents that perplexity is measured on: chosen by their length in tokens, cut, and counted."""

import random
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pi_lora.data.corpus import PRESETS, Choice, evaluation_documents
from pi_lora.data.documents import Document
from pi_lora.data.packing import encoded
from pi_lora.errors import DataError, ModelError
from pi_lora.models.load import LoadedModel

# What a tokenizer may add to a text, such as BOS. Of the text itself it makes at most one token of a byte.
FRAME_TOKENS = 16


@dataclass(frozen=True)
class Measured:
    """A document as it is measured: where it came from, and its token ids, cut if they are to be."""

    name: str
    ids: Sequence[int]


@dataclass(frozen=True)
class Chosen:
    """The documents that are measured, under which choice, and how many were seen that are too short for it."""

    documents: list[Measured]
    choice: Choice
    too_short: int


def choose_documents(loaded: LoadedModel, source: str, choice: Choice, longest: int) -> Chosen:
    """The documents of `source` to measure windows of up to `longest` tokens on; a preset completes the `choice`.

    Raises:
        DataError: the source cannot be read, no document is long enough, or `choice` cuts all of them too short.
        ModelError: the tokenizer gives ids that the model does not have.
    """
    if source in PRESETS:
        choice = PRESETS[source].completed(choice)
    if choice.truncate is not None and choice.truncate < longest:
        raise DataError(
            f"--truncate: {choice.truncate} tokens do not hold a window of {longest}; choose more, or a shorter window"
        )
    needed = max(longest, choice.min_tokens or 0)
    documents: Iterable[Document] = evaluation_documents(source, choice.split, choice.column)
    passed_over = 0
    if choice.seed is not None:
        documents, passed_over = _drawn(documents, choice.seed, needed)
    found: list[Measured] = []
    lengths: list[int] = []
    for name, ids in _encoded(loaded, documents):
        lengths.append(len(ids))
        if len(ids) >= needed:
            _check_ids(loaded, ids)
            found.append(Measured(name, array("i", ids[: choice.truncate])))
        if len(found) == choice.documents:
            break
    if not found:
        option = "--windows" if needed == longest else "--min-tokens"
        raise DataError(
            f"{option}: {needed} tokens is longer than every document of {source} "
            f"(the longest has {max(lengths)}); choose a shorter window"
        )
    return Chosen(found, choice, passed_over + len(lengths) - len(found))


def _drawn(documents: Iterable[Document], seed: int, needed: int) -> tuple[list[Document], int]:
    """The documents that may have `needed` tokens, or else the longest, in random order; and how many others there are.

    Encoding a large corpus takes far longer than reading it.
    """
    held: list[Document] = []
    longest, seen = Document("", ""), 0
    for document in documents:
        seen += 1
        longest = max(longest, document, key=lambda each: len(each.text))
        if len(document.text.encode()) + FRAME_TOKENS >= needed:
            held.append(document)
    held = held or [longest]
    random.Random(seed).shuffle(held)
    return held, seen - len(held)


def _encoded(loaded: LoadedModel, documents: Iterable[Document]) -> Iterator[tuple[str, list[int]]]:
    """Names and token ids; no EOS is added, which a model would be asked to foresee."""

    def encode(texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = loaded.tokenizer(list(texts), verbose=False)["input_ids"]
        return ids

    names: deque[str] = deque()

    def texts() -> Iterator[str]:
        for document in documents:
            names.append(document.name)
            yield document.text

    for ids in encoded(texts(), encode):
        yield names.popleft(), ids


def _check_ids(loaded: LoadedModel, ids: Sequence[int]) -> None:
    known: Any = loaded.model.config.get_text_config().vocab_size
    if max(ids) >= known:
        raise ModelError(
            f"{loaded.name}: its tokenizer gives the id {max(ids)}, and the model knows {known} tokens; "
            "put the tokenizer beside it that it was trained with"
        )

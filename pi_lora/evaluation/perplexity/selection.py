"""The documents that perplexity is measured on: chosen by their length in tokens, truncated, and counted."""

import random
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pi_lora.data.corpus import PRESETS, Choice, evaluation_documents
from pi_lora.data.documents import Document
from pi_lora.data.packing import encoded
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import check_ids
from pi_lora.models.load import LoadedModel

# What a tokenizer may add to a text, such as BOS; of the text itself it makes at most one token per byte.
FRAME_TOKENS = 16


@dataclass(frozen=True)
class Measured:
    """A document as it is measured: its name, and its token ids, truncated if asked."""

    name: str
    ids: "array[int]"


@dataclass(frozen=True)
class Chosen:
    """The documents that are measured, the choice that was applied, and how many documents were too short for it."""

    documents: list[Measured]
    choice: Choice
    too_short: int


def choose_documents(loaded: LoadedModel, source: str, choice: Choice, longest: int) -> Chosen:
    """Return the documents of `source` for windows of up to `longest` tokens; a preset completes the `choice`.

    Raises:
        DataError: the source cannot be read, no document is long enough, or `choice` truncates all of them too short.
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
            check_ids(loaded, ids)
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
    """Return the documents that may have `needed` tokens, or else the longest, shuffled, and the number of all others.

    Judged by their bytes: encoding a large corpus takes far longer than reading it.
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
    """Yield names and token ids; without EOS, which the model would be asked to predict."""
    names: deque[str] = deque()

    def texts() -> Iterator[str]:
        for document in documents:
            names.append(document.name)
            yield document.text

    def encode(texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = loaded.tokenizer(list(texts), verbose=False)["input_ids"]
        return ids

    for ids in encoded(texts(), encode):
        yield names.popleft(), ids

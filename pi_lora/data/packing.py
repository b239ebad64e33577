"""Documents to training sequences of exactly L' tokens."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from datasets import Dataset

from pi_lora.data.corpus import RECALL, interleave, training_documents
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data

Encode = Callable[[str], list[int]]


def encoder(tokenizer: Any) -> Encode:
    """Text to token ids as the tokenizer frames a document: its own BOS where it has one, and EOS at the end."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        ends = bool(ids) and ids[-1] == tokenizer.eos_token_id
        return ids if ends or tokenizer.eos_token_id is None else [*ids, tokenizer.eos_token_id]

    return encode


def wrapped(documents: Iterable[list[int]], length: int) -> Iterator[list[int]]:
    """Cut the continuous stream of `documents` into sequences of exactly `length` tokens; only the last rest is lost.

    >>> list(wrapped([[1, 2, 3], [4, 5], [6, 7]], length=3))
    [[1, 2, 3], [4, 5, 6]]
    """
    stream = itertools.chain.from_iterable(documents)
    while len(sequence := list(itertools.islice(stream, length))) == length:
        yield sequence


def aligned(documents: Iterator[list[int]], length: int) -> Iterator[list[int]]:
    """Sequences of exactly `length` tokens that each begin with a document: what one asks about stands in it."""
    while sequence := next(wrapped(documents, length), None):
        yield sequence


def training_sequences(data: Data, tokenizer: Any, length: int, number: int) -> Dataset:
    """`number` sequences of `length` tokens from the sources of a recipe, mixed by weight, seeded.

    Returns:
        A data set with the columns `input_ids` and `labels`, `(number, length)` each.

    Raises:
        DataError: a source cannot be read, or the sources hold too little text.
    """
    encode = encoder(tokenizer)
    streams = [_sequences(source.name, data.seed, encode, length) for source in data.source]
    drawn = interleave(streams, [source.weight for source in data.source], data.seed)
    sequences = [sequence for _, sequence in itertools.islice(drawn, number)]
    if len(sequences) < number:
        names = ", ".join(source.name for source in data.source)
        raise DataError(
            f"data.source: {names}: {len(sequences) * length:,} tokens at hand, {number * length:,} needed; "
            "add a source, or lower training.steps"
        )
    return Dataset.from_dict({"input_ids": sequences, "labels": sequences})


def _sequences(source: str, seed: int, encode: Encode, length: int) -> Iterator[list[int]]:
    # A framed document is longer than its text by BOS and EOS.
    frame = len(encode(""))
    documents = training_documents(source, seed, length - frame, lambda text: len(encode(text)) - frame)
    encoded: Iterator[list[int]] = (encode(document.text) for document in documents)
    return aligned(encoded, length) if source == RECALL else wrapped(encoded, length)

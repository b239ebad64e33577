"""A source to its sequences of token ids, one after the other, with a count of the text that went into them."""

import hashlib
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from pi_lora.data import recall
from pi_lora.data.cache import Layout, Row, cached
from pi_lora.data.corpus import RECALL, STDLIB, StandardLibrary, find_corpus
from pi_lora.data.packing import (
    Encode,
    Tokens,
    aligned,
    bfd_split,
    encoded,
    encoder,
    skip_positions,
    tokenizer_identity,
    wrapped,
)
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Source
from pi_lora.types import Progress, silent


class Stream(ABC):
    """The sequences of one source; `tokens`, `documents` and `left_out` say what was read for them so far."""

    def __init__(self, source: Source, data: Data, encode: Encode, length: int) -> None:
        self.source, self.data, self.encode, self.length = source, data, encode, length
        self.tokens = self.documents = self.left_out = 0

    @abstractmethod
    def sequences(self) -> Iterator[Tokens]:
        """Sequences of exactly `length` tokens, until the source is used up.

        Raises:
            DataError: (while reading) the source cannot be read.
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What decides the source's text, as JSON."""


class TextStream(Stream):
    """Text that is there, as often as `data.epochs` allows; each epoch has an order of its own."""

    def __init__(self, source: Source, data: Data, encode: Encode, length: int) -> None:
        super().__init__(source, data, encode, length)
        self.corpus = find_corpus(source)

    def identity(self) -> dict[str, Any]:
        """The corpus's."""
        return self.corpus.identity()

    def sequences(self) -> Iterator[Tokens]:
        """One stream of all epochs, packed as the recipe says."""
        if self.data.packing == "bfd_split":
            return bfd_split(self._documents(), self.length, self.data.seed)
        return wrapped(self._documents(), self.length)

    def _documents(self) -> Iterator[Tokens]:
        for epoch in range(self.data.epochs):
            texts = (document.text for document in self.corpus.documents(self.data.seed + epoch))
            for ids in encoded(texts, self.encode):
                if len(ids) < self.data.min_document_tokens:
                    self.left_out += not epoch  # each document once
                else:
                    self.documents += 1
                    self.tokens += len(ids)
                    yield ids


class RecallStream(Stream):
    """`builtin:recall`: made to the length of a sequence, which begins with a document however text is packed."""

    def identity(self) -> dict[str, Any]:
        """What its filler is taken from, and the code that makes it up."""
        code = hashlib.sha256(Path(recall.__file__).read_bytes()).hexdigest()
        return {**StandardLibrary(STDLIB, "train").identity(), "code": code}

    def sequences(self) -> Iterator[Tokens]:
        """Without end."""
        return aligned(self._documents(), self.length)

    def _documents(self) -> Iterator[Tokens]:
        # A framed document is longer than its text by BOS and EOS.
        frame = self._count("")
        filler = StandardLibrary(STDLIB, "train").documents()
        lines = [line for document in filler for line in document.text.splitlines() if line.strip()]
        texts = recall.recall_documents(
            self.data.seed, self.length - frame, lambda text: self._count(text) - frame, lines
        )
        for text in texts:
            # Not many at a time: they are made up, at a cost, until there are enough.
            [ids] = self.encode([text])
            self.documents += 1
            self.tokens += len(ids)
            yield ids

    def _count(self, text: str) -> int:
        return len(self.encode([text])[0])


def stream_of(source: Source, data: Data, encode: Encode, length: int) -> Stream:
    """The stream of `source`, found but not yet read.

    Raises:
        DataError: the source is not there.
    """
    kind = RecallStream if source.name == RECALL else TextStream
    return kind(source, data, encode, length)


# Of how sequences are made: raise it with every change that makes other ones, so that no older cache is taken for them.
FORMAT = 1


def training_sequences(
    data: Data, tokenizer: Any, original: int, target: int, number: int, progress: Progress | None = None
) -> Dataset:
    """`number` sequences from the sources of a recipe, mixed by weight, seeded; made once, then read from the cache.

    Each source is drawn as often as its weight says. When one runs out of text before it was drawn as often as it
    should be, that is an error, since going on without it would train on another mixture than the recipe names.

    Args:
        data: the recipe's section.
        tokenizer: of the base model.
        original: L in tokens: the length of sequences whose positions skip.
        target: L' in tokens: the length of all others.
        number: how many sequences.
        progress: called with the tokens packed, those needed, and a note, while they are made.

    Returns:
        A data set with the column `input_ids`, `(number, length)`, and `position_ids` where they skip, as NumPy arrays
        that are mapped into memory; `batches.collate` makes the batch of them.

    Raises:
        DataError: a source cannot be read or holds too little text, or the cache cannot be written.
    """
    length = original if data.positions == "skip" else target
    if data.positions == "skip" and data.chunks > original:
        raise DataError(f"data.chunks: {data.chunks} chunks do not fit into {original} tokens; choose fewer")
    total, encode = number * length, encoder(tokenizer)
    tell: Progress = progress or (silent)
    streams = [stream_of(source, data, encode, length) for source in data.source]
    made_from = {
        "format": FORMAT,
        "sources": [{**stream.source.model_dump(), **stream.identity()} for stream in streams],
        "data": data.model_dump(exclude={"source"}),
        "tokenizer": tokenizer_identity(tokenizer),
        "original": original if data.positions == "skip" else None,
        "target": target,
        "number": number,
    }

    def rows() -> Iterator[Row]:
        drawn = _packed(streams, data, number)
        for done, row in enumerate(_positioned(drawn, data, original, target), 1):
            tell(done * length, total, _left_out(streams, data))
            yield row

    layout = Layout(_columns(data, tokenizer), length, number)
    return cached(made_from, layout, rows, lambda: tell(0, total, "waiting for another process that packs the same"))


def drawn_order(weights: Sequence[float], number: int, seed: int) -> list[int]:
    """Which source each of `number` sequences comes from, as often as the weights say."""
    return random.Random(seed).choices(range(len(weights)), weights, k=number)


def _packed(streams: Sequence[Stream], data: Data, number: int) -> Iterator[Tokens]:
    order = drawn_order([source.weight for source in data.source], number, data.seed)
    sequences = [stream.sequences() for stream in streams]
    for index in order:
        sequence = next(sequences[index], None)
        if sequence is None:
            raise _too_little(streams[index], data, needed=Counter(order)[index] * streams[index].length)
        yield sequence


def _positioned(sequences: Iterator[Tokens], data: Data, original: int, target: int) -> Iterator[Row]:
    rng = random.Random(data.seed)
    for ids in sequences:
        if data.positions == "skip":
            yield {"input_ids": ids, "position_ids": skip_positions(rng, original, target, data.chunks)}
        else:
            yield {"input_ids": ids}


def _columns(data: Data, tokenizer: Any) -> dict[str, str]:
    ids = {"input_ids": "uint16" if len(tokenizer) <= 2**16 else "int32"}
    return {**ids, "position_ids": "int32"} if data.positions == "skip" else ids


def _left_out(streams: Sequence[Stream], data: Data) -> str:
    number = sum(stream.left_out for stream in streams)
    return f"documents of under {data.min_document_tokens} tokens left out: {number:,}" if number else ""


def _too_little(stream: Stream, data: Data, needed: int) -> DataError:
    """What to say when a source is used up: what it holds, what it should, and how many epochs would do."""
    where, short = f"data.source: {stream.source.name}", _left_out([stream], data)
    if not stream.tokens:
        return DataError(f"{where}: holds no document that is long enough ({short}); lower data.min_document_tokens")
    at_hand = f"{stream.tokens:,} tokens at hand in data.epochs: {data.epochs}" + (f" ({short})" if short else "")
    share = "" if len(data.source) == 1 else " for its share"
    epochs = math.ceil(needed * data.epochs / stream.tokens)
    return DataError(
        f"{where}: {at_hand}, {needed:,} needed{share}; set data.epochs to {epochs}, add text, or lower training.steps"
    )

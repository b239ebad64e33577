"""Sequences of token ids from the sources of a recipe, in the order that its weights and seed give."""

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from pi_lora.data import packing, recall
from pi_lora.data.cache import Layout, Row, cached
from pi_lora.data.corpus import RECALL, StandardLibrary, find_corpus
from pi_lora.data.packing import Encode, Tokens
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Source
from pi_lora.types import Json, Progress, silent

# Raise it with every change to how sequences are made, so that no older cache is taken for the new ones.
FORMAT = 1


class Stream:
    """The sequences of one source; `tokens` and `left_out` (documents) count what was read for them so far."""

    def __init__(self, source: Source, data: Data, encode: Encode, length: int) -> None:
        self.source, self.data, self.encode, self.length = source, data, encode, length
        self.tokens = self.left_out = 0
        # `builtin:recall` takes lines of the standard library to fill its documents with.
        self.corpus = StandardLibrary("train") if source.name == RECALL else find_corpus(source)

    def identity(self) -> Json:
        """Return what decides the source's text, as JSON."""
        if self.source.name != RECALL:
            return self.corpus.identity()
        code = hashlib.sha256(Path(recall.__file__).read_bytes()).hexdigest()
        return {**self.corpus.identity(), "code": code}

    def sequences(self) -> Iterator[Tokens]:
        """Yield sequences of exactly `length` tokens until the source is used up; `builtin:recall` has no end."""
        if self.source.name == RECALL:
            # However text is packed: the facts that a document asks for must stand in the same sequence.
            return packing.aligned(self._recall_documents(), self.length)
        if self.data.packing == "bfd_split":
            return packing.bfd_split(self._text_documents(), self.length, self.data.seed)
        return packing.wrapped(self._text_documents(), self.length)

    def _text_documents(self) -> Iterator[Tokens]:
        """Yield the documents of all epochs; each epoch has an order of its own."""
        for epoch in range(self.data.epochs):
            texts = (document.text for document in self.corpus.documents(self.data.seed + epoch))
            for ids in packing.encoded(texts, self.encode):
                if len(ids) < self.data.min_document_tokens:
                    self.left_out += not epoch  # each document once
                else:
                    self.tokens += len(ids)
                    yield ids

    def _recall_documents(self) -> Iterator[Tokens]:
        def count(text: str) -> int:
            return len(self.encode([text])[0])

        frame = count("")  # BOS and EOS
        lines = [line for document in self.corpus.documents() for line in document.text.splitlines() if line.strip()]
        budget = self.length - frame
        # One at a time: making them up costs more than encoding them.
        for text in recall.recall_documents(self.data.seed, budget, lambda text: count(text) - frame, lines):
            [ids] = self.encode([text])
            self.tokens += len(ids)
            yield ids


def training_sequences(
    data: Data, tokenizer: Any, original: int, target: int, number: int, progress: Progress = silent
) -> Dataset:
    """Make `number` sequences from the sources of a recipe, mixed by weight and seeded, or read them from the cache.

    Under PoSE (`positions: skip`) they have `original` (L) tokens and `position_ids`, otherwise `target` (L') tokens.
    Returns rows of `input_ids` as NumPy arrays mapped into memory; `batches.collate` makes the batch of them.
    `progress` is called with the tokens packed, those needed, and a note.

    Raises:
        DataError: a source cannot be read or has too little text for its share (going on without it would train on
            another mixture than the recipe names), or the cache cannot be written.
    """
    pose = data.positions == "skip"
    length = original if pose else target
    if pose and data.chunks > original:
        raise DataError(f"data.chunks: {data.chunks} chunks do not fit into {original} tokens; choose fewer")
    encode = packing.encoder(tokenizer)
    streams = [Stream(source, data, encode, length) for source in data.source]
    made_from = {
        "format": FORMAT,
        "sources": [{**stream.source.model_dump(), **stream.identity()} for stream in streams],
        "data": data.model_dump(exclude={"source"}),
        "tokenizer": packing.tokenizer_identity(tokenizer),
        "original": original if pose else None,
        "target": target,
        "number": number,
    }

    def rows() -> Iterator[Row]:
        rng = random.Random(data.seed)
        for done, ids in enumerate(_packed(streams, data, number), 1):
            progress(done * length, number * length, _left_out(streams, data))
            positions = {"position_ids": packing.skip_positions(rng, original, target, data.chunks)} if pose else {}
            yield {"input_ids": ids, **positions}

    columns = {"input_ids": packing.token_type(tokenizer), **({"position_ids": "int32"} if pose else {})}
    return cached(
        made_from,
        Layout(columns, length, number),
        rows,
        waiting=lambda: progress(0, number * length, "waiting for another process that packs the same"),
    )


def drawn_order(weights: Sequence[float], number: int, seed: int) -> list[int]:
    """Return which source each of `number` sequences comes from, as often as the weights say."""
    return random.Random(seed).choices(range(len(weights)), weights, k=number)


def _packed(streams: Sequence[Stream], data: Data, number: int) -> Iterator[Tokens]:
    order = drawn_order([source.weight for source in data.source], number, data.seed)
    sequences = [stream.sequences() for stream in streams]
    for index in order:
        sequence = next(sequences[index], None)
        if sequence is None:
            raise _too_little(streams[index], data, needed=Counter(order)[index] * streams[index].length)
        yield sequence


def _left_out(streams: Sequence[Stream], data: Data) -> str:
    number = sum(stream.left_out for stream in streams)
    return f"documents of under {data.min_document_tokens} tokens left out: {number:,}" if number else ""


def _too_little(stream: Stream, data: Data, needed: int) -> DataError:
    """Say that a source is used up: what it holds, what it should, and how many epochs would do."""
    where, short = f"data.source: {stream.source.name}", _left_out([stream], data)
    if not stream.tokens:
        return DataError(f"{where}: holds no document that is long enough ({short}); lower data.min_document_tokens")
    at_hand = f"{stream.tokens:,} tokens at hand in data.epochs: {data.epochs}" + (f" ({short})" if short else "")
    share = "" if len(data.source) == 1 else " for its share"
    epochs = math.ceil(needed * data.epochs / stream.tokens)
    return DataError(
        f"{where}: {at_hand}, {needed:,} needed{share}; set data.epochs to {epochs}, add text, or lower training.steps"
    )

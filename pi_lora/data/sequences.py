"""Sequences of token ids from the sources of a recipe, in the order that its weights and seed give."""

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from pi_lora.data import packing, recall
from pi_lora.data.cache import Row, cached, columns_of
from pi_lora.data.corpus import RECALL, StandardLibrary, find_corpus
from pi_lora.data.packing import Encode, Tokens
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Source
from pi_lora.types import Json, Progress, silent

# Raise it with every change to how sequences are made, so that no older cache is taken for the new ones.
FORMAT = 2


class Stream:
    """The sequences of one source; `tokens` and `left_out` (documents) count what was read for them so far."""

    def __init__(self, source: Source, data: Data, encode: Encode, length: int) -> None:
        self.source, self.data, self.encode, self.length = source, data, encode, length
        self.tokens = self.left_out = 0
        # `builtin:recall` takes lines of the standard library to fill its documents with.
        self.corpus = StandardLibrary("train") if source.name == RECALL else find_corpus(source)

    def identity(self) -> Json:
        """Return the source and what decides its text, as JSON."""
        found = {**self.source.model_dump(), **self.corpus.identity()}
        if self.source.name == RECALL:
            found["code"] = hashlib.sha256(Path(recall.__file__).read_bytes()).hexdigest()
        return found

    def sequences(self) -> Iterator[Tokens]:
        """Yield sequences of exactly `length` tokens until the source is used up; `builtin:recall` has no end."""
        if self.source.name == RECALL:
            # However text is packed: the facts that a document asks for must stand in the same sequence.
            return packing.aligned(self._recall_documents(), self.length)
        if self.data.packing == "bfd_split":
            return packing.bfd_split(self._text_documents(), self.length, self.data.seed)
        return packing.wrapped(self._text_documents(), self.length)

    def _text_documents(self) -> Iterator[Tokens]:
        # Each epoch has an order of its own.
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
        made_up = recall.recall_documents(self.data.seed, self.length - frame, lambda text: count(text) - frame, lines)
        # One at a time: making them up costs more than encoding them.
        yield from (self.encode([text])[0] for text in made_up)

    def too_little(self, needed: int) -> str:
        """Return what is wrong when the source is used up: its tokens, those needed, and how many epochs would do."""
        where, short, epochs = f"data.source: {self.source.name}", _left_out(self), self.data.epochs
        if not self.tokens:
            return f"{where}: holds no document that is long enough ({short}); lower data.min_document_tokens"
        at_hand = f"{self.tokens:,} tokens at hand in data.epochs: {epochs}" + (f" ({short})" if short else "")
        share = "" if len(self.data.source) == 1 else " for its share"
        more = f"set data.epochs to {math.ceil(needed * epochs / self.tokens)}, add text, or lower training.steps"
        return f"{where}: {at_hand}, {needed:,} needed{share}; {more}"


def training_sequences(
    data: Data, tokenizer: Any, original: int, target: int, number: int, progress: Progress = silent
) -> Dataset:
    """Make `number` sequences from the sources of a recipe, mixed by weight and seeded, or read them from the cache.

    Under PoSE (`positions: skip`) they have `original` (L) tokens and `position_ids`, otherwise `target` (L') tokens.
    Returns rows of `input_ids` as NumPy arrays mapped into memory; `batches.collate` makes the batch of them.
    `progress` is called with the tokens packed, those needed, and a note. Raises DataError if a source has too little
    text for its share: going on without it would train on another mixture than the recipe names.
    """
    pose = data.positions == "skip"
    length = original if pose else target
    if pose and data.chunks > original:
        raise DataError(f"data.chunks: {data.chunks} chunks do not fit into {original} tokens; choose fewer")
    encode = packing.encoder(tokenizer)
    streams = [Stream(source, data, encode, length) for source in data.source]
    made_from = {
        "format": FORMAT,
        "sources": [stream.identity() for stream in streams],
        "data": data.model_dump(exclude={"source"}),
        "tokenizer": packing.tokenizer_identity(tokenizer),
        "original": original if pose else None,
        "target": target,
        "number": number,
    }

    def rows() -> Iterator[Row]:
        rng = random.Random(data.seed)
        order = drawn_order([source.weight for source in data.source], number, data.seed)
        sequences = [stream.sequences() for stream in streams]
        for done, index in enumerate(order, 1):
            if (ids := next(sequences[index], None)) is None:
                raise DataError(streams[index].too_little(order.count(index) * length))
            progress(done * length, number * length, _left_out(*streams))
            positions = {"position_ids": packing.skip_positions(rng, original, target, data.chunks)} if pose else {}
            yield {"input_ids": ids, **positions}

    columns = {"input_ids": packing.token_type(tokenizer), **({"position_ids": "int32"} if pose else {})}
    note = "waiting for another process that packs the same"
    return cached(made_from, columns_of(columns, length), rows, lambda: progress(0, number * length, note))[0]


def drawn_order(weights: Sequence[float], number: int, seed: int) -> list[int]:
    """Return which source each of `number` sequences comes from, as often as the weights say."""
    return random.Random(seed).choices(range(len(weights)), weights, k=number)


def _left_out(*streams: Stream) -> str:
    number = sum(stream.left_out for stream in streams)
    return f"documents of under {streams[0].data.min_document_tokens} tokens left out: {number:,}" if number else ""

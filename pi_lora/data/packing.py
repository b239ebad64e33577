"""Token ids to sequences of equal length from the sources of a recipe, mixed by weight and seed."""

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from pi_lora.data.cache import Row, cached, columns_of
from pi_lora.data.recall import recall_document
from pi_lora.data.sources import RECALL, Table, find_corpus
from pi_lora.data.tokens import Encode, Tokens, encoder, in_batches, token_type, tokenizer_identity
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Source
from pi_lora.types import Progress, silent

# Raise it with every change to how sequences or recall documents are made: older caches are not taken for new ones.
FORMAT = 4


def skip_positions(rng: random.Random, tokens: int, target: int, chunks: int) -> list[int]:
    """Draw strictly increasing positions for `tokens` tokens within `[0, target)` (L') that begin at 0: consecutive
    runs with gaps between them. Needs chunks <= tokens <= L'.

    PoSE (Zhu et al. 2023, section 3.2) has L tokens; fewer work alike. They are divided into `chunks` of random
    lengths, and chunk i is shifted by a bias u_i drawn uniformly from u_(i-1) ... L' - tokens, with u_0 = 0. The text
    itself stays contiguous (their v_i = 0).

    >>> skip_positions(random.Random(0), tokens=6, target=24, chunks=2)
    [0, 1, 2, 3, 17, 18]
    """
    starts = [0, *sorted(rng.sample(range(1, tokens), chunks - 1)), tokens]
    positions: list[int] = []
    bias = 0
    for start, end in itertools.pairwise(starts):
        if start:
            bias = rng.randint(bias, target - tokens)
        positions += range(start + bias, end + bias)
    return positions


def wrapped(documents: Iterable[Tokens], length: int) -> Iterator[Tokens]:
    """Cut the continuous stream of `documents` into sequences of exactly `length` tokens; only the last rest is lost.

    `trl.pack_dataset` (1.16) cuts each batch of documents by itself, and its sequences differ in length.

    >>> list(wrapped([[1, 2, 3], [4, 5], [6, 7]], length=3))
    [[1, 2, 3], [4, 5, 6]]
    """
    stream = itertools.chain.from_iterable(documents)
    while len(sequence := list(itertools.islice(stream, length))) == length:
        yield sequence


def aligned(documents: Iterator[Tokens], length: int) -> Iterator[Tokens]:
    """Yield sequences of exactly `length` tokens that each begin with a document."""
    while sequence := next(wrapped(documents, length), None):
        yield sequence


@dataclass
class Stream:
    """The sequences of one source; `tokens` and `left_out` (documents) count what was read for them so far."""

    source: Source
    corpus: Table
    data: Data
    encode: Encode
    length: int
    tokens: int = 0
    left_out: int = 0

    def sequences(self) -> Iterator[Tokens]:
        """Yield sequences of exactly `length` tokens until the source is used up; `builtin:recall` has no end."""
        if self.source.name == RECALL:
            # The facts that a document asks for must stand in the same sequence.
            return aligned(self._recall_documents(), self.length)
        return wrapped(self._text_documents(), self.length)

    def _text_documents(self) -> Iterator[Tokens]:
        # Each epoch has an order of its own.
        for epoch in range(self.data.epochs):
            texts = (document.text for document in self.corpus.documents(self.data.seed + epoch))
            batches = in_batches(texts, len)
            for ids in itertools.chain.from_iterable(map(self.encode, batches)):
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
        rng = random.Random(self.data.seed)
        while True:
            text = recall_document(rng, self.length - frame, lambda text: count(text) - frame, lines)
            yield self.encode([text])[0]

    def too_little(self, needed: int) -> DataError:
        """Return what is wrong when the source is used up: its tokens, those needed, and how many epochs would do."""
        where, epochs = f"data.source: {self.source.name}", self.data.epochs
        if not self.tokens:
            return DataError(f"{where}: every document is shorter than data.min_document_tokens; lower it")
        more = f"set data.epochs to {math.ceil(needed * epochs / self.tokens)}, add text, or lower training.steps"
        at_hand = f"{self.tokens:,} tokens at hand in data.epochs: {epochs}, {needed:,} needed for its share"
        return DataError(f"{where}: {at_hand}; {more}")


def training_sequences(
    data: Data,
    tokenizer: Any,
    original: int,
    target: int,
    number: int,
    progress: Progress = silent,
) -> Dataset:
    """Make `number` sequences from the sources of a recipe, mixed by weight and seeded, or read them from the cache:
    rows of `input_ids` as NumPy arrays mapped into memory. `progress` is told the tokens packed,
    those needed, and a note: first with 0, or never where they are in the cache.

    Under PoSE (`positions: skip`) they have `sequence_tokens`, by default `original` (L), and `position_ids`; otherwise
    `target` (L') tokens. Raise DataError if a source has too little text for its share: going on without it would train
    on another mixture than the recipe names.
    """
    pose = data.positions == "skip"
    length = data.tokens_per_sequence(original, target)
    if pose and data.chunks > length:
        raise DataError(f"data.chunks: {data.chunks} chunks do not fit into {length} tokens; choose fewer")
    encode = encoder(tokenizer, data.special_tokens)
    streams = [Stream(source, find_corpus(source), data, encode, length) for source in data.source]
    made_from = {
        "format": FORMAT,
        "sources": [{**stream.source.model_dump(), **stream.corpus.identity()} for stream in streams],
        "data": data.model_dump(exclude={"source", "sequence_tokens"}),
        "tokenizer": tokenizer_identity(tokenizer),
        "length": length,
        "target": target,
        "number": number,
    }

    def rows() -> Iterator[Row]:
        progress(0, number * length)
        rng = random.Random(data.seed)
        weights = [source.weight for source in data.source]
        order = random.Random(data.seed).choices(range(len(weights)), weights, k=number)
        sequences = [stream.sequences() for stream in streams]
        for done, index in enumerate(order, 1):
            if (ids := next(sequences[index], None)) is None:
                raise streams[index].too_little(order.count(index) * length)
            short = sum(stream.left_out for stream in streams)
            note = f"documents of under {data.min_document_tokens} tokens left out: {short:,}" if short else ""
            progress(done * length, number * length, note)
            positions = {"position_ids": skip_positions(rng, length, target, data.chunks)} if pose else {}
            yield {"input_ids": ids, **positions}

    columns = {"input_ids": token_type(tokenizer), **({"position_ids": "int32"} if pose else {})}
    return cached(made_from, columns_of(columns, length), rows)[0]

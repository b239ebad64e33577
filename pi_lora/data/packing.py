"""Token ids to sequences of equal length from the sources of a recipe, mixed by weight and seed."""

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, Features

from pi_lora.data.cache import FLAGS, INTEGERS, Row, cached
from pi_lora.data.chats import Chat, ChatTemplate, grouped, packed, read_chats
from pi_lora.data.recall import recall_document
from pi_lora.data.sources import RECALL, Table, find_corpus
from pi_lora.data.tokens import Encode, Tokens, encoder, in_batches, padding_id, tokenizer_identity
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Source
from pi_lora.types import Progress, silent

# Raise it with every change to how sequences or recall documents are made: older caches are not taken for new ones.
FORMAT = 5


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
    """The sequences of one source; `tokens` counts what was read for them so far, `left_out` what was not used."""

    source: Source
    corpus: Table
    data: Data
    encode: Encode
    length: int
    tokens: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def sequences(self) -> Iterator[Row]:
        """Yield sequences of exactly `length` tokens until the source is used up; `builtin:recall` has no end."""
        if self.source.name == RECALL:
            # The facts that a document asks for must stand in the same sequence.
            found = aligned(self._recall_documents(), self.length)
        else:
            found = wrapped(self._text_documents(), self.length)
        return ({"input_ids": ids} for ids in found)

    def _text_documents(self) -> Iterator[Tokens]:
        # Each epoch has an order of its own.
        for epoch in range(self.data.epochs):
            texts = (document.text for document in self.corpus.documents(self.data.seed + epoch))
            batches = in_batches(texts, len)
            for ids in itertools.chain.from_iterable(map(self.encode, batches)):
                if len(ids) < self.data.min_document_tokens:
                    self.left_out[f"documents of under {self.data.min_document_tokens} tokens"] += not epoch
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

    @property
    def notes(self) -> list[str]:
        """What was left out, a line for each reason."""
        return [f"{documents} left out: {number:,}" for documents, number in self.left_out.items()]

    def too_little(self, needed: int) -> DataError:
        """Return what is wrong when the source is used up: its tokens, those needed, and what to do."""
        at_hand = ", ".join([f"{self.tokens:,} tokens in data.epochs: {self.data.epochs}", *self.notes])
        do = "add text, raise data.epochs, or lower training.steps"
        return DataError(f"data.source: {self.source.name}: holds {at_hand}; {needed:,} are needed for its share; {do}")


@dataclass
class ChatStream(Stream):
    """The sequences of a source of chats."""

    template: ChatTemplate = field(kw_only=True)
    padding: int = field(kw_only=True)

    def sequences(self) -> Iterator[Row]:
        """Yield sequences of whole chats, padded to `length` tokens."""
        for chats in packed(self._chats(), self.length):
            row = _joined(chats)
            rest = self.length - len(row["input_ids"])
            ids, learned = row["input_ids"] + rest * [self.padding], row["learned"] + rest * [False]
            yield {"input_ids": ids, "learned": learned, "lengths": [self.length]}

    def short_sequences(self, original: int) -> Iterator[Row]:
        """Yield groups of chats of at most `original` tokens (L), which keep their lengths and positions."""
        short = (chat for chat in self._chats() if len(chat.ids) <= original)
        for chats in grouped(short, self.length):
            positions = [position for chat in chats for position in range(len(chat.ids))]
            yield {**_joined(chats), "position_ids": positions}

    def _chats(self) -> Iterator[Chat]:
        for epoch in range(self.data.epochs):
            rows = self.corpus.read([self.source.column], self.data.seed + epoch)
            left_out = self.left_out if not epoch else Counter[str]()
            for _, chat in read_chats(rows, self.source.column, self.template, self.length, left_out):
                self.tokens += len(chat.ids)
                yield chat


def _joined(chats: Sequence[Chat]) -> dict[str, list[int]]:
    return {
        "input_ids": [token for chat in chats for token in chat.ids],
        "learned": [learned for chat in chats for learned in chat.learned],
        "lengths": [len(chat.ids) for chat in chats],
    }


def training_sequences(
    data: Data,
    tokenizer: Any,
    original: int,
    target: int,
    number: int,
    progress: Progress = silent,
) -> tuple[Dataset, list[str]]:
    """Make `number` sequences from the sources of a recipe, mixed by weight and seeded, or read them from the cache:
    rows of `input_ids` as NumPy arrays mapped into memory, and lines about what was left out. `progress` is told the
    tokens packed and those needed: first with 0, or never where they are in the cache. Where there are chats, a row
    says which tokens are `learned`, and the `lengths` of the sequences in it: several of short chats.

    Under PoSE (`positions: skip`) they have `sequence_tokens`, by default `original` (L), and `position_ids`; otherwise
    `target` (L') tokens. Raise DataError if a source has too little text for its share: going on without it would train
    on another mixture than the recipe names.
    """
    pose, length = data.positions == "skip", data.tokens_per_sequence(original, target)
    streams = _streams(data, tokenizer, length)
    made_from = {
        "format": FORMAT,
        "sources": [{**stream.source.model_dump(), **stream.corpus.identity()} for stream in streams],
        "data": data.model_dump(exclude={"source", "sequence_tokens"}),
        "tokenizer": tokenizer_identity(tokenizer),
        "template": tokenizer.chat_template,
        "length": length,
        "original": original,
        "target": target,
        "number": number,
    }

    def rows() -> Iterator[Row]:
        progress(0, number * length)
        rng = random.Random(data.seed)
        drawn = [(stream, stream.sequences(), stream.source.weight) for stream in streams]
        if data.keep_short:
            # Streams of their own: a chat is used at its own length and in a long sequence.
            chats = [stream for stream in _streams(data, tokenizer, length) if isinstance(stream, ChatStream)]
            others, own = (sum(stream.source.weight for stream in some) for some in (streams, chats))
            share = data.keep_short / (1 - data.keep_short) * others / own
            drawn += [(stream, stream.short_sequences(original), share * stream.source.weight) for stream in chats]
        weights = [weight for *_, weight in drawn]
        order = random.Random(data.seed).choices(range(len(drawn)), weights, k=number)
        for done, index in enumerate(order, 1):
            stream, sequences, _ = drawn[index]
            if (row := next(sequences, None)) is None:
                raise stream.too_little(order.count(index) * length)
            progress(done * length, number * length)
            positions: Row = {"position_ids": skip_positions(rng, length, target, data.chunks)} if pose else {}
            everything: Row = {"learned": [True] * length, "lengths": [length]} if data.has_chats else {}
            whole: Row = {**positions, **everything, **row}
            yield {name: whole[name] for name in columns}

    def notes() -> list[str]:
        return [note for stream in streams for note in stream.notes]

    columns = {"input_ids": INTEGERS, **({"position_ids": INTEGERS} if pose else {})}
    columns |= {"learned": FLAGS, "lengths": INTEGERS} if data.has_chats else {}
    return cached(made_from, Features(columns), rows, notes)


def _streams(data: Data, tokenizer: Any, length: int) -> list[Stream]:
    template = ChatTemplate(tokenizer, data) if data.has_chats else None
    encode = encoder(tokenizer, data.special_tokens)
    return [
        ChatStream(source, find_corpus(source), data, encode, length, template=template, padding=padding_id(tokenizer))
        if template and source.has_chats
        else Stream(source, find_corpus(source), data, encode, length)
        for source in data.source
    ]

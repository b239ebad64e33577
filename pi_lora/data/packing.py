"""Text, chats and examples of the sources of a recipe to rows of token ids; packed sequences are mixed by weight."""

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pi_lora.data.chats import Chat, ChatTemplate
from pi_lora.data.examples import Prompter
from pi_lora.data.recall import recall_document
from pi_lora.data.sources import RECALL, count_lines, find_corpus, find_table
from pi_lora.data.tokens import Tokens, in_batches, padding_id, tokenized
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Source

# Columns of lists: `input_ids`, `position_ids` of PoSE, whether tokens are `learned`, `lengths` of sequences.
Row = Mapping[str, Sequence[int]]
# How many sequences of chats are filled at a time, and how many short chats are grouped by length.
OPEN_SEQUENCES, GROUPED_CHATS = 16, 256


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


def packed(chats: Iterable[Chat], length: int) -> Iterator[list[Chat]]:
    """Fill sequences of `length` tokens with whole chats: each goes into the oldest open sequence that has room.

    >>> [[len(chat.ids) for chat in chats] for chats in packed([Chat([0] * n, []) for n in (5, 6, 3, 2)], 9)]
    [[5, 3], [6, 2]]
    """
    sequences: list[list[Chat]] = []
    for chat in chats:
        room = length - len(chat.ids)
        with_room = [sequence for sequence in sequences if sum(len(other.ids) for other in sequence) <= room]
        if with_room:
            with_room[0].append(chat)
            continue
        if len(sequences) == OPEN_SEQUENCES:
            yield sequences.pop(0)
        sequences.append([chat])
    yield from sequences


def grouped(chats: Iterator[Chat], room: int) -> Iterator[list[Chat]]:
    """Group chats of similar lengths that take at most `room` tokens when they are padded to the longest of a group.

    >>> [[len(chat.ids) for chat in group] for group in grouped(iter([Chat([0] * n, []) for n in (5, 2, 3)]), 6)]
    [[2, 3], [5]]
    """
    while batch := sorted(itertools.islice(chats, GROUPED_CHATS), key=lambda chat: len(chat.ids)):
        group: list[Chat] = []
        for chat in batch:
            if group and (len(group) + 1) * len(chat.ids) > room:
                yield group
                group = []
            group.append(chat)
        yield group


@dataclass
class Stream:
    """The rows of a source: sequences of `length` tokens, examples of at most so many, or with `short` groups of its
    chats of at most `short` tokens. `tokens` counts what was read for them, `counts` what was cut or left out.
    """

    source: Source
    data: Data
    tokenizer: Any
    length: int
    short: int = 0

    def __post_init__(self) -> None:
        self.tokens, self.counts = 0, Counter[str]()
        self.table = find_table(self.source) if self.data.has_examples else find_corpus(self.source)
        if self.data.has_examples:
            self.prompter = Prompter(self.data, self.tokenizer, self.length)
        elif self.source.has_chats:
            self.template = ChatTemplate(self.tokenizer, self.data.loss == "all", self.data.special_tokens)

    def rows(self) -> Iterator[Row]:
        """Yield rows until the source is used up; `builtin:recall` has no end."""
        if self.data.has_examples:
            yield from self._examples()
        elif self.short:
            fitting = (chat for chat in self._chats() if len(chat.ids) <= self.short)
            for chats in grouped(fitting, self.length):
                positions = [position for chat in chats for position in range(len(chat.ids))]
                yield {**_joined(chats), "position_ids": positions}
        elif self.source.has_chats:
            for chats in packed(self._chats(), self.length):
                room = self.length - sum(len(chat.ids) for chat in chats)
                padding = Chat([padding_id(self.tokenizer)] * room, [False] * room)
                yield {**_joined([*chats, padding]), "lengths": [self.length]}
        else:
            sequences = self._recall() if self.source.name == RECALL else wrapped(self._documents(), self.length)
            for ids in sequences:
                yield {"input_ids": ids, "learned": [True] * self.length, "lengths": [self.length]}

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return texts in token ids with the BOS of the tokenizer, if it has one, and EOS."""
        sequences, end = tokenized(self.tokenizer, texts, self.data.special_tokens), self.tokenizer.eos_token_id
        for ids in sequences:
            if end is not None and (not ids or ids[-1] != end):
                ids.append(end)
        return sequences

    def too_little(self, needed: int) -> DataError:
        """Return the error when the source is used up: its tokens, those needed, and what to do."""
        at_hand = ", ".join([f"{self.tokens:,} tokens in data.epochs: {self.data.epochs}", *count_lines(self.counts)])
        do = "add text, raise data.epochs, or lower training.steps"
        return DataError(f"data.source: {self.source.name}: holds {at_hand}; {needed:,} are needed for its share; {do}")

    def _documents(self) -> Iterator[Tokens]:
        # Each epoch has an order of its own.
        for epoch in range(self.data.epochs):
            texts = (document.text for document in self.table.documents(self.data.seed + epoch))
            for ids in itertools.chain.from_iterable(map(self.encode, in_batches(texts, len))):
                if len(ids) < self.data.min_document_tokens:
                    self.counts[f"documents of under {self.data.min_document_tokens} tokens left out"] += not epoch
                else:
                    self.tokens += len(ids)
                    yield ids

    def _recall(self) -> Iterator[Tokens]:
        """Yield sequences that begin with a document: the facts that it asks for must stand in the same sequence."""

        def count(text: str) -> int:
            return len(self.encode([text])[0])

        frame = count("")  # BOS and EOS
        lines = [line for document in self.table.documents() for line in document.text.splitlines() if line.strip()]
        rng = random.Random(self.data.seed)
        while True:
            ids: list[int] = []
            while len(ids) < self.length:
                text = recall_document(rng, self.length - frame, lambda text: count(text) - frame, lines)
                ids += self.encode([text])[0]
            yield ids[: self.length]

    def _chats(self) -> Iterator[Chat]:
        for epoch in range(self.data.epochs):
            rows = self.table.read([self.source.column], self.data.seed + epoch)
            for _, chat in self.template.chats(rows, self.length, Counter() if epoch else self.counts):
                self.tokens += len(chat.ids)
                yield chat

    def _examples(self) -> Iterator[Row]:
        rows = self.table.read(self.prompter.task.columns, None)
        for batch in self.prompter.batches(rows, self.counts):
            completions = self.prompter.completions([row for _, row, _ in batch])
            for (_, _, prompt), completion in zip(batch, completions, strict=True):
                self.counts["documents cut"] += prompt.kept < prompt.document_tokens
                self.counts["completions cut"] += len(completion) > self.data.completion_tokens
                learned = [self.data.loss == "all"] * len(prompt.ids) + [True] * len(completion)
                yield {"input_ids": prompt.ids + completion, "learned": learned}


def _joined(chats: Sequence[Chat]) -> dict[str, list[int]]:
    return {
        "input_ids": [token for chat in chats for token in chat.ids],
        "learned": [learned for chat in chats for learned in chat.learned],
        "lengths": [len(chat.ids) for chat in chats],
    }


def mixed(streams: Sequence[Stream], original: int, target: int, number: int) -> Iterator[Row]:
    """Yield `number` sequences of the streams of a recipe, drawn by weight and seed, with positions for PoSE; short
    chats have at most `original` (L) tokens. Raise DataError if a source has too little text for its share: going on
    without it would train on another mixture than the recipe names.
    """
    data, length = streams[0].data, streams[0].length
    # Streams of their own: a chat is used at its own length and in a long sequence.
    short = [replace(stream, short=original) for stream in streams if stream.source.has_chats and data.keep_short]
    whole, own = (sum(stream.source.weight for stream in some) for some in (streams, short))
    share = data.keep_short / (1 - data.keep_short) * whole / (own or 1)
    drawn = [*streams, *short]
    weights = [stream.source.weight * (share if stream.short else 1) for stream in drawn]
    order = random.Random(data.seed).choices(range(len(drawn)), weights, k=number)
    rows = [stream.rows() for stream in drawn]
    rng = random.Random(data.seed)
    for index in order:
        if (row := next(rows[index], None)) is None:
            raise drawn[index].too_little(order.count(index) * length)
        positions = skip_positions(rng, length, target, data.chunks) if data.positions == "skip" else []
        yield {"position_ids": positions, **row}

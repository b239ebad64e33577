"""Text, chats and examples of the sources of a recipe to rows of token ids; packed sequences are mixed by weight."""

import itertools
import random
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pi_lora.data.chats import ChatTemplate
from pi_lora.data.examples import Prompter
from pi_lora.data.recall import recall_document
from pi_lora.data.sources import Table, format_counts
from pi_lora.data.tokens import Labelled, Tokens, added_prefix, in_batches, padding_id, tokenized
from pi_lora.errors import DataError
from pi_lora.recipe.data import RECALL, Data, Source

# Columns of lists: `input_ids`, `position_ids` of PoSE, `loss_mask`, `lengths` of sequences.
Row = Mapping[str, Sequence[int]]
# How many sequences of chats are filled at a time, and how many short texts are grouped by length.
OPEN_SEQUENCES = 16
GROUPED_TEXTS = 256
# The width of lines in characters, and the most lines of a recipe between facts: a stream may have no end.
LINE_WIDTH = 100
MAX_LINES = 300_000
# A source of at most so many bytes is packed by a dry run, which takes seconds.
SMALL_BYTES = 2**23


def pose_positions(rng: random.Random, tokens: int, target: int, chunks: int) -> list[int]:
    """Draw strictly increasing positions for `tokens` tokens within `[0, target)` (L') that begin at 0: consecutive
    runs with gaps between them. Needs chunks <= tokens <= L'.

    PoSE (Zhu et al. 2023, section 3.2) has L tokens; fewer work alike. They are divided into `chunks` of random
    lengths, and chunk i is shifted by a bias u_i drawn uniformly from u_(i-1) ... L' - tokens, with u_0 = 0. The text
    itself stays contiguous (their v_i = 0).

    >>> pose_positions(random.Random(0), tokens=6, target=24, chunks=2)
    [0, 1, 2, 3, 17, 18]
    """
    cuts = sorted(rng.sample(range(1, tokens), chunks - 1))
    starts = [0, *cuts, tokens]
    positions: list[int] = []
    bias = 0
    for start, end in itertools.pairwise(starts):
        if start:
            bias = rng.randint(bias, target - tokens)
        positions += range(start + bias, end + bias)
    return positions


def wrapped(documents: Iterable[Tokens], length: int, prefix: Sequence[int] = ()) -> Iterator[list[int]]:
    """Cut the continuous stream of `documents` into sequences of exactly `length` tokens; only the last rest is lost.
    A sequence that begins within a document begins with the tokens of `prefix`, as every input of the model does.

    `trl.pack_dataset` (1.16) cuts each batch of documents by itself, and its sequences differ in length.

    >>> list(wrapped([[1, 2, 3], [4, 5], [6, 7]], length=3))
    [[1, 2, 3], [4, 5, 6]]
    >>> list(wrapped([[0, 1, 2, 3, 4], [0, 5]], length=3, prefix=[0]))
    [[0, 1, 2], [0, 3, 4]]
    """
    stream = itertools.chain.from_iterable(documents)
    while True:
        sequence = list(itertools.islice(stream, len(prefix)))
        if sequence != list(prefix):
            sequence = [*prefix, *sequence]
        sequence += itertools.islice(stream, length - len(sequence))
        if len(sequence) < length:
            return
        yield sequence


def lines_of(table: Table) -> Iterator[str]:
    """Yield the lines of the training text that are not blank; a long line is wrapped."""
    for document in table.documents():
        for line in document.text.splitlines():
            if len(line) <= LINE_WIDTH and line.isascii():
                # As textwrap does, which takes longer than the rest of packing.
                if text := line.rstrip():
                    yield text
            else:
                yield from textwrap.wrap(line, LINE_WIDTH, expand_tabs=False, replace_whitespace=False)


def total_tokens(sequence: Iterable[Labelled]) -> int:
    """Return the number of tokens of the texts in a sequence."""
    return sum(len(text.ids) for text in sequence)


def packed(chats: Iterable[Labelled], length: int) -> Iterator[list[Labelled]]:
    """Fill sequences of `length` tokens with whole chats. A chat goes into the oldest open sequence that has room.

    >>> [[len(chat.ids) for chat in chats] for chats in packed([Labelled([0] * n, []) for n in (5, 6, 3, 2)], 9)]
    [[5, 3], [6, 2]]
    """
    sequences: list[list[Labelled]] = []
    for chat in chats:
        room = length - len(chat.ids)
        with_room = [sequence for sequence in sequences if total_tokens(sequence) <= room]
        if with_room:
            with_room[0].append(chat)
            continue
        if len(sequences) == OPEN_SEQUENCES:
            yield sequences.pop(0)
        sequences.append([chat])
    yield from sequences


def grouped(texts: Iterator[Labelled], room: int, rng: random.Random) -> Iterator[list[Labelled]]:
    """Group texts of similar lengths that take at most `room` tokens when they are padded to the longest of a group;
    the groups are in random order, since a run may take a few of them.

    >>> texts = iter([Labelled([0] * n, []) for n in (5, 2, 3)])
    >>> [[len(text.ids) for text in group] for group in grouped(texts, 6, random.Random(1))]
    [[5], [2, 3]]
    """
    while batch := list(itertools.islice(texts, GROUPED_TEXTS)):
        batch.sort(key=lambda text: len(text.ids))
        group: list[Labelled] = []
        groups = [group]
        for text in batch:
            padded = (len(group) + 1) * len(text.ids)
            if group and padded > room:
                group = []
                groups.append(group)
            group.append(text)
        rng.shuffle(groups)
        yield from groups


def columns(sequences: Sequence[Labelled]) -> dict[str, list[int]]:
    """Return the row that holds sequences one after the other, each with positions from 0."""
    ids: list[int] = []
    loss_mask: list[int] = []
    positions: list[int] = []
    for sequence in sequences:
        ids += sequence.ids
        loss_mask += sequence.loss_mask
        positions += range(len(sequence.ids))
    lengths = [len(sequence.ids) for sequence in sequences]
    return {"input_ids": ids, "loss_mask": loss_mask, "lengths": lengths, "position_ids": positions}


@dataclass
class Stream:
    """The rows of a source. A row is a packed sequence of `length` tokens (text, or whole chats), or an example of at
    most `length` tokens. With `short`, a row is a group of chats of at most `short` tokens, or of sequences of `short`
    tokens of text. `counts` counts the texts cut or left out. Recall documents have lines of `texts`.
    """

    table: Table
    data: Data
    tokenizer: Any
    length: int
    counts: Counter[str]
    short: int = 0
    texts: Sequence[Table] = ()

    @property
    def source(self) -> Source:
        """The source as the recipe names it."""
        return self.table.source

    @property
    def is_small(self) -> bool:
        """Whether all rows are on this machine, and few enough to make them in seconds."""
        return self.source.name != RECALL and 0 < self.table.size * self.data.epochs <= SMALL_BYTES

    @cached_property
    def prefix(self) -> list[int]:
        """The tokens that sequences begin with, such as BOS, if the tokenizer adds any."""
        return added_prefix(self.tokenizer)

    def rows(self) -> Iterator[list[Labelled]]:
        """Return the rows, until the source is used up; recall documents have no end."""
        if self.data.has_examples:
            return self._examples()
        if self.short:
            return grouped(self._short_texts(), self.length, random.Random(self.data.seed))
        if self.source.has_chats:
            return self._packed_chats()
        if self.source.name == RECALL:
            return self._unmasked(self._recall())
        return self._unmasked(wrapped(self._documents(), self.length, self.prefix))

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return texts in token ids with the BOS of the tokenizer, if it has one, and EOS."""
        sequences = tokenized(self.tokenizer, texts, self.data.special_tokens)
        end = self.tokenizer.eos_token_id
        for ids in sequences:
            if end not in ids[-1:]:
                ids.append(end)
        return sequences

    def _unmasked(self, sequences: Iterable[list[int]]) -> Iterator[list[Labelled]]:
        for ids in sequences:
            yield [Labelled(ids, [True] * len(ids))]

    def _short_texts(self) -> Iterator[Labelled]:
        if self.source.has_chats:
            return self._chats(self.short)
        sequences = wrapped(self._documents(), self.short, self.prefix)
        return itertools.chain.from_iterable(self._unmasked(sequences))

    def _documents(self) -> Iterator[Tokens]:
        fewest_tokens = self.data.min_document_tokens
        for epoch in range(self.data.epochs):
            # The order differs between epochs.
            documents = self.table.documents(self.data.seed + epoch)
            for batch in in_batches(documents):
                texts = [document.text for document in batch]
                for ids in self.encode(texts):
                    if len(ids) >= fewest_tokens:
                        yield ids
                    elif epoch == 0:
                        self.counts[f"documents of under {fewest_tokens} tokens left out"] += 1

    def _recall(self) -> Iterator[list[int]]:
        """Yield sequences that begin with a document, so that facts and their questions are in the same sequence."""

        def encode(text: str) -> Tokens:
            return self.encode([text])[0]

        frame = len(encode(""))  # BOS and EOS

        def count(text: str) -> int:
            return len(encode(text)) - frame

        texts = self.texts or [self.table]
        lines: list[str] = []
        for table in texts:
            lines += itertools.islice(lines_of(table), MAX_LINES // len(texts))
        rng = random.Random(self.data.seed)
        budget = self.length - frame
        while True:
            ids: list[int] = []
            while len(ids) < self.length:
                text = recall_document(rng, budget, count, lines)
                ids += encode(text)
            yield ids[: self.length]

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(
            self.tokenizer,
            train_on_all=self.data.loss == "all",
            special_tokens=self.data.special_tokens,
        )

    def _packed_chats(self) -> Iterator[list[Labelled]]:
        """Yield sequences of chats that begin with BOS: that of the first chat, or one before it."""
        before: list[Labelled] = []
        if self.prefix and not self._template.writes(self.prefix):
            before = [Labelled(self.prefix, [False] * len(self.prefix))]
        room = self.length - total_tokens(before)
        for chats in packed(self._chats(room), room):
            begins_with_prefix = chats[0].ids[: len(self.prefix)] == self.prefix
            yield chats if begins_with_prefix else [*before, *chats]

    def _chats(self, longest: int) -> Iterator[Labelled]:
        """Yield the chats of at most `longest` tokens."""
        column = self.source.column
        for epoch in range(self.data.epochs):
            rows = self.table.read([column], self.data.seed + epoch)
            counts = Counter() if epoch else self.counts
            for _, chat in self._template.chats(rows, column, longest, counts):
                yield chat

    def _examples(self) -> Iterator[list[Labelled]]:
        prompter = Prompter(self.data, self.tokenizer, self.length)
        for _, _, prompt, completion in prompter.examples(self.table, self.counts):
            document_is_cut = prompt.kept < prompt.document_tokens
            completion_is_cut = len(completion) > self.data.completion_tokens
            # Counts of zero fix the order in which the counts are reported.
            self.counts["documents cut"] += int(document_is_cut)
            self.counts["completions cut"] += int(completion_is_cut)
            prompt_mask = [self.data.loss == "all"] * len(prompt.ids)
            completion_mask = [True] * len(completion)
            yield [Labelled(prompt.ids + completion, prompt_mask + completion_mask)]


def training_rows(streams: Sequence[Stream], original: int, target: int, number: int) -> Iterator[Row]:
    """Yield all examples of the streams of a recipe, or `number` sequences drawn by weight and seed, with positions for
    PoSE. Short sequences have at most `original` (L) tokens. Raise DataError if a source has too little text for its
    share: going on without it would train on another mixture than the recipe names.
    """
    data = streams[0].data
    length = streams[0].length
    padding = padding_id(streams[0].tokenizer)
    if data.has_examples:
        for stream in streams:
            yield from map(columns, stream.rows())
        return
    drawn, order = _drawn(streams, original, number)
    rows = [stream.rows() for stream in drawn]
    rng = random.Random(data.seed)
    for done, index in enumerate(order):
        stream = drawn[index]
        sequences = next(rows[index], None)
        if sequences is None:
            drawn_before = order[:done].count(index)
            needed = order.count(index)
            raise _too_little_text(stream, drawn_before, needed)
        # Positions are drawn for short texts too: the order of the draws is part of the format of the cache.
        positions: list[int] = []
        if data.positions == "pose":
            positions = pose_positions(rng, length, target, data.chunks)
        if stream.short:
            yield columns(sequences)
        else:
            room = length - total_tokens(sequences)
            rest = Labelled([padding] * room, [False] * room)
            yield columns([*sequences, rest]) | {"lengths": [length], "position_ids": positions}


def shortfalls(streams: Sequence[Stream], original: int, number: int) -> Iterator[DataError]:
    """Yield the errors with which `training_rows` ends for `number` sequences, one for each stream with too little
    text; only streams of little text are read.
    """
    drawn, order = _drawn(streams, original, number)
    for index, stream in enumerate(drawn):
        if stream.is_small:
            needed = order.count(index)
            available = sum(1 for _ in itertools.islice(stream.rows(), needed))
            if available < needed:
                yield _too_little_text(stream, available, needed)


def _drawn(streams: Sequence[Stream], original: int, number: int) -> tuple[list[Stream], list[int]]:
    """Return the streams to draw from, and for each of `number` sequences the index of its stream."""
    drawn, weights = _with_short_texts(streams, original)
    return drawn, random.Random(streams[0].data.seed).choices(range(len(drawn)), weights, k=number)


def _with_short_texts(streams: Sequence[Stream], original: int) -> tuple[list[Stream], list[float]]:
    """Return the streams to draw from and their weights, with a stream of short texts for every source of chats, or of
    text if there are no chats, if `keep_short`: a text is used in short sequences and in a long one.
    """
    data = streams[0].data
    drawn = list(streams)
    weights = [stream.source.weight for stream in streams]
    if data.keep_short:
        chats = [stream for stream in streams if stream.source.has_chats]
        kept = chats or [stream for stream in streams if stream.source.has_text]
        longest = min(original, streams[0].length)
        drawn += [replace(stream, short=longest, counts=Counter()) for stream in kept]
        weight_of_kept = sum(stream.source.weight for stream in kept)
        ratio = data.keep_short / (1 - data.keep_short)
        share = ratio * sum(weights) / weight_of_kept
        weights += [stream.source.weight * share for stream in kept]
    return drawn, weights


def _too_little_text(stream: Stream, available: int, needed: int) -> DataError:
    holds = f"holds {available:,} sequences of {stream.length:,} tokens in data.epochs: {stream.data.epochs}"
    details = ", ".join([holds, *format_counts(stream.counts)])
    return DataError(
        f"data.source: {stream.source.name}: {details}; {needed:,} are needed for its share; "
        "add text, raise data.epochs, or lower training.steps"
    )

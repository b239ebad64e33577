"""Text, chats and examples of the sources of a recipe to rows of token ids; packed sequences are mixed by weight."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pi_lora.data.chats import ChatTemplate
from pi_lora.data.encoders import encoder_of
from pi_lora.data.examples import Task
from pi_lora.data.sources import BYTES_PER_TOKEN, SMALL_BYTES, Table, format_counts
from pi_lora.data.tokens import Labelled, added_prefix, padding_id
from pi_lora.errors import DataError
from pi_lora.recipe.data import RECALL, Data, Source
from pi_lora.types import ui

# Columns of lists: `input_ids`, `position_ids` of PoSE, `loss_mask`, `lengths` of sequences.
Row = Mapping[str, Sequence[int]]
# How many sequences of chats are filled at a time, and how many short texts are grouped by length.
OPEN_SEQUENCES = 16
GROUPED_TEXTS = 256


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


def cut(
    documents: Iterable[Labelled], length: int, prefix: Sequence[int] = (), *, drop_rest: bool = False
) -> Iterator[list[Labelled]]:
    """Cut a stream of `documents`, all tokens in the loss, into sequences of exactly `length` tokens. A sequence is a
    list of documents or parts; the last rest is lost. A part that begins a sequence within a document begins
    with the tokens of `prefix`, as every input of the model does. With `drop_rest`, every sequence begins with a
    document: the rest of one is dropped.

    `trl.pack_dataset` (1.16) cuts each batch of documents by itself, and its sequences differ in length.

    >>> documents = [Labelled(ids, [True] * len(ids)) for ids in ([0, 1, 2, 3, 4], [0, 5])]
    >>> [[part.ids for part in sequence] for sequence in cut(documents, length=3, prefix=[0])]
    [[[0, 1, 2]], [[0, 3, 4]]]
    """
    sequence: list[Labelled] = []
    room = length
    for ids, *_ in documents:
        start = 0
        while start < len(ids):
            before: Sequence[int] = ()
            if start and list(ids[start : start + len(prefix)]) != list(prefix):
                before = prefix
            end = start + room - len(before)
            part = [*before, *ids[start:end]]
            sequence.append(Labelled(part, [True] * len(part)))
            start = end
            room -= len(part)
            if not room:
                yield sequence
                sequence = []
                room = length
                if drop_rest:
                    break


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


def joined(sequences: Sequence[Labelled]) -> Labelled:
    """Return texts, one after the other, as one sequence."""
    ids = itertools.chain.from_iterable(sequence.ids for sequence in sequences)
    loss_mask = itertools.chain.from_iterable(sequence.loss_mask for sequence in sequences)
    return Labelled([*ids], [*loss_mask])


@dataclass
class Stream:
    """The rows of a source. A row has `length` tokens of text, or whole chats or an example of at most `length` tokens.
    With `short`, a row is a group of chats of at most `short` tokens, or of sequences of `short` tokens of text.
    `counts` counts the texts cut or left out. Recall documents have lines of `texts`.
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

    def is_small(self, needed: float = math.inf) -> bool:
        """Whether so many sequences, or all there are, are made in seconds. A file of text is tokenized whole."""
        num_bytes: float = self.table.size * self.data.epochs
        if not self.table.texts:
            num_bytes = min(num_bytes, needed * self.length * BYTES_PER_TOKEN)
        return self.source.name != RECALL and self.table.size > 0 and num_bytes <= SMALL_BYTES

    def read_rows(self, needed: float = math.inf) -> int:
        """Read the rows of so many sequences, rather too many, and return their number. It takes a hundredth of the
        time of tokenizing. Raise DataError if a row cannot be read.
        """
        columns = Task(self.data).columns if self.data.has_examples else [self.source.column]
        most_bytes = 2 * needed * self.length * BYTES_PER_TOKEN
        num_bytes = 0
        number = 0
        for _, row in self.table.read(columns, self.data.seed):
            number += 1
            num_bytes += sum(len(str(value)) for value in row.values())
            if num_bytes > most_bytes:
                break
        return number

    @cached_property
    def prefix(self) -> list[int]:
        """The tokens that sequences begin with, such as BOS, if the tokenizer adds any."""
        return added_prefix(self.tokenizer)

    def rows(self) -> Iterator[list[Labelled]]:
        """Return the sequences of every row, which do not attend to each other, until the source is used up; recall
        documents have no end.
        """
        if self.data.has_examples:
            return ([example] for example in self._texts(self.length))
        if self.short:
            return grouped(self._short_texts(), self.length, random.Random(self.data.seed))
        isolates = self.data.is_isolated(self.source)
        if self.source.has_chats:
            return packed(self._texts(self.length), self.length) if isolates else self._wrapped_chats()
        is_recall = self.source.name == RECALL
        sequences = cut(self._texts(self.length), self.length, self.prefix, drop_rest=is_recall)
        return sequences if isolates else ([joined(sequence)] for sequence in sequences)

    def _texts(self, longest: int) -> Iterator[Labelled]:
        """Yield the documents or examples, or the chats of at most `longest` tokens, of all epochs. Recall documents
        have no end; examples are yielded once, and shuffled by the training.
        """
        encoder = encoder_of(
            self.source,
            self.data,
            self.tokenizer,
            longest,
            length=self.length,
            texts=self.texts,
        )
        epochs = 1 if self.data.has_examples else self.data.epochs
        for epoch in range(epochs):
            counts = Counter() if epoch else self.counts
            yield from encoder.rows(self.table, counts, self.data.seed + epoch)

    def _short_texts(self) -> Iterator[Labelled]:
        texts = self._texts(self.short)
        if self.source.has_chats:
            return texts
        return (joined(sequence) for sequence in cut(texts, self.short, self.prefix))

    def _wrapped_chats(self) -> Iterator[list[Labelled]]:
        """Yield sequences of chats that begin with BOS, that of the first or one before it, and end with padding."""
        before: list[Labelled] = []
        if self.prefix and not ChatTemplate(self.tokenizer, self.length).writes(self.prefix):
            before = [Labelled(self.prefix, [False] * len(self.prefix))]
        room = self.length - total_tokens(before)
        for chats in packed(self._texts(room), room):
            if chats[0].ids[: len(self.prefix)] != self.prefix:
                chats = [*before, *chats]
            rest = self.length - total_tokens(chats)
            padding = Labelled([padding_id(self.tokenizer)] * rest, [False] * rest)
            yield [joined([*chats, padding])]


def training_rows(streams: Sequence[Stream], original: int, target: int, number: int) -> Iterator[Row]:
    """Yield all examples of the streams of a recipe, or `number` sequences drawn by weight and seed, with positions for
    PoSE. Short sequences have at most `original` (L) tokens. Raise DataError if a source has too little text for its
    share: going on without it would train on another mixture than the recipe names.
    """
    data = streams[0].data
    rng = random.Random(data.seed)
    if data.has_examples:
        for stream in streams:
            for example in stream.rows():
                yield _row(example, stream, rng, target)
        return
    drawn, order = _drawn(streams, original, number)
    rows = [stream.rows() for stream in drawn]
    for done, index in enumerate(order):
        stream = drawn[index]
        sequences = next(rows[index], None)
        if sequences is None:
            drawn_before = order[:done].count(index)
            needed = order.count(index)
            raise _too_little_text(stream, drawn_before, needed)
        yield _row(sequences, stream, rng, target)


def _row(sequences: Sequence[Labelled], stream: Stream, rng: random.Random, target: int) -> Row:
    """Return the row that holds sequences one after the other. Positions begin at 0 in each, and skip under PoSE, but
    not in short texts.
    """
    skips = stream.data.positions == "pose" and not stream.short
    positions: list[int] = []
    for ids, _, _ in sequences:
        chunks = min(stream.data.chunks, len(ids)) if skips else 1
        positions += pose_positions(rng, len(ids), target, chunks)
    ids, loss_mask, _ = joined(sequences)
    lengths = [len(sequence.ids) for sequence in sequences]
    return {"input_ids": ids, "loss_mask": loss_mask, "lengths": lengths, "position_ids": positions}


def shortfalls(streams: Sequence[Stream], original: int, number: int) -> Iterator[DataError]:
    """Yield the errors with which `training_rows` ends for `number` sequences, one for each stream with too little
    text; what is not packed in seconds is only read, and a line says so.
    """
    drawn, order = _drawn(streams, original, number)
    for index, stream in enumerate(drawn):
        needed = order.count(index)
        if stream.is_small(needed):
            available = sum(1 for _ in itertools.islice(stream.rows(), needed))
            if available < needed:
                yield _too_little_text(stream, available, needed)
        elif not stream.short:
            say_unpacked(stream, f"{needed:,} sequences")
            if stream.table.size:
                stream.read_rows(needed)


def say_unpacked(stream: Stream, needed: str) -> None:
    """Say what a dry run does not know of a stream."""
    if stream.source.name != RECALL:
        ui.say(
            f"data: {stream.source.name}: is not packed by a dry run; pi-lora prepare shows whether it holds {needed}"
        )


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

"""Token ids to sequences of equal length from the sources of a recipe, mixed by weight and seed."""

import bisect
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from datasets import Dataset

from pi_lora.data import recall
from pi_lora.data.cache import Row, cached, columns_of
from pi_lora.data.sources import RECALL, find_corpus
from pi_lora.data.tokens import Encode, Pool, Tokens, encoded, encoder, token_type, tokenizer_identity
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Source
from pi_lora.types import Json, Progress, silent

# How much text `bfd_split` fits together at once: at least so many sequences, and so many tokens.
BUFFER_SEQUENCES = 64
BUFFER_TOKENS = 2**20
# Called where nothing is in the cache, before as many tokens are packed.
Missing = Callable[[int], object]
# Raise it with every change to how sequences are made, so that no older cache is taken for the new ones.
FORMAT = 3


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

    Not with `trl.pack_dataset` (1.16): see test_trl_packs_sequences_of_uneven_length.

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


def bfd_split(documents: Iterable[Tokens], length: int, seed: int = 0, buffer: int | None = None) -> Iterator[Tokens]:
    """Fit whole documents together into sequences of exactly `length` tokens; only the last rest is lost.

    "Fewer Truncations Improve Language Modeling" (Ding et al. 2024), as TRL's packing of that name: pieces of at most
    `length` tokens are placed in order of decreasing size where they fit best. TRL leaves gaps; here the emptiest
    sequences are taken apart to fill them, at the cost of at most one cut per sequence.

    Documents are read until there are `buffer` tokens to fit together; what does not fill a sequence is carried on. The
    order of sequences, and of the pieces in each, follows `seed`, since it would follow their size otherwise.

    >>> sorted(map(sorted, bfd_split([[1, 1, 1, 1, 1], [2, 2], [3, 3, 3], [4, 4]], length=4)))
    [[1, 1, 1, 1], [1, 3, 3, 3], [2, 2, 4, 4]]
    """
    rng = random.Random(seed)
    room = buffer or max(BUFFER_SEQUENCES * length, BUFFER_TOKENS)
    pieces: list[Tokens] = []
    held = 0
    for document in documents:
        for start in range(0, len(document), length):
            pieces.append(document[start : start + length])
            held += len(pieces[-1])
            # Of a document longer than the room, not all sequences are in memory.
            if held >= room and (start + length >= len(document) or held >= 2 * room):
                sequences, rest = _fitted(pieces, length, rng)
                yield from sequences
                pieces, held = [rest] if rest else [], len(rest)
    yield from _fitted(pieces, length, rng)[0]


def _fitted(pieces: list[Tokens], length: int, rng: random.Random) -> tuple[list[Tokens], Tokens]:
    """Return full sequences made of pieces of at most `length` tokens, and the rest that does not fill one."""
    bins = sorted(_best_fit_decreasing(pieces, length), key=lambda fitted: sum(map(len, fitted)), reverse=True)
    number = sum(map(len, pieces)) // length
    # Large pieces first: fewer documents are cut when one fills several gaps.
    spare = sorted(itertools.chain.from_iterable(bins[number:]), key=len, reverse=True)
    filling = itertools.chain.from_iterable(spare)
    sequences: list[Tokens] = []
    for fitted in bins[:number]:
        if gap := length - sum(map(len, fitted)):
            fitted.append(list(itertools.islice(filling, gap)))
        rng.shuffle(fitted)
        sequences.append(list(itertools.chain.from_iterable(fitted)))
    rng.shuffle(sequences)
    return sequences, list(filling)


def _best_fit_decreasing(pieces: list[Tokens], length: int) -> list[list[Tokens]]:
    bins: list[list[Tokens]] = []
    spaces: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for piece in sorted(pieces, key=len, reverse=True):
        tightest = bisect.bisect_left(spaces, (len(piece), -1))
        if tightest < len(spaces):
            free, index = spaces.pop(tightest)
        else:
            free, index = length, len(bins)
            bins.append([])
        bins[index].append(piece)
        if free > len(piece):
            bisect.insort(spaces, (free - len(piece), index))
    return bins


class Stream:
    """The sequences of one source; `tokens` and `left_out` (documents) count what was read for them so far."""

    def __init__(self, source: Source, data: Data, encode: Encode, length: int) -> None:
        self.source, self.data, self.encode, self.length = source, data, encode, length
        self.corpus, self.tokens, self.left_out = find_corpus(source), 0, 0
        self.pool: Pool | None = None

    def identity(self) -> Json:
        """Return the source and what decides its text, as JSON."""
        found = {**self.source.model_dump(), **self.corpus.identity()}
        if self.source.name == RECALL:
            made_by = Path(recall.__file__).read_bytes() + recall.LISTS.read_bytes()
            found["code"] = hashlib.sha256(made_by).hexdigest()
        return found

    def sequences(self) -> Iterator[Tokens]:
        """Yield sequences of exactly `length` tokens until the source is used up; `builtin:recall` has no end."""
        if self.source.name == RECALL:
            # However text is packed: the facts that a document asks for must stand in the same sequence.
            return aligned(self._recall_documents(), self.length)
        if self.data.packing == "bfd_split":
            return bfd_split(self._text_documents(), self.length, self.data.seed)
        return wrapped(self._text_documents(), self.length)

    def _text_documents(self) -> Iterator[Tokens]:
        # Each epoch has an order of its own.
        for epoch in range(self.data.epochs):
            texts = (document.text for document in self.corpus.documents(self.data.seed + epoch))
            for ids in encoded(texts, self.encode, pool=self.pool):
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
    data: Data,
    tokenizer: Any,
    original: int,
    target: int,
    number: int,
    progress: Progress = silent,
    processes: int = 1,
    missing: Missing = lambda tokens: None,
) -> Dataset:
    """Make `number` sequences from the sources of a recipe, mixed by weight and seeded, or read them from the cache:
    rows of `input_ids` as NumPy arrays mapped into memory. `processes` tokenize, and `missing` is told before with how
    many tokens; `progress` with the tokens packed, those needed, and a note.

    Under PoSE (`positions: skip`) they have `sequence_tokens`, by default `original` (L), and `position_ids`; otherwise
    `target` (L') tokens. Raise DataError if a source has too little text for its share: going on without it would train
    on another mixture than the recipe names.
    """
    pose = data.positions == "skip"
    length = data.tokens_per_sequence(original, target)
    if pose and data.chunks > length:
        raise DataError(f"data.chunks: {data.chunks} chunks do not fit into {length} tokens; choose fewer")
    encode = encoder(tokenizer, data.special_tokens)
    streams = [Stream(source, data, encode, length) for source in data.source]
    made_from = {
        "format": FORMAT,
        "sources": [stream.identity() for stream in streams],
        "data": data.model_dump(exclude={"source", "sequence_tokens"}),
        "tokenizer": tokenizer_identity(tokenizer),
        "original": length if pose else None,
        "target": target,
        "number": number,
    }

    def rows() -> Iterator[Row]:
        missing(number * length)
        with Pool(tokenizer, data.special_tokens, processes) if processes > 1 else nullcontext() as pool:
            for stream in streams:
                stream.pool = pool
            yield from packed()

    def packed() -> Iterator[Row]:
        rng = random.Random(data.seed)
        order = drawn_order([source.weight for source in data.source], number, data.seed)
        sequences = [stream.sequences() for stream in streams]
        for done, index in enumerate(order, 1):
            if (ids := next(sequences[index], None)) is None:
                raise DataError(streams[index].too_little(order.count(index) * length))
            progress(done * length, number * length, _left_out(*streams))
            positions = {"position_ids": skip_positions(rng, length, target, data.chunks)} if pose else {}
            yield {"input_ids": ids, **positions}

    columns = {"input_ids": token_type(tokenizer), **({"position_ids": "int32"} if pose else {})}
    return cached(made_from, columns_of(columns, length), rows, progress)[0]


def drawn_order(weights: Sequence[float], number: int, seed: int) -> list[int]:
    """Return which source each of `number` sequences comes from, as often as the weights say."""
    return random.Random(seed).choices(range(len(weights)), weights, k=number)


def _left_out(*streams: Stream) -> str:
    number = sum(stream.left_out for stream in streams)
    return f"documents of under {streams[0].data.min_document_tokens} tokens left out: {number:,}" if number else ""

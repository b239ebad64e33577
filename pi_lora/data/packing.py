"""Text to token ids, token ids to sequences of equal length, and the positions of these under PoSE."""

import bisect
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Tokens = list[int]
Encode = Callable[[Sequence[str]], list[Tokens]]
# A fast tokenizer works on the texts of a call in parallel; its own records of a call take some 100 bytes a token.
CHARACTERS_AT_ONCE = 4_000_000
CHARACTERS_AT_FIRST = 50_000
# How much text `bfd_split` fits together at once: at least so many sequences, and so many tokens.
BUFFER_SEQUENCES = 64
BUFFER_TOKENS = 2**20


def encoder(tokenizer: Any) -> Encode:
    """Return a function of texts to ids: the tokenizer's own BOS if it has one, the text, and EOS."""
    end = tokenizer.eos_token_id

    def encode(texts: Sequence[str]) -> list[Tokens]:
        encoded: list[Tokens] = tokenizer(list(texts), verbose=False)["input_ids"]
        return [ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in encoded]

    return encode


def encoded(texts: Iterable[str], encode: Encode, room: int = CHARACTERS_AT_ONCE) -> Iterator[Tokens]:
    """Yield the ids of one text after the other, read ahead until there are `room` characters for a call of `encode`.

    The first calls are smaller, each twice the one before: who needs little text does not wait for much.
    """
    for batch in in_batches(texts, len, room):
        yield from encode(batch)


def in_batches(items: Iterable[Item], size: Callable[[Item], int], room: int) -> Iterator[list[Item]]:
    """Yield batches of items whose sizes come to about `room`, the first ones smaller."""
    limit, held = CHARACTERS_AT_FIRST, 0
    batch: list[Item] = []
    for item in items:
        batch.append(item)
        held += size(item)
        if held >= min(limit, room):
            yield batch
            batch, held, limit = [], 0, 2 * limit
    if batch:
        yield batch


def token_type(tokenizer: Any) -> str:
    """Return the smallest integer type that holds all ids."""
    return "uint16" if len(tokenizer) <= 2**16 else "int32"


def tokenizer_identity(tokenizer: Any) -> str:
    """Return a digest of all that decides the ids of a text."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # What the last call asked for, not what the tokenizer is.
        del state["truncation"], state["padding"]
    else:
        state = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    state = {"end": tokenizer.eos_token_id, **state}
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def skip_positions(rng: random.Random, original: int, target: int, chunks: int) -> list[int]:
    """Draw positions for `original` (L) tokens within `[0, target)` (L'): consecutive runs with gaps between them.

    PoSE (Zhu et al. 2023, section 3.2): L tokens are divided into `chunks` of random lengths, and chunk i is shifted by
    a bias u_i drawn uniformly from u_(i-1) ... L' - L, with u_0 = 0. The text itself stays contiguous (their v_i = 0).
    Needs chunks <= L <= L'. Returns L strictly increasing positions that begin at 0.

    >>> skip_positions(random.Random(0), original=6, target=24, chunks=2)
    [0, 1, 2, 3, 17, 18]
    """
    starts = [0, *sorted(rng.sample(range(1, original), chunks - 1)), original]
    positions: list[int] = []
    bias = 0
    for start, end in itertools.pairwise(starts):
        if start:
            bias = rng.randint(bias, target - original)
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
        pieces += (document[start : start + length] for start in range(0, len(document), length))
        held += len(document)
        if held >= room:
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
    sequences = []
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

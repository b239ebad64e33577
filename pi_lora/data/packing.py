"""Text to token ids, as the tokenizer frames a document, many documents at a time."""

import bisect
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

Encode = Callable[[Sequence[str]], list[list[int]]]
# A fast tokenizer works on the texts of a call in parallel; its own records of a call take some 100 bytes a token.
CHARACTERS_AT_ONCE = 4_000_000
CHARACTERS_AT_FIRST = 50_000


def encoder(tokenizer: Any) -> Encode:
    """Texts to token ids as the tokenizer frames a document: its own BOS where it has one, and EOS at the end."""
    end = tokenizer.eos_token_id

    def encode(texts: Sequence[str]) -> list[list[int]]:
        encoded: list[list[int]] = tokenizer(list(texts), verbose=False)["input_ids"]
        return [ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in encoded]

    return encode


def encoded(texts: Iterable[str], encode: Encode, room: int = CHARACTERS_AT_ONCE) -> Iterator[list[int]]:
    """The ids of one text after the other, read ahead until there are `room` characters for a call of `encode`.

    The first calls are smaller, each twice the one before: who needs little text does not wait for much.
    """
    limit, size = CHARACTERS_AT_FIRST, 0
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= min(limit, room):
            yield from encode(batch)
            batch, size, limit = [], 0, 2 * limit
    if batch:
        yield from encode(batch)


def tokenizer_identity(tokenizer: Any) -> str:
    """A digest of all that decides the ids of a text."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # What the last call asked for, not what the tokenizer is.
        del state["truncation"], state["padding"]
    else:
        state = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    state = {"end": tokenizer.eos_token_id, **state}
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def skip_positions(rng: random.Random, original: int, target: int, chunks: int) -> list[int]:
    """Positions of `original` (L) tokens within `[0, target)` (L'): runs of consecutive ones, with skips between them.

    PoSE, section 3.2: L tokens are divided into `chunks` of random lengths, and chunk i is shifted by a bias u_i drawn
    uniformly from u_(i-1) ... L' - L, with u_0 = 0. The text itself is left contiguous (the paper's v_i = 0), which
    the paper found to make little difference to text taken from several places.

    Args:
        rng: the source of the lengths and biases, in this order.
        original: L, at least `chunks`.
        target: L', at least L.
        chunks: how many runs; fewer show where two neighbours draw the same bias.

    Returns:
        `original` strictly increasing positions that begin at 0.

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


# How much text `bfd_split` fits together at once: at least so many sequences, and so many tokens.
BUFFER_SEQUENCES = 64
BUFFER_TOKENS = 2**20

Tokens = list[int]


def wrapped(documents: Iterable[Tokens], length: int) -> Iterator[Tokens]:
    """Cut the continuous stream of `documents` into sequences of exactly `length` tokens; only the last rest is lost.

    >>> list(wrapped([[1, 2, 3], [4, 5], [6, 7]], length=3))
    [[1, 2, 3], [4, 5, 6]]
    """
    stream = itertools.chain.from_iterable(documents)
    while len(sequence := list(itertools.islice(stream, length))) == length:
        yield sequence


def aligned(documents: Iterator[Tokens], length: int) -> Iterator[Tokens]:
    """Sequences of exactly `length` tokens that each begin with a document: what one asks about stands in it."""
    while sequence := next(wrapped(documents, length), None):
        yield sequence


def bfd_split(documents: Iterable[Tokens], length: int, seed: int = 0, buffer: int | None = None) -> Iterator[Tokens]:
    """Fit whole documents together into sequences of exactly `length` tokens; only the last rest is lost.

    As TRL's packing of that name, which follows "Fewer Truncations Improve Language Modeling" (Ding et al. 2024): what
    is longer than a sequence is split into pieces of its length and a rest, and pieces are placed in order of
    decreasing size where they fit best. TRL leaves gaps, and hides them by packing without padding, which takes an
    attention kernel for sequences of uneven lengths; here the emptiest sequences are taken apart to fill the gaps of
    the others. That costs at most one cut a sequence, where `wrapped` cuts at nearly every one.

    Args:
        documents: token ids; read until `buffer` tokens are there to be fitted together.
        seed: of the order in which fitted sequences, and the pieces in each, come: it no longer follows their size.
        buffer: in tokens; what does not fill a sequence is carried into the next one.

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
    """Pieces of at most `length` tokens to full sequences, and the rest that does not fill one."""
    bins = sorted(_best_fit_decreasing(pieces, length), key=_size, reverse=True)
    number = sum(map(len, pieces)) // length
    # Large pieces first: fewer documents are cut when one fills several gaps.
    spare = sorted(itertools.chain.from_iterable(bins[number:]), key=len, reverse=True)
    filling = itertools.chain.from_iterable(spare)
    sequences = []
    for fitted in bins[:number]:
        if gap := length - _size(fitted):
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


def _size(pieces: list[Tokens]) -> int:
    return sum(map(len, pieces))

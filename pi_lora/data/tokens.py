"""Text to token ids: special tokens in it are text, and one that is long is tokenized in pieces, with the same ids."""

import hashlib
import itertools
import json
import os
import re
import signal
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from pi_lora.errors import DataError

Item = TypeVar("Item")
Tokens = MutableSequence[int]
Encode = Callable[[Sequence[str]], list[Tokens]]
# A fast tokenizer works on the texts of a call in parallel; its own records of a call take some 100 bytes a token.
CHARACTERS_AT_ONCE = 4_000_000
CHARACTERS_AT_FIRST = 50_000
# How many characters of a long text are tokenized together, and how many before them, whose tokens are dropped.
PIECE, CONTEXT = 500_000, 2_000
# How many tokens before a cut must not depend on what is farther away, and how many places of each kind are tried.
SETTLED, TRIES = 16, 4
# Where a text is cut, the best places first: between lines, before a word, anywhere.
CUTS = [re.compile(pattern) for pattern in (r"(?<=\n)(?=\S)", r"(?<=\S)(?= \S)", r"(?<=\S)(?=\S)")]


def encoder(tokenizer: Any, special_tokens: bool = False) -> Encode:
    """Return a function of texts to ids: the tokenizer's own BOS if it has one, the text, and EOS. With
    `special_tokens`, those that stand in a text are what they stand for; else they are text.
    """
    end = tokenizer.eos_token_id

    def encode(texts: Sequence[str]) -> list[Tokens]:
        found = tokenized(tokenizer, texts, special_tokens)
        for ids in found:
            if end is not None and (not ids or ids[-1] != end):
                ids.append(end)
        return found

    return encode


def tokenized(tokenizer: Any, texts: Sequence[str], special_tokens: bool = False) -> list[Tokens]:
    """Return the ids of texts as the tokenizer frames them; `special_tokens` as of `encoder`."""

    def ids_of(parts: list[str], framed: bool = True) -> list[list[int]]:
        options = {"add_special_tokens": framed, "split_special_tokens": not special_tokens, "verbose": False}
        return list(tokenizer(parts, **options)["input_ids"])

    def long(text: str) -> Tokens:
        framed, bare = ids_of(["a"])[0], ids_of(["a"], False)[0]
        before = next(at for at in range(len(framed)) if framed[at : at + len(bare)] == bare)
        ids = array("i", framed[:before])
        for piece in ids_in_pieces(text, lambda part: ids_of([part], False)[0], PIECE, CONTEXT):
            ids.extend(piece)
        ids.extend(framed[before + len(bare) :])
        return ids

    short = [text for text in texts if len(text) <= 2 * PIECE]
    found = iter(ids_of(short) if short else [])
    return [next(found) if len(text) <= 2 * PIECE else long(text) for text in texts]


def ids_in_pieces(text: str, ids_of: Callable[[str], list[int]], piece: int, context: int) -> Iterator[list[int]]:
    """Yield the ids of a text about `piece` characters at a time, the same as `ids_of` gives for all of it.

    A text is cut where the last tokens before the cut are the same after much text and after little, and with what
    follows and without it: they depend on their surroundings alone. A piece is tokenized together with the `context`
    before it, since tokenizers treat the start of a text differently; where no cut is found it is longer.
    """
    start, known = 0, list[int]()
    while True:
        left, size, cut = max(0, start - context), piece, None
        while cut is None and start + 2 * size < len(text):
            cut = _cut(text, ids_of, left, (start + size // 2, start + size), context)
            size *= 2
        ids, before = (ids_of(text[left:]), []) if cut is None else cut[1:]
        assert ids[: len(known)] == known, "tokens depend on text that is far away"
        yield ids[len(known) :]
        if cut is None:
            return
        start, known = cut[0], before


def _cut(
    text: str, ids_of: Callable[[str], list[int]], left: int, within: tuple[int, int], context: int
) -> tuple[int, list[int], list[int]] | None:
    """Return a safe place to cut, the ids from `left` to there, and those of the `context` before it, or None."""
    for kind in CUTS:
        for match in reversed(list(kind.finditer(text, *within))[-TRIES:]):
            cut = match.start()
            near = max(0, cut - context)
            before, both = ids_of(text[near:cut]), ids_of(text[near : cut + context])
            if len(before) > SETTLED and both[: len(before)] == before:
                ids = ids_of(text[left:cut])
                if ids[-SETTLED:] == before[-SETTLED:]:
                    return cut, ids, before
    return None


def encoded(
    texts: Iterable[str], encode: Encode, room: int = CHARACTERS_AT_ONCE, pool: "Pool | None" = None
) -> Iterator[Tokens]:
    """Yield the ids of each text, read ahead by about `room` characters for a call of `encode` or for a `pool`."""
    batches = in_batches(texts, len, room)
    yield from itertools.chain.from_iterable(map(encode, batches) if pool is None else pool.encode(batches))


class Pool(ProcessPoolExecutor):
    """Processes that encode as `encoder` of the same arguments does; DataError if the system ends one."""

    def __init__(self, tokenizer: Any, special_tokens: bool, processes: int) -> None:
        self.ahead = 2 * processes
        # Not forked: threads of the tokenizer and of Arrow would be missing in the copies.
        super().__init__(processes, get_context("spawn"), initializer=_begin, initargs=(tokenizer, special_tokens))

    def encode(self, batches: Iterable[Sequence[str]]) -> Iterator[list[Tokens]]:
        """Yield the ids of batches of texts in their order; two for each process are on their way."""
        waiting = deque[Future[list[Tokens]]]()
        try:
            for batch in batches:
                waiting.append(self.submit(_encode, batch))
                if len(waiting) > self.ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            ended = "the system ended one of them, as where memory is short"
            raise DataError(f"--processes: {ended}; ask for fewer") from None

    def __exit__(self, *_: object) -> None:
        self.shutdown(cancel_futures=True)


# Of a process of a pool.
_own_encode: Encode


def _begin(tokenizer: Any, special_tokens: bool) -> None:
    global _own_encode
    # Ctrl-C is for the process that asks; and there are processes instead of the tokenizer's threads.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _own_encode = encoder(tokenizer, special_tokens)


def _encode(texts: Sequence[str]) -> list[Tokens]:
    return [array("i", ids) for ids in _own_encode(texts)]


def in_batches(
    items: Iterable[Item], size: Callable[[Item], int], room: int = CHARACTERS_AT_ONCE
) -> Iterator[list[Item]]:
    """Yield batches of items whose sizes come to about `room`; less at first, so that who needs little waits little."""
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

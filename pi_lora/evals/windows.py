"""Which tokens of a document are scored in which window (Press et al. 2022): arithmetic on positions, no model.

Windows of every length start at the same offsets, so a shorter one is a prefix of the longest, and one pass of the
model over the longest serves a whole sweep.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `stop` of a document, which go through the model once.

    `scored` says, by window length, which tokens of the document that window scores here. Of a piece that is `whole`,
    the loss of every token but its first is wanted.
    """

    start: int
    stop: int
    scored: Mapping[int, range]
    whole: bool

    @property
    def wanted(self) -> set[int]:
        """The tokens whose losses are wanted, counted from the piece's start."""
        if self.whole:
            return set(range(1, self.stop - self.start))
        return {token - self.start for tokens in self.scored.values() for token in tokens}


def pieces(length: int, windows: Sequence[int], stride: int, by_position: bool = False) -> list[Piece]:
    """The passes that a sweep of `windows` takes over a document of `length` tokens.

    The first window scores all its tokens, every later one, `stride` further on, what none before it has: its last
    `stride`. With a stride as long as the window, a window's first token has nothing before it and stays unscored. A
    piece is no longer than the longest window that still has something to score in it. `by_position` asks for every
    loss of windows that do not overlap, as far as they fit.

    >>> [(piece.start, piece.stop, dict(piece.scored)) for piece in pieces(10, [4, 6], stride=2)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [(0, 6, {4: range(1, 4), 6: range(1, 6)}), (2, 8, {4: range(4, 6), 6: range(6, 8)}),
     (4, 10, {4: range(6, 8), 6: range(8, 10)}), (6, 10, {4: range(8, 10)})]
    """
    longest = max(windows)
    apart = -(-longest // stride) * stride
    found = []
    for start in (0, *range(stride, length - min(windows) + stride, stride)):
        scored = {window: _scored(start, window, stride, length) for window in sorted(windows)}
        scored = {window: tokens for window, tokens in scored.items() if tokens}
        stop = min(start + max(scored), length) if scored else start
        whole = start == 0 or (by_position and start % apart == 0 and start + longest <= length)
        if scored or whole:
            found.append(Piece(start, start + longest if whole else stop, scored, whole))
    return found


def _scored(start: int, window: int, stride: int, length: int) -> range:
    if start == 0:
        return range(1, min(window, length))
    return range(max(start + window - stride, start + 1), min(start + window, length))


def batches(all_pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    """Up to `size` pieces at a time; those of which every loss is wanted come first and by themselves."""
    in_order = list(all_pieces)
    for whole in (True, False):
        alike = [piece for piece in in_order if piece.whole == whole]
        for start in range(0, len(alike), size):
            yield alike[start : start + size]

"""Sliding windows (Press et al. 2022): which tokens of a document each window scores, and the sums of their losses.
Windows of every length start at the same offsets: one pass of the model over the longest serves a whole sweep.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from pi_lora.evaluation.forward import forget_lengths, padded, token_losses


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `stop` of a document, which go through the model once. `scored` are the tokens whose losses are
    wanted, by what they count for: `window 4096`, or `position 128` for the bin of tokens after 128 others and more.
    The first piece is `whole`, and those that count by position: all losses are wanted.
    """

    start: int
    stop: int
    scored: Mapping[str, range]
    whole: bool


@dataclass(frozen=True)
class Sweep:
    """What is measured of every document: windows and their stride in tokens; `bins` of losses by position, if any;
    windows `apart`, each with its own forward pass, where a model's frequencies follow the length of the input.
    """

    windows: tuple[int, ...]
    stride: int
    bins: int = 0
    apart: bool = False

    @property
    def positions(self) -> list[int]:
        """The numbers of tokens before a token at which the bins of positions begin, and the last one ends, in the
        longest window; its first token has no loss.

        >>> Sweep((10,), 4, bins=4).positions, Sweep((10,), 4).positions
        ([1, 3, 5, 8, 10], [])
        """
        longest, bins = max(self.windows), self.bins
        return [max(1, -(-longest * index // bins)) for index in range(bins + 1)] if bins else []

    def passes(self, length: int, tokens: int = 1) -> Iterator[list[Piece]]:
        """Yield the pieces of a document of `length` tokens that go through the model together, at most so many
        `tokens` where several do; whole pieces by themselves.
        """
        size = 1 if self.apart else max(1, tokens // max(self.windows))
        for windows in [(window,) for window in self.windows] if self.apart else [self.windows]:
            planned = list(self.pieces(length, windows))
            for whole in (True, False):
                alike = [piece for piece in planned if piece.whole == whole]
                for start in range(0, len(alike), size):
                    yield alike[start : start + size]

    def pieces(self, length: int, windows: Sequence[int]) -> Iterator[Piece]:
        """Yield the pieces of a document of `length` tokens for some of the windows.

        The first window scores all its tokens, every later one, `stride` further on, its last `stride`. With a stride
        as long as the window, a window's first token has no context and is not scored. A piece is as long as the
        longest window that scores in it. Of the longest windows, those that fit without overlap count by position.

        >>> [(piece.start, piece.stop, dict(piece.scored)) for piece in Sweep((4, 6), stride=2).pieces(10, (4, 6))]
        ... # doctest: +NORMALIZE_WHITESPACE
        [(0, 6, {'window 4': range(1, 4), 'window 6': range(1, 6)}),
         (2, 8, {'window 4': range(4, 6), 'window 6': range(6, 8)}),
         (4, 10, {'window 4': range(6, 8), 'window 6': range(8, 10)}), (6, 10, {'window 4': range(8, 10)})]
        """
        longest, stride = max(self.windows), self.stride
        apart = -(-longest // stride) * stride
        for start in (0, *range(stride, length - min(windows) + stride, stride)):
            scored = {}
            for window in windows:
                first = max(start + window - stride, start + 1) if start else 1
                scored[f"window {window}"] = range(first, min(start + window, length))
            by_position = self.bins > 0 and longest in windows and start % apart == 0 and start + longest <= length
            for first, last in pairwise(self.positions if by_position else ()):
                scored[f"position {first}"] = range(start + first, start + last)
            scored = {name: tokens for name, tokens in scored.items() if tokens}
            if scored:
                stop = max(tokens.stop for tokens in scored.values())
                yield Piece(start, stop, scored, whole=start == 0 or by_position)


class LossSums(BaseModel):
    """What tokens count for, their losses in nats added up, and their number."""

    sums: list[tuple[str, float, int]]


def pass_losses(model: Any, document: Sequence[int], pieces: Sequence[Piece], apart: bool = False) -> LossSums:
    """Return the losses of some pieces of a document, which go through the model together."""
    if apart:
        forget_lengths(model)
    ids = padded(model, [document[piece.start : piece.stop] for piece in pieces])
    wanted = sorted({token - piece.start for piece in pieces for tokens in piece.scored.values() for token in tokens})
    column = {token: index for index, token in enumerate(wanted)}
    found = LossSums(sums=[])
    for piece, losses in zip(pieces, token_losses(model, ids, wanted).double(), strict=True):
        for name, tokens in piece.scored.items():
            # Tokens that follow each other in the document do so here: all between them are wanted too.
            first = column[tokens.start - piece.start]
            found.sums.append((name, losses[first : first + len(tokens)].sum().item(), len(tokens)))
    return found


def added(parts: Iterable[LossSums]) -> dict[str, tuple[float, int]]:
    """Return the summed losses and token counts of several passes by name; the sums do not depend on the order."""
    found: dict[str, list[tuple[float, int]]] = {}
    for part in parts:
        for name, loss, tokens in part.sums:
            found.setdefault(name, []).append((loss, tokens))
    return {
        name: (math.fsum(loss for loss, _ in rows), sum(tokens for _, tokens in rows)) for name, rows in found.items()
    }

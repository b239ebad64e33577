"""Sliding-window perplexity (Press et al. 2022): which tokens of a document each window scores, and their losses.
Windows of every length start at the same offsets: one pass of the model over the longest serves a whole sweep.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from pydantic import BaseModel

from pi_lora.evaluation.forward import forget_lengths, padded, pass_tokens, token_losses

# Nats a token; the perplexity of a greater mean loss is infinite.
MOST_LOSS = 700.0


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `stop` of a document, which go through the model once; `scored` are those that each window
    scores here, `positions` those of each bin of positions, by the first position of the bin.
    """

    start: int
    stop: int
    scored: Mapping[int, range]
    positions: Mapping[int, range]

    @property
    def wanted(self) -> set[int]:
        """The tokens whose losses are wanted, counted from the piece's start."""
        ranges = (*self.scored.values(), *self.positions.values())
        return {token - self.start for tokens in ranges for token in tokens}


def pieces(length: int, windows: Sequence[int], stride: int, bins: int = 0) -> list[Piece]:
    """Return the passes that a sweep of `windows` takes over a document of `length` tokens.

    The first window scores all its tokens, every later one, `stride` further on, its last `stride`. With a stride as
    long as the window, a window's first token has no context and is not scored. A piece is as long as the longest
    window that scores in it. With `bins` of positions, the longest windows that fit without overlap score all tokens.

    >>> [(piece.start, piece.stop, dict(piece.scored)) for piece in pieces(10, [4, 6], stride=2)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [(0, 6, {4: range(1, 4), 6: range(1, 6)}), (2, 8, {4: range(4, 6), 6: range(6, 8)}),
     (4, 10, {4: range(6, 8), 6: range(8, 10)}), (6, 10, {4: range(8, 10)})]
    """
    longest = max(windows)
    apart, bounds = -(-longest // stride) * stride, position_bounds(longest, bins)
    found = []
    for start in (0, *range(stride, length - min(windows) + stride, stride)):
        scored = {
            window: tokens
            for window in sorted(windows)
            if (tokens := range(max(start + window - stride, start + 1) if start else 1, min(start + window, length)))
        }
        whole = start % apart == 0 and start + longest <= length
        positions = {first: range(start + first, start + last) for first, last in pairwise(bounds)} if whole else {}
        if scored or positions:
            found.append(Piece(start, min(start + (longest if positions else max(scored)), length), scored, positions))
    return found


def batches(all_pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    """Yield up to `size` pieces at a time; those with all their losses wanted come first and by themselves."""
    in_order = list(all_pieces)
    for whole in (True, False):
        alike = [piece for piece in in_order if (piece.start == 0 or bool(piece.positions)) == whole]
        for start in range(0, len(alike), size):
            yield alike[start : start + size]


@dataclass(frozen=True)
class Sweep:
    """What is measured of every document: windows and their stride in tokens; `bins` of losses by position, if any;
    windows `apart`, each with its own forward pass, where a model's frequencies follow the length of the input.
    """

    windows: tuple[int, ...]
    stride: int
    bins: int = 0
    apart: bool = False

    def plan(self, length: int) -> list[list[Piece]]:
        """Return the pieces of a document that share forward passes; only the longest window counts by position."""
        sweeps = [(window,) for window in sorted(self.windows)] if self.apart else [self.windows]
        longest = max(self.windows)
        return [pieces(length, sweep, self.stride, self.bins if longest in sweep else 0) for sweep in sweeps]


class LossSum(BaseModel):
    """Losses in nats added up over `tokens` tokens."""

    loss: float = 0.0
    tokens: int = 0

    @property
    def mean(self) -> float:
        """The loss a token."""
        return self.loss / self.tokens

    @property
    def perplexity(self) -> float:
        """Infinite if the mean loss is no number or overflows."""
        return math.exp(self.mean) if self.mean < MOST_LOSS else math.inf

    def add(self, losses: torch.Tensor) -> None:
        """Add the losses of tokens, in float64."""
        self.loss += losses.double().sum().item()
        self.tokens += losses.numel()


class DocumentLosses(BaseModel):
    """The losses of one document by window length, and of the longest window by the first position of each bin."""

    by_window: dict[int, LossSum]
    by_position: dict[int, LossSum]


def document_losses(
    model: Any, document: Sequence[int], sweep: Sweep, done: Callable[[int], None] = lambda pieces: None
) -> DocumentLosses:
    """Measure a document that is at least as long as the longest window. `done` is called with the number of pieces
    after each forward pass.
    """
    longest = max(sweep.windows)
    size = 1 if sweep.apart else max(1, pass_tokens(model) // longest)
    found = DocumentLosses(
        by_window={window: LossSum() for window in sorted(sweep.windows)},
        by_position={first: LossSum() for first in position_bounds(longest, sweep.bins)[:-1]},
    )
    for planned in sweep.plan(len(document)):
        for batch in batches(planned, size):
            if sweep.apart:
                forget_lengths(model)
            _measure(model, document, batch, found)
            done(len(batch))
    return found


def _measure(model: Any, document: Sequence[int], batch: list[Piece], found: DocumentLosses) -> None:
    ids = padded(model, [document[piece.start : piece.stop] for piece in batch])
    wanted = sorted(set[int]().union(*(piece.wanted for piece in batch)))
    column = {token: index for index, token in enumerate(wanted)}
    for piece, losses in zip(batch, token_losses(model, ids, wanted), strict=True):
        for sums, ranges in ((found.by_window, piece.scored), (found.by_position, piece.positions)):
            for key, tokens in ranges.items():
                # Tokens that follow each other in the document do so here: all between them are wanted too.
                first = column[tokens.start - piece.start]
                sums[key].add(losses[first : first + len(tokens)])


def position_bounds(window: int, bins: int) -> list[int]:
    """Return the numbers of tokens before a token at which the bins of positions begin, and the last one ends; the
    first token has no loss.

    >>> position_bounds(10, 4), position_bounds(10, 0)
    ([1, 3, 5, 8, 10], [])
    """
    return [max(1, -(-window * index // bins)) for index in range(bins + 1)] if bins else []


def added(sums: Iterable[LossSum]) -> LossSum:
    """Return several sums as one, exact whatever their order."""
    losses, tokens = zip(*((each.loss, each.tokens) for each in sums), strict=True)
    return LossSum(loss=math.fsum(losses), tokens=sum(tokens))

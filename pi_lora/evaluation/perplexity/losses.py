"""Sliding-window perplexity (Press et al. 2022): which tokens of a document each window scores, and their losses.
Windows of every length start at the same offsets: one pass of the model over the longest serves a whole sweep.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from pydantic import BaseModel
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from pi_lora.errors import DataError
from pi_lora.evaluation.forward import forget_lengths, padded, pass_tokens

# Logits in memory at a time; a window of 32k tokens over a vocabulary of 128k has 4 billion.
LOGITS, LOGITS_ON_CPU = 2**28, 2**25


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `stop` of a document, which go through the model once; `scored` are those that each window
    scores here. Of a piece that is `whole`, the loss of every token but its first is wanted.
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
    """Return the passes that a sweep of `windows` takes over a document of `length` tokens.

    The first window scores all its tokens, every later one, `stride` further on, its last `stride`. With a stride as
    long as the window, a window's first token has no context and is not scored. A piece is as long as the longest
    window that scores in it. `by_position` asks for every loss of the longest windows that fit without overlap.

    >>> [(piece.start, piece.stop, dict(piece.scored)) for piece in pieces(10, [4, 6], stride=2)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [(0, 6, {4: range(1, 4), 6: range(1, 6)}), (2, 8, {4: range(4, 6), 6: range(6, 8)}),
     (4, 10, {4: range(6, 8), 6: range(8, 10)}), (6, 10, {4: range(8, 10)})]
    """
    longest = max(windows)
    apart = -(-longest // stride) * stride
    found = []
    for start in (0, *range(stride, length - min(windows) + stride, stride)):
        scored = {
            window: tokens
            for window in sorted(windows)
            if (tokens := range(max(start + window - stride, start + 1) if start else 1, min(start + window, length)))
        }
        whole = start == 0 or (by_position and start % apart == 0 and start + longest <= length)
        if scored or whole:
            found.append(Piece(start, min(start + (longest if whole else max(scored)), length), scored, whole))
    return found


def batches(all_pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    """Yield up to `size` pieces at a time; whole ones come first and by themselves, since all their losses are made."""
    in_order = list(all_pieces)
    for whole in (True, False):
        alike = [piece for piece in in_order if piece.whole == whole]
        for start in range(0, len(alike), size):
            yield alike[start : start + size]


@torch.no_grad()
def token_losses(model: Any, ids: torch.Tensor, tokens: Sequence[int], at_once: int | None = None) -> torch.Tensor:
    """Return the losses in nats of the tokens at `tokens` of `ids` (rows, length): (rows, tokens), on the CPU.
    `at_once` logits are in memory at a time, or those of one position of every row where that is more.
    """
    places = torch.tensor(tokens, device=ids.device)
    at_once = at_once or (LOGITS_ON_CPU if ids.device.type == "cpu" else LOGITS)
    size = max(1, at_once // (len(ids) * model.config.get_text_config().vocab_size))
    # What ModernBERT's decoder calls its decoder is its head (transformers 5.23).
    parts = torch.split(places, size if isinstance(model.get_decoder(), PreTrainedModel) else len(places))
    losses = [
        cross_entropy(logits.float().flatten(0, 1), ids[:, part].flatten(), reduction="none").view(len(ids), -1)
        for part, logits in zip(parts, _logits(model, ids, parts), strict=True)
    ]
    return torch.cat(losses, dim=1).cpu()


def _logits(model: Any, ids: torch.Tensor, parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the logits that predict the tokens at each of `parts`: those of the positions before them. The first call
    runs the layers. Each later one gives the model a single token and replaces the decoder's output by that of the
    first: the head, with any scaling and capping, stays the model's own.
    """
    made: list[torch.Tensor] = []

    def reuse_output(_module: Any, _inputs: Any, output: Any) -> Any:
        if not made:
            made.append(output.last_hidden_state)
        output.last_hidden_state = made[0]
        return output

    hook = model.get_decoder().register_forward_hook(reuse_output) if len(parts) > 1 else nullcontext()
    with hook:
        for part in parts:
            yield model(input_ids=ids[:, :1] if made else ids, use_cache=False, logits_to_keep=part - 1).logits


@dataclass(frozen=True)
class Sweep:
    """What is measured of every document: windows and their stride in tokens; `bins` of losses by position, if any;
    windows `apart`, each with its own forward pass, where a model's frequencies follow the length of the input.
    """

    windows: tuple[int, ...]
    stride: int
    bins: int = 0
    apart: bool = False

    def __post_init__(self) -> None:
        shortest = min(self.windows)
        if not 1 <= self.stride <= shortest:
            raise DataError(f"--stride: {self.stride} must be from 1 to the shortest window, {shortest}; lower it")

    def scored_bytes(self, before: Sequence[float]) -> dict[int, float]:
        """Return the bytes of text that each window scores in a document, of which `before` says how many come before
        each token and in all.
        """
        scored = dict.fromkeys(self.windows, 0.0)
        for piece in chain.from_iterable(self.plan(len(before) - 1)):
            for window, tokens in piece.scored.items():
                scored[window] += before[tokens.stop] - before[tokens.start]
        return scored

    def plan(self, length: int) -> list[list[Piece]]:
        """Return the pieces of a document that share forward passes; only the longest window counts by position."""
        sweeps = [(window,) for window in sorted(self.windows)] if self.apart else [self.windows]
        longest = max(self.windows)
        return [pieces(length, sweep, self.stride, self.bins > 0 and longest in sweep) for sweep in sweeps]


class LossSum(BaseModel):
    """Losses in nats added up over `tokens` tokens."""

    loss: float = 0.0
    tokens: int = 0

    @property
    def mean(self) -> float:
        """The loss a token."""
        return self.loss / self.tokens

    def add(self, losses: torch.Tensor) -> None:
        """Add losses, in float64."""
        self.loss += losses.double().sum().item()
        self.tokens += losses.numel()


class DocumentLosses(BaseModel):
    """The losses of one document by window length, and of the longest window in the bins of `position_bounds`."""

    by_window: dict[int, LossSum]
    by_position: list[LossSum]


def document_losses(
    model: Any,
    document: Sequence[int],
    sweep: Sweep,
    batch_tokens: int | None = None,
    done: Callable[[int, DocumentLosses], None] = lambda pieces, so_far: None,
) -> DocumentLosses:
    """Measure a document that is at least as long as the longest window; `done` is called with how many pieces passed,
    and what the document has so far.
    """
    size = 1 if sweep.apart else max(1, (batch_tokens or pass_tokens(model)) // max(sweep.windows))
    found = DocumentLosses(
        by_window={window: LossSum() for window in sorted(sweep.windows)},
        by_position=[LossSum() for _ in range(sweep.bins)],
    )
    for planned in sweep.plan(len(document)):
        for batch in batches(planned, size):
            if sweep.apart:
                forget_lengths(model)
            _measure(model, document, batch, found)
            done(len(batch), found)
    return found


def _measure(model: Any, document: Sequence[int], batch: list[Piece], found: DocumentLosses) -> None:
    ids = padded(model, [document[piece.start : piece.stop] for piece in batch])
    tokens = sorted(set[int]().union(*(piece.wanted for piece in batch)))
    column = {token: index for index, token in enumerate(tokens)}
    window = ids.shape[1]
    for piece, losses in zip(batch, token_losses(model, ids, tokens), strict=True):
        for length, scored in piece.scored.items():
            # Tokens that follow each other in the document do so here: all between them are wanted too.
            first = column[scored.start - piece.start]
            found.by_window[length].add(losses[first : first + len(scored)])
        if found.by_position and piece.whole and window == max(found.by_window):
            bounds = position_bounds(window, len(found.by_position))
            for bin_, first, last in zip(found.by_position, bounds, bounds[1:], strict=False):
                bin_.add(losses[first - 1 : last - 1])  # losses[i] has i + 1 tokens before it


def position_bounds(window: int, bins: int) -> list[int]:
    """Return the numbers of tokens before a token at which the bins of positions begin; the first token has no loss.

    >>> position_bounds(10, 4)
    [1, 3, 5, 8, 10]
    """
    return [max(1, -(-window * index // bins)) for index in range(bins + 1)]


def added(sums: Iterable[LossSum]) -> LossSum:
    """Return several sums as one, exact whatever their order."""
    losses, tokens = zip(*((each.loss, each.tokens) for each in sums), strict=True)
    return LossSum(loss=math.fsum(losses), tokens=sum(tokens))

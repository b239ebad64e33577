"""Sliding-window perplexity (Press et al. 2022; paper.tex, section 3.2): model in, numbers out.

With a stride shorter than the window, every token of a document but its first is scored exactly once: the first window
scores all its tokens, every later one, `stride` further on, its last `stride`; `windows.py` says which. All scored
tokens weigh the same.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pi_lora.errors import DataError
from pi_lora.evals.token_losses import token_losses
from pi_lora.evals.windows import Piece, batches, pieces

BATCH_TOKENS_ON_CPU = 2048
BATCH_TOKENS_ON_GPU = 16384

Done = Callable[[int], None]


@dataclass(frozen=True)
class WindowScore:
    """The perplexity of one window length (tokens), over `tokens` scored tokens, each weighted equally."""

    window: int
    perplexity: float
    tokens: int


@dataclass
class LossSum:
    """Losses in nats added up over `tokens` tokens."""

    loss: float = 0.0
    tokens: int = 0

    def add(self, losses: torch.Tensor) -> None:
        """Add losses, in float64."""
        self.loss += losses.double().sum().item()
        self.tokens += losses.numel()


@dataclass(frozen=True)
class DocumentLosses:
    """What was found in one document: by window length, and by where a token stands in the longest window.

    Bin `i` of `by_position` is of tokens with `position_bounds[i]` to `position_bounds[i + 1] - 1` tokens before them.
    """

    by_window: dict[int, LossSum]
    by_position: list[LossSum]


def check_sweep(windows: Sequence[int], stride: int) -> None:
    """Refuse a stride that leaves tokens between windows.

    Raises:
        DataError: the stride is longer than a window.
    """
    if not 1 <= stride <= min(windows):
        raise DataError(
            f"--stride: {stride} must be from 1 to the shortest window, {min(windows)}; choose a smaller one"
        )


def sliding_window_perplexity(
    model: Any,
    documents: Sequence[Sequence[int]],
    windows: Sequence[int],
    stride: int = 256,
    batch_tokens: int | None = None,
) -> list[WindowScore]:
    """Perplexity of `model` on `documents` (token ids) at every length in `windows`, token-weighted.

    Raises:
        DataError: the stride is longer than a window, or a document is shorter than the longest one.
    """
    check_sweep(windows, stride)
    longest = max(windows)
    if not documents or min(map(len, documents)) < longest:
        raise DataError(f"--windows: {longest} is longer than a document to be measured; choose a shorter window")
    return window_scores([document_losses(model, each, windows, stride, batch_tokens) for each in documents])


def window_scores(found: Sequence[DocumentLosses]) -> list[WindowScore]:
    """The perplexities of all documents together, the shortest window first."""
    totals = {window: added(each.by_window[window] for each in found) for window in sorted(found[0].by_window)}
    return [WindowScore(window, math.exp(total.loss / total.tokens), total.tokens) for window, total in totals.items()]


def added(sums: Iterable[LossSum]) -> LossSum:
    """Several sums as one, exact whatever their order."""
    together = list(sums)
    return LossSum(math.fsum(each.loss for each in together), sum(each.tokens for each in together))


def position_bounds(window: int, bins: int) -> list[int]:
    """The numbers of tokens before a token at which the bins of positions begin; the first token has no loss.

    >>> position_bounds(10, 4)
    [1, 3, 5, 8, 10]
    """
    return [max(1, -(-window * index // bins)) for index in range(bins + 1)]


def passes(length: int, windows: Sequence[int], stride: int, bins: int = 0, apart: bool = False) -> int:
    """How many pieces of a document of `length` tokens `document_losses` sends through the model."""
    return sum(map(len, _plan(length, windows, stride, bins, apart)))


def document_losses(
    model: Any,
    document: Sequence[int],
    windows: Sequence[int],
    stride: int,
    batch_tokens: int | None = None,
    bins: int = 0,
    apart: bool = False,
    done: Done = lambda pieces: None,
) -> DocumentLosses:
    """The losses of one document that is at least as long as the longest window.

    `bins` asks for losses by position as well: of all tokens in windows that do not overlap. `apart` gives every window
    a forward pass of its own, for models to which the length of an input is more than where it ends. `done` is told how
    many pieces went through the model.
    """
    size = 1 if apart else max(1, (batch_tokens or _batch_tokens(model)) // max(windows))
    found = DocumentLosses({window: LossSum() for window in sorted(windows)}, [LossSum() for _ in range(bins)])
    for sweep in _plan(len(document), windows, stride, bins, apart):
        for batch in batches(sweep, size):
            if apart:
                _forget_lengths(model)
            _measure(model, document, batch, found)
            done(len(batch))
    return found


def _measure(model: Any, document: Sequence[int], batch: list[Piece], found: DocumentLosses) -> None:
    texts = [list(document[piece.start : piece.stop]) for piece in batch]
    width = max(map(len, texts))
    # Causal attention: what is padded on the right changes nothing before it.
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=model.device)
    tokens = sorted(set[int]().union(*(piece.wanted for piece in batch)))
    column = {token: index for index, token in enumerate(tokens)}
    for piece, losses in zip(batch, token_losses(model, ids, tokens), strict=True):
        for window, scored in piece.scored.items():
            # Tokens that follow each other in the document do so here: all between them are wanted too.
            first = column[scored.start - piece.start]
            found.by_window[window].add(losses[first : first + len(scored)])
        if found.by_position and width == max(found.by_window) and piece.whole:
            _add_by_position(losses, width, found.by_position)


def _add_by_position(losses: torch.Tensor, window: int, bins: list[LossSum]) -> None:
    """Add the losses of a whole window to the bins; `losses[i]` has `i + 1` tokens before it."""
    bounds = position_bounds(window, len(bins))
    for bin_, first, last in zip(bins, bounds, bounds[1:], strict=False):
        bin_.add(losses[first - 1 : last - 1])


def _plan(length: int, windows: Sequence[int], stride: int, bins: int, apart: bool) -> list[list[Piece]]:
    """The pieces that share forward passes; by position is asked of the longest window alone."""
    sweeps = [[window] for window in sorted(windows)] if apart else [list(windows)]
    return [pieces(length, sweep, stride, bins > 0 and max(windows) in sweep) for sweep in sweeps]


@torch.no_grad()
def _forget_lengths(model: Any) -> None:
    """transformers keeps the `dynamic` frequencies of the longest input until one comes that is shorter than L."""
    model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)


def _batch_tokens(model: Any) -> int:
    return BATCH_TOKENS_ON_CPU if model.device.type == "cpu" else BATCH_TOKENS_ON_GPU

"""Sliding-window perplexity (Press et al. 2022; paper.tex, section 3.2): model in, numbers out.

With a stride shorter than the window, every token of a document but its first is scored exactly once: the first window
scores all its tokens, every later one, `stride` further on, its last `stride`. Windows of all lengths start at the same
offsets, so a shorter one is a prefix of the longest and one forward pass serves the whole sweep.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from pi_lora.errors import DataError


@dataclass(frozen=True)
class WindowScore:
    """The perplexity of one window length (tokens), over `tokens` scored tokens, each weighted equally."""

    window: int
    perplexity: float
    tokens: int


@torch.no_grad()
def sliding_window_perplexity(
    model: Any,
    documents: Sequence[Sequence[int]],
    windows: Sequence[int],
    stride: int = 256,
    batch_tokens: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> list[WindowScore]:
    """Perplexity of `model` on `documents` (token ids) at every length in `windows`, token-weighted.

    Raises:
        DataError: the stride is longer than a window, or a document is shorter than the longest one.
    """
    longest = max(windows)
    if stride > min(windows) or stride < 1:
        raise DataError(
            f"--stride: {stride} must be from 1 to the shortest window, {min(windows)}; choose a smaller one"
        )
    if not documents or min(map(len, documents)) < longest:
        raise DataError(f"--windows: {longest} is longer than a document to be measured; choose a shorter window")
    losses = dict.fromkeys(windows, 0.0)
    tokens = dict.fromkeys(windows, 0)
    for done, document in enumerate(documents):
        for batch in _batches(_starts(len(document), min(windows), stride), max(1, batch_tokens // longest)):
            for start, token_losses in zip(batch, _losses(model, document, batch, longest), strict=True):
                for window in windows:
                    scored = _scored(window, stride, start, token_losses)
                    losses[window] += scored.double().sum().item()
                    tokens[window] += scored.numel()
        if progress:
            progress(done + 1, len(documents))
    return [
        WindowScore(window, math.exp(losses[window] / tokens[window]), tokens[window]) for window in sorted(windows)
    ]


def _starts(length: int, shortest: int, stride: int) -> list[int]:
    """Where windows start: every `stride`, until even the shortest has reached the document's end."""
    return [0, *range(stride, length - shortest + stride, stride)]


def _scored(window: int, stride: int, start: int, losses: torch.Tensor) -> torch.Tensor:
    """The losses that a window at `start` contributes; `losses[i]` is that of token `start + i + 1`."""
    if start == 0:
        return losses[: window - 1]
    # With a stride as long as the window, a window's first token has nothing before it and stays unscored.
    return losses[max(0, window - stride - 1) : window - 1]


def _losses(model: Any, document: Sequence[int], starts: Sequence[int], longest: int) -> Iterator[torch.Tensor]:
    """The loss in nats of each token in the windows at `starts`, but the first of each; on the CPU."""
    pieces = [list(document[start : start + longest]) for start in starts]
    width = max(map(len, pieces))
    # Causal attention: what is padded on the right changes nothing before it.
    ids = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits
    for row, piece in enumerate(pieces):
        yield cross_entropy(logits[row, : len(piece) - 1].float(), ids[row, 1 : len(piece)], reduction="none").cpu()


def _batches(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]

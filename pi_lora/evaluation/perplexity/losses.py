"""Which tokens of a document are scored in which window (Press et al. 2022): arithmetic on positions, no model.

Windows of every length start at the same offsets, so a shorter one is a prefix of the longest, and one pass of the
model over the longest serves a whole sweep.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from pi_lora.errors import DataError


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


# 128 MiB and 1 GiB in float32; a window of 32k tokens over a vocabulary of 128k has 4 billion, or 16 GiB.
LOGITS_ON_CPU = 2**25
LOGITS_ON_GPU = 2**28


@torch.no_grad()
def token_losses(model: Any, ids: torch.Tensor, tokens: Sequence[int], at_once: int | None = None) -> torch.Tensor:
    """The loss in nats of the tokens at `tokens` in each row of `ids` (rows, length): (rows, tokens), on the CPU.

    `at_once` logits are in memory at a time, or those of one position of every row where that is more.
    """
    places = torch.tensor(tokens, device=ids.device)
    at_once = at_once or (LOGITS_ON_CPU if ids.device.type == "cpu" else LOGITS_ON_GPU)
    positions = max(1, at_once // (len(ids) * model.config.get_text_config().vocab_size))
    parts = [places[start : start + positions] for start in range(0, len(places), positions)]
    # What ModernBERT's decoder calls its decoder is its head (transformers 5.23).
    if len(parts) == 1 or not isinstance(model.get_decoder(), PreTrainedModel):
        parts, logits = [places], iter([_logits(model, ids, places)])
    else:
        logits = _logits_in_parts(model, ids, parts)
    losses = [
        cross_entropy(some.float().flatten(0, 1), ids[:, part].flatten(), reduction="none").view(len(ids), -1)
        for part, some in zip(parts, logits, strict=True)
    ]
    return torch.cat(losses, dim=1).cpu()


def _logits(model: Any, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """What the model expects at `places`: the logits of the positions before them."""
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=places - 1).logits
    return logits


def _logits_in_parts(model: Any, ids: torch.Tensor, parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The logits for each of `parts` in turn.

    The first call runs the layers. Each later one gives the model a single token, and, in place of what the layers make
    of it, what they made of `ids`: so the logits are always made as the model makes them, scaled and capped.
    """
    made: list[torch.Tensor] = []

    def same_again(_module: Any, _inputs: Any, output: Any) -> Any:
        if not made:
            made.append(output.last_hidden_state)
        output.last_hidden_state = made[0]
        return output

    hook = model.get_decoder().register_forward_hook(same_again)
    try:
        for part in parts:
            yield _logits(model, ids[:, :1] if made else ids, part)
    finally:
        hook.remove()


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

"""Sliding-window perplexity (Press et al. 2022; paper.tex, section 3.2): the scored tokens of each window, sums of
losses, typed scores, metrics and picture. Windows of all lengths start at the same offsets, so one forward pass over
the longest window serves a whole sweep.

Models whose tokenizer adds BOS have seen BOS first in all inputs, and many predict far worse without it. So each window
begins with BOS, in place of the first token, which has no context and is not scored. The tokenizer of GLM-4 adds two
tokens, which replace two. As defined by Press et al., only the first window of a document begins with BOS.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from pydantic import Field

from pi_lora.data.tokens import added_prefix
from pi_lora.drawing import Panel, draw_curves, draw_perplexities
from pi_lora.evaluation.duration import Pass, budget_here
from pi_lora.evaluation.forward import check_numbers, pad_rows, pass_tokens, token_losses
from pi_lora.evaluation.measurement import (
    About,
    Measurement,
    Metric,
    Preview,
    Result,
    Scores,
    Session,
    Value,
    header_of,
)
from pi_lora.evaluation.texts import TokenizedDocument, choose_documents, complete, text_problems
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.source import ModelSource
from pi_lora.recipe.evaluation import PerplexityOptions

# The name of what the tokens count for, the sum of their losses in nats, and their number.
LossSum = tuple[str, float, int]
# Bins of the loss by position.
BINS = 32
# Nats a token; the perplexity of a greater mean loss is infinite.
MOST_LOSS = 700.0


class WindowPerplexity(Result):
    """The perplexity at one window length (tokens) over `tokens` scored tokens, each weighted equally."""

    window: int
    perplexity: float
    tokens: int


class DocumentPerplexity(Result):
    """The perplexities of one document, and the digest of the text."""

    name: str
    sha256: str = ""
    tokens: int
    windows: list[WindowPerplexity]


class PositionLoss(Result):
    """The mean loss in nats of tokens with `first` to `last` - 1 tokens before them in their window."""

    first: int = Field(alias="from")
    last: int = Field(alias="to")
    loss: float
    tokens: int


class LossByPosition(Result):
    """The loss by position in windows of `window` tokens that do not overlap."""

    window: int
    bins: list[PositionLoss]


class PerplexityScores(Scores):
    """Sliding-window perplexity of `documents`, chosen and truncated as the options say. `bos` says where BOS stands:
    `each window`, `each document` or `none`.
    """

    measurement = "perplexity"

    options: PerplexityOptions
    data: str = ""
    documents: int | None = None
    documents_too_short: int | None = None
    bos: str | None = None
    stride: int = 0
    weighting: str = "token"
    windows: list[WindowPerplexity]
    per_document: list[DocumentPerplexity] | None = None
    by_position: LossByPosition | None = None


class Perplexity(Measurement[PerplexityOptions, PerplexityScores]):
    """Sliding-window perplexity (paper, section 3.2)."""

    options = PerplexityOptions
    scores = PerplexityScores

    def prepare(self, options: PerplexityOptions, models: Sequence[ModelSource]) -> PerplexityOptions:
        """Fill in text, documents, windows and stride, alike for all models. The default text is the one in the recipe
        of a run; for the built-in model it is the standard library. Raise DataError without a text.
        """
        options_in_recipes = [model.recipe.evaluation.perplexity for model in models if model.recipe]
        recipe_options = next(filter(None, options_in_recipes), None)
        if options.data is None and recipe_options:
            options = recipe_options.changed(**options.model_dump(exclude_unset=True, exclude_none=True))
        options = complete(options, models)
        originals = [model.original for model in models]
        return options.changed(**options.sizes(max(model.window for model in models), originals, budget_here()))

    def problems(self, options: PerplexityOptions, preview: Preview) -> list[str]:
        """Return the problems of the text."""
        return text_problems(options, preview, windows=max(options.windows or [preview.window]))

    def measure(self, model: LoadedModel, options: PerplexityOptions, session: Session) -> PerplexityScores:
        """Measure the documents that the options choose, at least as long as the longest window. The processes
        divide the forward passes.
        """
        windows, stride = options.sweep(model.window)
        prefix = added_prefix(model.tokenizer)
        unscored = max(1, len(prefix))
        sweep = Sweep(
            windows,
            stride,
            bins=min(BINS, max(windows) - unscored),
            unscored=unscored,
        )
        documents, too_short = choose_documents(model, options, max(windows))
        sums_by_document = _measure_documents(model, documents, sweep, options, session)
        per_document = []
        for document, sums in zip(documents, sums_by_document, strict=True):
            rows = window_scores(sums, windows)
            check_numbers(model, all(math.isfinite(row.perplexity) for row in rows))
            tokens = len(document.ids)
            row = DocumentPerplexity(name=document.name, sha256=document.digest, tokens=tokens, windows=rows)
            per_document.append(row)
        all_sums = list(chain.from_iterable(sums_by_document))
        return PerplexityScores(
            **header_of(model),
            options=options,
            data=options.data or "",
            documents=len(documents),
            documents_too_short=too_short,
            bos=f"each {options.bos}" if prefix else "none",
            stride=stride,
            weighting="token",
            windows=window_scores(all_sums, windows),
            per_document=per_document,
            by_position=_by_position(all_sums, sweep),
        )

    def metrics(self, scores: PerplexityScores) -> Iterator[Metric]:
        """Yield the perplexity by window, with the values of the documents."""
        # Values with and without BOS in a window are no pairs.
        bos = ", BOS in each window" if scores.bos == "each window" else ""
        for row in scores.windows:
            values = [
                Value(name, score.perplexity, score.tokens)
                for document in scores.per_document or ()
                for name in [f"{document.name}{document.sha256} of {document.tokens} tokens{bos}"]
                for score in document.windows
                if score.window == row.window
            ]
            yield Metric(
                label="perplexity",
                value=row.perplexity,
                higher_is_better=False,
                at=row.window,
                digits=3,
                values=values,
                is_ratio=True,
                dataset=scores.data,
                hub_name="perplexity",
            )

    def panels(self, scores: Mapping[str, PerplexityScores]) -> Iterator[Panel]:
        """Yield perplexity by window if there are several, and the loss by position if all scores have it."""
        sweeps = {}
        losses = {}
        for label, result in scores.items():
            sweeps[label] = [(row.window, row.perplexity) for row in result.windows]
            if result.by_position:
                losses[label] = [(part.first, part.loss) for part in result.by_position.bins]
        if any(len(points) > 1 for points in sweeps.values()):
            yield partial(draw_perplexities, sweeps)
        if len(losses) == len(scores):
            yield partial(draw_curves, losses, xlabel="tokens before, in the window", ylabel="loss (nats per token)")


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `stop` of a document, which go through the model once.

    Attributes:
        start: The first token.
        stop: The token after the last.
        scored: The tokens whose losses are needed, by name: `window 4096`, or `position 128` for the bin that begins
            after 128 tokens.
        score_all: Whether all losses are needed: in the first piece, and in pieces that count by position.
    """

    start: int
    stop: int
    scored: Mapping[str, range]
    score_all: bool


@dataclass(frozen=True)
class Sweep:
    """The tokens of a document that are measured: windows and stride in tokens, the number of bins of losses by
    position, and the number of tokens at the start of an input that are not scored: those that the tokenizer adds, or
    else the first one, which has no context.
    """

    windows: tuple[int, ...]
    stride: int
    bins: int = 0
    unscored: int = 1

    @property
    def positions(self) -> list[int]:
        """The bounds of the bins of positions in the longest window, as numbers of tokens before a token.

        >>> Sweep((10,), 4, bins=4).positions, Sweep((10,), 4).positions
        ([1, 3, 5, 8, 10], [])
        """
        if not self.bins:
            return []
        longest = max(self.windows)
        bounds = [math.ceil(longest * index / self.bins) for index in range(self.bins + 1)]
        return [max(self.unscored, bound) for bound in bounds]

    def passes(self, length: int, tokens: int) -> Iterator[list[Piece]]:
        """Yield the pieces of a document of `length` tokens in groups that go through the model together. A group of
        several has at most `tokens` tokens. Pieces that need all losses have groups of their own.
        """
        size = max(1, tokens // max(self.windows))
        pieces = list(self.pieces(length))
        for score_all in (True, False):
            alike = [piece for piece in pieces if piece.score_all == score_all]
            for start in range(0, len(alike), size):
                yield alike[start : start + size]

    def pieces(self, length: int) -> Iterator[Piece]:
        """Yield the pieces of a document of `length` tokens.

        The first window scores all tokens, a later one, `stride` further on, the last `stride`, but no window the first
        `unscored` ones. A piece is as long as the longest window that scores in it. Of the longest windows, those that
        fit without overlap count by position.

        >>> [(piece.start, piece.stop, dict(piece.scored)) for piece in Sweep((4, 6), stride=2).pieces(10)]
        ... # doctest: +NORMALIZE_WHITESPACE
        [(0, 6, {'window 4': range(1, 4), 'window 6': range(1, 6)}),
         (2, 8, {'window 4': range(4, 6), 'window 6': range(6, 8)}),
         (4, 10, {'window 4': range(6, 8), 'window 6': range(8, 10)}), (6, 10, {'window 4': range(8, 10)})]
        """
        longest = max(self.windows)
        # The longest windows that count by position are this many tokens apart, so that they do not overlap.
        by_position_stride = math.ceil(longest / self.stride) * self.stride
        starts = range(0, max(1, length - min(self.windows) + self.stride), self.stride)
        for start in starts:
            scored = {}
            for window in self.windows:
                first = start + self.unscored
                if start:
                    first = max(first, start + window - self.stride)
                scored[f"window {window}"] = range(first, min(start + window, length))
            by_position = self.bins > 0 and start % by_position_stride == 0 and start + longest <= length
            if by_position:
                for first, last in pairwise(self.positions):
                    scored[f"position {first}"] = range(start + first, start + last)
            scored = {name: tokens for name, tokens in scored.items() if tokens}
            if scored:
                stop = max(tokens.stop for tokens in scored.values())
                yield Piece(start, stop, scored, score_all=start == 0 or by_position)


@torch.no_grad()
def scored_losses(
    model: Any, document: Sequence[int], pieces: Sequence[Piece], prefix: Sequence[int] = ()
) -> Iterator[tuple[str, range, torch.Tensor]]:
    """Yield a name, the tokens of a document that count for it, and their losses in nats: (tokens), on the CPU. The
    pieces go through the model together. The tokens of `prefix` take the place of the first ones of a piece.
    """
    rows = [[*prefix, *document[piece.start + len(prefix) : piece.stop]] for piece in pieces]
    ids = pad_rows(model, rows)
    needed = {token - piece.start for piece in pieces for tokens in piece.scored.values() for token in tokens}
    positions = sorted(needed)
    for piece, losses in zip(pieces, token_losses(model, ids, positions).double(), strict=True):
        for name, tokens in piece.scored.items():
            # The positions of a range are adjacent in `positions` too.
            first = positions.index(tokens.start - piece.start)
            yield name, tokens, losses[first : first + len(tokens)]


def _measure_documents(
    model: LoadedModel,
    documents: Sequence[TokenizedDocument],
    sweep: Sweep,
    options: PerplexityOptions,
    session: Session,
) -> list[list[LossSum]]:
    """Return the loss sums of the forward passes over each document. If the rotary frequencies follow the length of the
    input, each piece of each window goes through the model alone.
    """
    sweeps = [sweep]
    tokens = pass_tokens(model.module)
    if model.source.rope.depends_on_length:
        *shorter, longest = sweep.windows
        sweeps = [replace(sweep, windows=(window,), bins=0) for window in shorter]
        sweeps.append(replace(sweep, windows=(longest,)))
        tokens = 1
    prefix = added_prefix(model.tokenizer) if options.bos == "window" else []
    passes = [
        (number, pieces)
        for number, document in enumerate(documents)
        for part in sweeps
        for pieces in part.passes(len(document.ids), tokens)
    ]

    def sums_of_pass(index: int) -> list[LossSum]:
        number, pieces = passes[index]
        scored = scored_losses(model.module, documents[number].ids, pieces, prefix)
        return [(name, losses.sum().item(), len(tokens)) for name, tokens, losses in scored]

    def passes_of(index: int) -> list[Pass]:
        _, pieces = passes[index]
        return [(0, piece.stop - piece.start) for piece in pieces]

    windows = f"{len(sweep.windows)} window{'s' * (len(sweep.windows) > 1)}"
    less = ("documents", len(documents) // 4 or 1) if len(documents) > 1 else ("windows", max(sweep.windows))
    about = About("perplexity", f"{len(documents)} documents at {windows}", less)
    decided_by = {"texts": [document.digest for document in documents]}
    results = session.map_items(
        model, options, decided_by, items=range(len(passes)), function=sums_of_pass, about=about, passes=passes_of
    )
    sums_by_document: list[list[LossSum]] = [[] for _ in documents]
    for (number, _), sums in zip(passes, results, strict=True):
        sums_by_document[number] += sums
    return sums_by_document


def mean_loss(sums: Sequence[LossSum], name: str) -> tuple[float, int]:
    """Return the mean loss in nats of the tokens that count for `name`, and their number; `sums` may have any order."""
    losses = [loss for counted, loss, _ in sums if counted == name]
    tokens = sum(number for counted, _, number in sums if counted == name)
    return math.fsum(losses) / tokens, tokens


def window_scores(sums: Sequence[LossSum], windows: Sequence[int]) -> list[WindowPerplexity]:
    """Return the perplexities over some forward passes, with every token weighted equally; infinite on overflow."""
    scores = []
    for window in windows:
        loss, tokens = mean_loss(sums, f"window {window}")
        perplexity = math.exp(loss) if loss < MOST_LOSS else math.inf
        scores.append(WindowPerplexity(window=window, perplexity=perplexity, tokens=tokens))
    return scores


def _by_position(sums: Sequence[LossSum], sweep: Sweep) -> LossByPosition:
    """Return the loss by position over some forward passes."""
    bins = []
    for first, last in pairwise(sweep.positions):
        loss, tokens = mean_loss(sums, f"position {first}")
        bins.append(PositionLoss(first=first, last=last, loss=loss, tokens=tokens))
    return LossByPosition(window=max(sweep.windows), bins=bins)

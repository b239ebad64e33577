"""Sliding-window perplexity (Press et al. 2022; paper.tex, section 3.2): the tokens that a window scores, the
sums of their losses, typed scores, metrics and picture. Windows of every length start at the same offsets, so one pass
of the model over the longest serves a whole sweep.
"""

import hashlib
import math
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from pydantic import Field

from pi_lora.data.documents import Document
from pi_lora.data.sources import STDLIB, evaluation_documents
from pi_lora.data.tokens import tokenized
from pi_lora.drawing import Panel, draw_by_window, draw_curves
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import (
    check_numbers,
    depends_on_length,
    forget_lengths,
    padded,
    pass_tokens,
    token_losses,
    without_end,
)
from pi_lora.evaluation.measurement import Measurement, Metric, Result, Scores, Session, Value
from pi_lora.models.files import BUILTIN
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import PerplexityOptions
from pi_lora.types import Json

# What tokens count for, their losses in nats added up, and their number.
LossSum = tuple[str, float, int]
BINS = 32
# Nats a token; the perplexity of a greater mean loss is infinite.
MOST_LOSS = 700.0
# The paper's choice of documents: 128 of 32768 tokens and more; which the paper drew is not known. Of the standard
# library what the built-in model reads in a minute or two on two cores.
DEFAULTS: dict[str, dict[str, int]] = {
    "proof-pile": {"documents": 128, "min_tokens": 32768, "truncate": 32768, "seed": 0},
    STDLIB: {"documents": 12},
}


class WindowPerplexity(Result):
    """The perplexity at one window length (tokens) over `tokens` scored tokens, each weighted equally."""

    window: int
    perplexity: float
    tokens: int


class DocumentPerplexity(Result):
    """The perplexities of one document."""

    name: str
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
    """Sliding-window perplexity of `documents`, chosen and truncated as the options say."""

    measurement = "perplexity"

    options: PerplexityOptions
    data: str = ""
    documents: int | None = None
    documents_too_short: int | None = None
    bos: bool | None = None
    stride: int = 0
    weighting: str = "token"
    windows: list[WindowPerplexity]
    per_document: list[DocumentPerplexity] | None = None
    by_position: LossByPosition | None = None


class Perplexity(Measurement[PerplexityOptions, PerplexityScores]):
    """Sliding-window perplexity (paper, section 3.2)."""

    scores = PerplexityScores

    def prepare(self, options: PerplexityOptions, models: Sequence[Model]) -> PerplexityOptions:
        """Fill in text, documents, windows and stride, alike for all models. The text is by default the one that the
        recipe of a run names, and of the built-in model the standard library. Raise DataError if there is none.
        """
        asked = [model.recipe.evaluation.perplexity for model in models if model.recipe]
        own = next(filter(None, asked), None)
        if options.data is None and own:
            options = own.changed(**options.model_dump(exclude_defaults=True))
        bases = [model.recipe.model.name if model.recipe else model.base for model in models]
        if options.data is None and not all(base.startswith(BUILTIN) for base in bases):
            raise DataError(
                f"--data: name a text that {models[0].name} was not tuned on: a file, folder or hub data set"
            )
        data = options.data or STDLIB
        windows, stride = options.sweep(max(model.window for model in models))
        default: Json = {"data": data, "windows": windows, "stride": stride, **DEFAULTS.get(data, {})}
        return options.changed(**default | options.model_dump(exclude_none=True))

    def measure(self, model: Model, options: PerplexityOptions, session: Session) -> Json:
        """Measure the documents that the options choose and that are at least as long as the longest window. The
        processes of a shared session divide the forward passes.
        """
        windows, stride = options.sweep(model.window)
        sweep = Sweep(windows, stride, min(BINS, max(windows) - 1))
        documents, too_short = choose_documents(model, options, max(windows))
        sums = _measure(model, documents, sweep, session)
        per_document = [
            DocumentPerplexity(name=name, tokens=len(ids), windows=window_scores(own, windows))
            for (name, ids), own in zip(documents, sums, strict=True)
        ]
        check_numbers(model, all(math.isfinite(row.perplexity) for each in per_document for row in each.windows))
        every = [each for own in sums for each in own]
        return {
            "data": options.data,
            "documents": len(documents),
            "documents_too_short": too_short,
            "bos": documents[0].ids[0] == model.tokenizer.bos_token_id,
            "stride": stride,
            "weighting": "token",
            "windows": window_scores(every, windows),
            "per_document": per_document,
            "by_position": _by_position(every, sweep),
        }

    def metrics(self, scores: PerplexityScores) -> list[Metric]:
        """Return the perplexity by window, with those of the documents."""
        about: Json = {"dataset": scores.data, "digits": 3, "higher_is_better": False, "is_ratio": True}
        metrics = []
        for row in scores.windows:
            values = [
                Value(f"{document.name} of {document.tokens} tokens", own.perplexity, own.tokens)
                for document in scores.per_document or ()
                for own in document.windows
                if own.window == row.window
            ]
            hub: Json = {"values": values, "hub_name": "perplexity", **about}
            metrics.append(Metric("perplexity", row.perplexity, at=row.window, **hub))
        return metrics

    def panels(self, scores: Mapping[str, PerplexityScores]) -> list[Panel]:
        """Return perplexity by window if there are several, and the loss by position where all have it."""
        panels: list[Panel] = []
        sweeps = {label: [(row.window, row.perplexity) for row in each.windows] for label, each in scores.items()}
        if any(len(points) > 1 for points in sweeps.values()):
            panels.append(partial(draw_by_window, sweeps, "perplexity (lower is better)"))
        losses = {
            label: [(part.first, part.loss) for part in each.by_position.bins]
            for label, each in scores.items()
            if each.by_position
        }
        if len(losses) == len(scores):
            axes = {"xlabel": "tokens before, in the window", "ylabel": "loss (nats a token)"}
            panels.append(partial(draw_curves, losses, **axes))
        return panels


class TokenizedDocument(NamedTuple):
    """A document as it is measured: its name, and its token ids, truncated if asked."""

    name: str
    ids: "array[int]"


def choose_documents(model: Model, options: PerplexityOptions, longest: int) -> tuple[list[TokenizedDocument], int]:
    """Return the first documents that the options ask for, or with a seed as many at random, for windows of up to
    `longest` tokens; and how many others were too short. Raise DataError if none is long enough.
    """
    needed = max(longest, options.min_tokens or 0)
    documents: Iterable[Document] = evaluation_documents(options)
    if options.seed is not None:
        documents = list(documents)
        random.Random(options.seed).shuffle(documents)
    chosen, lengths = list[TokenizedDocument](), list[int]()
    for document in documents:
        [ids] = tokenized(model.tokenizer, [document.text])
        ids = without_end(model.tokenizer, ids)
        lengths.append(len(ids))
        if len(ids) >= needed:
            chosen.append(TokenizedDocument(document.name, array("i", ids[: options.truncate])))
        if len(chosen) == options.documents:
            break
    if not chosen:
        shorter = f"{options.data}: the longest document has {max(lengths)} tokens, {needed} are needed"
        raise DataError(f"--data: {shorter}; name longer texts, or choose a shorter window")
    return chosen, len(lengths) - len(chosen)


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
    """Which tokens of a document are measured: windows and their stride in tokens; `bins` of losses by position, if
    any.
    """

    windows: tuple[int, ...]
    stride: int
    bins: int = 0

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
        size = max(1, tokens // max(self.windows))
        planned = list(self.pieces(length))
        for whole in (True, False):
            alike = [piece for piece in planned if piece.whole == whole]
            for start in range(0, len(alike), size):
                yield alike[start : start + size]

    def pieces(self, length: int) -> Iterator[Piece]:
        """Yield the pieces of a document of `length` tokens.

        The first window scores all its tokens, every later one, `stride` further on, its last `stride`. With a stride
        as long as the window, a window's first token has no context and is not scored. A piece is as long as the
        longest window that scores in it. Of the longest windows, those that fit without overlap count by position.

        >>> [(piece.start, piece.stop, dict(piece.scored)) for piece in Sweep((4, 6), stride=2).pieces(10)]
        ... # doctest: +NORMALIZE_WHITESPACE
        [(0, 6, {'window 4': range(1, 4), 'window 6': range(1, 6)}),
         (2, 8, {'window 4': range(4, 6), 'window 6': range(6, 8)}),
         (4, 10, {'window 4': range(6, 8), 'window 6': range(8, 10)}), (6, 10, {'window 4': range(8, 10)})]
        """
        longest, stride = max(self.windows), self.stride
        apart = -(-longest // stride) * stride
        for start in (0, *range(stride, length - min(self.windows) + stride, stride)):
            scored = {}
            for window in self.windows:
                first = max(start + window - stride, start + 1) if start else 1
                scored[f"window {window}"] = range(first, min(start + window, length))
            by_position = self.bins > 0 and start % apart == 0 and start + longest <= length
            for first, last in pairwise(self.positions if by_position else ()):
                scored[f"position {first}"] = range(start + first, start + last)
            scored = {name: tokens for name, tokens in scored.items() if tokens}
            if scored:
                stop = max(tokens.stop for tokens in scored.values())
                yield Piece(start, stop, scored, whole=start == 0 or by_position)


def pass_losses(model: Any, document: Sequence[int], pieces: Sequence[Piece]) -> list[LossSum]:
    """Return the losses of some pieces of a document, which go through the model together."""
    ids = padded(model, [document[piece.start : piece.stop] for piece in pieces])
    wanted = sorted({token - piece.start for piece in pieces for tokens in piece.scored.values() for token in tokens})
    sums = []
    for piece, losses in zip(pieces, token_losses(model, ids, wanted).double(), strict=True):
        for name, tokens in piece.scored.items():
            # Tokens that follow each other in the document do so here: all between them are wanted too.
            first = wanted.index(tokens.start - piece.start)
            sums.append((name, losses[first : first + len(tokens)].sum().item(), len(tokens)))
    return sums


def _measure(
    model: Model, documents: Sequence[TokenizedDocument], sweep: Sweep, session: Session
) -> list[list[LossSum]]:
    """Return the sums of losses of the forward passes over each document. Where a model's frequencies follow the length
    of the input, each piece of each window goes through the model alone.
    """
    sweeps, at_once = [sweep], pass_tokens(model.model)
    if depends_on_length(model.config):
        sweeps, at_once = [Sweep((window,), sweep.stride) for window in sweep.windows[:-1]], 1
        sweeps.append(replace(sweep, windows=sweep.windows[-1:]))
    passes = [
        (number, pieces)
        for number, document in enumerate(documents)
        for each in sweeps
        for pieces in each.passes(len(document.ids), at_once)
    ]

    def measure(index: int) -> list[LossSum]:
        forget_lengths(model)
        number, pieces = passes[index]
        return pass_losses(model.model, documents[number].ids, pieces)

    texts = [hashlib.sha256(document.ids).hexdigest() for document in documents]
    decided_by = {"sweep": asdict(sweep), "texts": texts}
    sums: list[list[LossSum]] = [[] for _ in documents]
    for (number, _), own in zip(passes, session.measure(model, decided_by, range(len(passes)), measure), strict=True):
        sums[number] += own
    return sums


def mean_loss(sums: Sequence[LossSum], name: str) -> tuple[float, int]:
    """Return the mean loss in nats of the tokens that count for `name`, and their number; `sums` may have any order."""
    own = [each for each in sums if each[0] == name]
    tokens = sum(number for _, _, number in own)
    return math.fsum(loss for _, loss, _ in own) / tokens, tokens


def window_scores(sums: Sequence[LossSum], windows: Sequence[int]) -> list[WindowPerplexity]:
    """Return the perplexities of some forward passes together, every token weighted equally; infinite on overflow."""
    scores = []
    for window in windows:
        loss, tokens = mean_loss(sums, f"window {window}")
        perplexity = math.exp(loss) if loss < MOST_LOSS else math.inf
        scores.append(WindowPerplexity(window=window, perplexity=perplexity, tokens=tokens))
    return scores


def _by_position(sums: Sequence[LossSum], sweep: Sweep) -> LossByPosition:
    bins = []
    for first, last in pairwise(sweep.positions):
        loss, tokens = mean_loss(sums, f"position {first}")
        bins.append(PositionLoss(first=first, last=last, loss=loss, tokens=tokens))
    return LossByPosition(window=max(sweep.windows), bins=bins)

"""Perplexity as a measurement: documents and a model in, typed scores out, with their metrics and their picture."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from pydantic import Field

from pi_lora.drawing import Panel, draw_curves, label_logarithmic, label_windows
from pi_lora.evaluation.forward import check_numbers, depends_on_length, described
from pi_lora.evaluation.journal import Journal, Session
from pi_lora.evaluation.measurement import Measurement, Result, Scores
from pi_lora.evaluation.metrics import Metric, Value
from pi_lora.evaluation.perplexity import losses
from pi_lora.evaluation.perplexity.documents import TokenizedDocument, choose_documents, completed
from pi_lora.evaluation.perplexity.losses import DocumentLosses, Sweep, added
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import PerplexityOptions
from pi_lora.types import Progress

BINS = 32
# Options that choose a text and are named in the caption of a table where they are not as usual.
CHOICE = {"subset", "split", "hold_out", "column", "seed", "truncate"}


class WindowPerplexity(Result):
    """The perplexity at one window length (tokens) over `tokens` scored tokens, each weighted equally, and their loss
    in bits over the `bytes` of UTF-8 text that as many tokens of the same documents stand for on average.
    """

    window: int
    perplexity: float
    tokens: int
    bits_per_byte: float | None = None
    bytes: int | None = None


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

    options: PerplexityOptions | None = None
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

    name = "perplexity"
    options = PerplexityOptions
    scores = PerplexityScores

    def prepare(self, options: PerplexityOptions, models: Sequence[Model]) -> PerplexityOptions:
        """Fill in the text, its documents, windows and stride, by default those of the longest window."""
        return completed(options, models)

    def run(self, model: Model, options: PerplexityOptions, session: Session) -> PerplexityScores:
        """Measure a model."""
        return evaluate_perplexity(model, options, session)

    def metrics(self, scores: PerplexityScores) -> list[Metric]:
        """Return perplexity and bits per byte by window."""
        lower: dict[str, Any] = {"higher_is_better": False}
        metrics = [
            Metric(
                "perplexity",
                row.perplexity,
                at=row.window,
                digits=3,
                samples=row.tokens,
                values=_by_document(scores, row.window),
                is_ratio=True,
                dataset=scores.data,
                hub_name="perplexity",
                **lower,
            )
            for row in scores.windows
        ]
        for row in scores.windows:
            if row.bits_per_byte is not None:
                metrics.append(Metric("bits per byte", row.bits_per_byte, at=row.window, digits=4, **lower))
        return metrics

    def about(self, scores: Sequence[PerplexityScores]) -> str:
        """Return the text, the documents, the stride and the weighting."""
        first, options = scores[0], scores[0].options or PerplexityOptions()
        least = max([row.window for row in first.windows] + [options.min_tokens or 0])
        chosen = options.model_dump(include=CHOICE, exclude_defaults=True)
        parts = [f"{first.documents} documents of {first.data}", *(f"{name} {value}" for name, value in chosen.items())]
        parts += [f"of at least {least:,} tokens", f"stride {first.stride}", "every token weighted equally"]
        about = ", ".join(parts)
        # Texts cut to the same number of tokens have different numbers of bytes if the tokenizers differ.
        if len({tuple((row.tokens, row.bytes) for row in each.windows) for each in scores}) > 1:
            about += "; the tokenizers differ: perplexities by token do not compare, bits per byte do"
        return about

    def panels(self, scores: Mapping[str, PerplexityScores]) -> list[Panel]:
        """Return perplexity by window if there are several, and the loss by position where all have it."""
        panels: list[Panel] = []
        if any(len(each.windows) > 1 for each in scores.values()):
            panels.append(partial(_draw_windows, scores))
        bins = {label: each.by_position.bins for label, each in scores.items() if each.by_position}
        if len(bins) == len(scores):
            panels.append(partial(_draw_positions, bins))
        return panels


def evaluate_perplexity(model: Model, options: PerplexityOptions, session: Session | None = None) -> PerplexityScores:
    """Measure the documents that the options choose and that are at least as long as the longest window. If the session
    is shared, each process measures its share of the documents, with the whole model, and an interrupted evaluation
    continues when it is called again.
    """
    session = session or Session()
    options = completed(options, [model])
    windows, stride = options.sweep(model.window)
    longest = max(windows)
    bins = min(BINS, longest - 1) if options.by_position else 0
    sweep = Sweep(windows, stride, bins, depends_on_length(model.config))
    documents, too_short = choose_documents(model, options, longest)
    journal = session.journal(model, {"data": options.data, **asdict(sweep)})
    measured = _measure(model, documents, sweep, journal, session.progress)
    sums = [loss for document in measured for loss in document.by_window.values() if loss.tokens]
    check_numbers(model.name, model.model.dtype, all(math.isfinite(loss.perplexity) for loss in sums))
    return PerplexityScores(
        **described(model),
        options=options,
        data=options.data or "",
        documents=len(documents),
        documents_too_short=too_short,
        bos=documents[0].ids[0] == model.tokenizer.bos_token_id,
        stride=stride,
        weighting="token",
        windows=window_scores(measured, documents),
        per_document=[
            DocumentPerplexity(name=document.name, tokens=len(document.ids), windows=window_scores([own], [document]))
            for document, own in zip(documents, measured, strict=True)
        ],
        **({"by_position": _by_position(measured, longest)} if options.by_position else {}),
    )


def window_scores(
    found: Sequence[DocumentLosses], documents: Sequence[TokenizedDocument] = ()
) -> list[WindowPerplexity]:
    """Return the token-weighted perplexities of all documents together, the shortest window first; and the bits per
    byte if the documents are given.
    """
    scores = []
    for window in sorted(found[0].by_window):
        total = added(each.by_window[window] for each in found)
        pairs = zip(documents, found, strict=bool(documents))
        size = sum(document.bytes_per_token * each.by_window[window].tokens for document, each in pairs)
        bits = {"bits_per_byte": total.loss / math.log(2) / size, "bytes": round(size)} if documents else {}
        scores.append(WindowPerplexity(window=window, perplexity=total.perplexity, tokens=total.tokens, **bits))
    return scores


def _measure(
    model: Model, documents: Sequence[TokenizedDocument], sweep: Sweep, journal: Journal, progress: Progress
) -> list[DocumentLosses]:
    names = [hashlib.sha256(document.ids).hexdigest() for document in documents]
    named = dict(zip(names, documents, strict=True))
    total = sum(len(piece) for name in journal.left(list(named)) for piece in sweep.plan(len(named[name].ids)))
    done = 0

    def count(pieces: int) -> None:
        nonlocal done
        done += pieces
        progress(done, total)

    def measure(name: str) -> DocumentLosses:
        return losses.document_losses(model.model, named[name].ids, sweep, count)

    measured = journal.measure(DocumentLosses, list(named), measure)
    return [measured[name] for name in names]


def _by_position(documents: Sequence[DocumentLosses], window: int) -> LossByPosition:
    firsts = list(documents[0].by_position)
    bins = []
    for first, last in zip(firsts, [*firsts[1:], window], strict=True):
        total = added(each.by_position[first] for each in documents)
        bins.append(PositionLoss(first=first, last=last, loss=total.mean, tokens=total.tokens))
    return LossByPosition(window=window, bins=bins)


def _by_document(scores: PerplexityScores, window: int) -> list[Value]:
    return [
        Value(f"{document.name} of {document.tokens} tokens", part.perplexity, part.tokens)
        for document in scores.per_document or ()
        for part in document.windows
        if part.window == window
    ]


def _draw_windows(scores: Mapping[str, PerplexityScores], axes: Any) -> None:
    curves = {label: [(row.window, row.perplexity) for row in each.windows] for label, each in scores.items()}
    draw_curves(axes, curves)
    label_logarithmic(axes, "perplexity (lower is better)")
    label_windows(axes, [row.window for each in scores.values() for row in each.windows])


def _draw_positions(bins: Mapping[str, Sequence[PositionLoss]], axes: Any) -> None:
    draw_curves(axes, {label: [(part.first, part.loss) for part in each] for label, each in bins.items()})
    axes.set(xlabel="tokens before, in the window", ylabel="loss (nats a token)")

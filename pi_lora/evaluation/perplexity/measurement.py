"""Perplexity as a measurement: documents and a model in, typed scores out, with their metrics and their picture."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import Field

from pi_lora.drawing import draw_curves, label_windows, round_levels
from pi_lora.evaluation.forward import check_numbers, depends_on_length, described
from pi_lora.evaluation.journal import Journal, Session
from pi_lora.evaluation.measurement import Measurement, Result, Scores
from pi_lora.evaluation.metrics import Metric, Value
from pi_lora.evaluation.perplexity import losses
from pi_lora.evaluation.perplexity.documents import TokenizedDocument, choose_documents, completed
from pi_lora.evaluation.perplexity.losses import DocumentLosses, LossSum, Sweep, added
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import PerplexityOptions
from pi_lora.types import Progress

BINS = 32


class WindowPerplexity(Result):
    """The perplexity at one window length (tokens) over `tokens` scored tokens, each weighted equally, and their loss
    in bits over the `bytes` of UTF-8 text that they stand for.
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
        """Return perplexity and bits per byte by window, and the loss by position where it was measured."""
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
        for bin_ in scores.by_position.bins if scores.by_position else ():
            label = f"loss of tokens {bin_.first:,} to {bin_.last - 1:,} in a window"
            metrics.append(Metric(label, bin_.loss, "nats", digits=3, samples=bin_.tokens, **lower))
        return metrics

    def about(self, scores: Sequence[PerplexityScores]) -> str:
        """Return the text, the documents, the stride and the weighting."""
        first, options = scores[0], scores[0].options or PerplexityOptions()
        least = max([row.window for row in first.windows] + [options.min_tokens or 0])
        details = {
            f"subset {options.subset}": options.subset is not None,
            f"split {options.split}": options.split != "test",
            f"the {options.hold_out or 0:.1%} held out of training": options.hold_out is not None,
            f"column {options.column}": options.column != "text",
            f"drawn with seed {options.seed}": options.seed is not None,
            f"the first {options.truncate or 0:,} tokens of each": options.truncate is not None,
        }
        parts = [f"{first.documents} documents of {first.data}", *(text for text, said in details.items() if said)]
        parts += [f"of at least {least:,} tokens", f"stride {first.stride}", "every token weighted equally"]
        about = ", ".join(parts)
        # Texts cut to the same number of tokens have different numbers of bytes if the tokenizers differ.
        if len({tuple((row.tokens, row.bytes) for row in each.windows) for each in scores}) > 1:
            about += "; the tokenizers differ: perplexities by token do not compare, bits per byte do"
        return about

    def draw(self, axes: Any, scores: Mapping[str, PerplexityScores]) -> None:
        """Draw the loss by position where all have it, and else perplexity by window."""
        bins = {label: each.by_position.bins for label, each in scores.items() if each.by_position}
        if len(bins) == len(scores):
            draw_curves(axes, {label: [(bin_.first, bin_.loss) for bin_ in each] for label, each in bins.items()})
            axes.set(xlabel="tokens before, in the window", ylabel="loss (nats a token)")
            return
        curves = {label: [(row.window, row.perplexity) for row in each.windows] for label, each in scores.items()}
        draw_curves(axes, curves)
        axes.set(yscale="log", ylabel="perplexity (lower is better)")
        label_windows(axes, [row.window for each in scores.values() for row in each.windows])
        levels = round_levels(*axes.get_ylim())
        axes.set_yticks(levels, [f"{level:g}" for level in levels])
        axes.minorticks_off()


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
        windows=window_scores(measured),
        per_document=[
            DocumentPerplexity(name=document.name, tokens=len(document.ids), windows=window_scores([own]))
            for document, own in zip(documents, measured, strict=True)
        ],
        **({"by_position": _by_position(measured, longest)} if options.by_position else {}),
    )


def window_scores(found: Sequence[DocumentLosses]) -> list[WindowPerplexity]:
    """Return the token-weighted perplexities of all documents together, the shortest window first; and the bits per
    byte if the bytes of the text are known.
    """
    scores = []
    for window in sorted(found[0].by_window):
        total = added(each.by_window[window] for each in found)
        bits = (
            {"bits_per_byte": total.loss / math.log(2) / total.bytes, "bytes": round(total.bytes)}
            if total.bytes
            else {}
        )
        scores.append(WindowPerplexity(window=window, perplexity=total.perplexity, tokens=total.tokens, **bits))
    return scores


def _measure(
    model: Model, documents: Sequence[TokenizedDocument], sweep: Sweep, journal: Journal, progress: Progress
) -> list[DocumentLosses]:
    # Named by their tokens, and by the text that these stand for.
    names = [hashlib.sha256(bytes(document.ids) + bytes(document.bytes_before)).hexdigest() for document in documents]
    named = dict(zip(names, documents, strict=True))
    total = sum(len(piece) for name in journal.left(list(named)) for piece in sweep.plan(len(named[name].ids)))
    done, before, longest = 0, [LossSum()], max(sweep.windows)

    def count(pieces: int, so_far: DocumentLosses) -> None:
        nonlocal done
        done += pieces
        own = so_far.by_window[longest]
        note = f"perplexity {added([*before, own]).perplexity:.2f} at {longest:,} so far" if own.tokens else ""
        progress(done, total, note)

    def measure(name: str) -> DocumentLosses:
        document = named[name]
        own = losses.document_losses(model.model, document.ids, sweep, document.bytes_before, done=count)
        before.append(own.by_window[longest])
        return own

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

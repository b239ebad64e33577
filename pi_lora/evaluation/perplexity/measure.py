"""Sliding-window perplexity of a model on the documents of a source: model and options in, typed scores out."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict

from pi_lora.evaluation.forward import check_numbers, depends_on_length, described
from pi_lora.evaluation.journal import Journal, Session
from pi_lora.evaluation.perplexity import losses
from pi_lora.evaluation.perplexity.documents import TokenizedDocument, choose_documents, with_defaults
from pi_lora.evaluation.perplexity.losses import DocumentLosses, Sweep, window_scores
from pi_lora.evaluation.perplexity.scores import DocumentPerplexity, LossByPosition, PerplexityScores, PositionLoss
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import PerplexityOptions
from pi_lora.types import Progress

BINS = 32
# Nats a token; the perplexity of a greater mean loss is infinite.
MOST_LOSS = 700.0


def evaluate_perplexity(model: Model, options: PerplexityOptions, session: Session | None = None) -> PerplexityScores:
    """Measure those documents that the options choose and that are at least as long as the longest window. If the
    session is shared, each process measures its share of the documents, with the whole model, and an interrupted
    evaluation continues when it is called again.
    """
    session = session or Session()
    windows, stride = options.sweep(model.window)
    options = options.changed(windows=windows, stride=stride)
    longest = max(windows)
    bins = min(BINS, longest - 1) if options.by_position else 0
    sweep = Sweep(windows, stride, bins, depends_on_length(model.config))
    completed = with_defaults(options)
    documents, too_short = choose_documents(model, completed, longest)
    if options.documents is None and completed.documents:
        session.say(f"{options.data}: {completed.documents} documents, unless --documents says otherwise")
    journal = session.journal(model, {"data": options.data, **asdict(sweep)})
    measured = _measure(model, documents, sweep, journal, session.progress)
    sums = [loss for document in measured for loss in document.by_window.values() if loss.tokens]
    check_numbers(model.name, model.model.dtype, all(loss.loss < MOST_LOSS * loss.tokens for loss in sums))
    sizes = [sweep.scored_bytes(document.bytes_before) for document in documents]
    return PerplexityScores(
        **described(model),
        options=completed,
        data=options.data,
        documents=len(documents),
        documents_too_short=too_short,
        bos=documents[0].ids[0] == model.tokenizer.bos_token_id,
        stride=stride,
        weighting="token",
        windows=window_scores(measured, sizes),
        per_document=[
            DocumentPerplexity(name=document.name, tokens=len(document.ids), windows=window_scores([own], [size]))
            for document, own, size in zip(documents, measured, sizes, strict=True)
        ],
        **({"by_position": _by_position(measured, longest)} if options.by_position else {}),
    )


def _measure(
    model: Model, documents: Sequence[TokenizedDocument], sweep: Sweep, journal: Journal, progress: Progress
) -> list[DocumentLosses]:
    names = [hashlib.sha256(document.ids).hexdigest() for document in documents]
    ids = {name: document.ids for name, document in zip(names, documents, strict=True)}
    total = sum(len(piece) for name in journal.left(list(ids)) for piece in sweep.plan(len(ids[name])))
    done, before, longest = 0, [losses.LossSum()], max(sweep.windows)

    def count(pieces: int, so_far: DocumentLosses) -> None:
        nonlocal done
        done += pieces
        sums = losses.added([*before, so_far.by_window[longest]])
        progress(done, total, f"perplexity {_perplexity(sums)} at {longest:,} so far" if sums.tokens else "")

    def measure(name: str) -> DocumentLosses:
        own = losses.document_losses(model.model, ids[name], sweep, done=count)
        before.append(own.by_window[longest])
        return own

    measured = journal.measure(DocumentLosses, list(ids), measure)
    return [measured[name] for name in names]


def _perplexity(sums: losses.LossSum) -> str:
    """What overflows is refused at the end, with the reason."""
    mean = sums.loss / sums.tokens
    return f"{math.exp(mean):.2f}" if mean < 100 else "too large"


def _by_position(documents: Sequence[DocumentLosses], window: int) -> LossByPosition:
    sums = [losses.added(each) for each in zip(*(each.by_position for each in documents), strict=True)]
    bounds = losses.position_bounds(window, len(sums))
    bins = [
        PositionLoss(first=first, last=last, loss=each.loss / each.tokens, tokens=each.tokens)
        for each, first, last in zip(sums, bounds, bounds[1:], strict=False)
    ]
    return LossByPosition(window=window, bins=bins)

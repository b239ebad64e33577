"""Sliding-window perplexity of a model on the documents of a source: model and source in, typed result out."""

import hashlib
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace

from pi_lora.data.corpus import Choice
from pi_lora.errors import ModelError
from pi_lora.evaluation.forward import depends_on_length
from pi_lora.evaluation.journal import Journal, journaled, measure_each, to_measure
from pi_lora.evaluation.perplexity.losses import (
    DocumentLosses,
    Sweep,
    added,
    document_losses,
    position_bounds,
    window_scores,
)
from pi_lora.evaluation.perplexity.selection import Measured, choose_documents
from pi_lora.evaluation.results import DocumentPerplexity, LossByPosition, PerplexityScores, PositionLoss, described
from pi_lora.models.load import LoadedModel
from pi_lora.types import Progress, silent

BINS = 32


def default_windows(window: int, shortest: int = 256) -> list[int]:
    """Return the model's window and its halves, down to `shortest` tokens.

    >>> default_windows(1024)
    [256, 512, 1024]
    """
    halves = [window]
    while halves[0] // 2 >= shortest:
        halves.insert(0, halves[0] // 2)
    return halves


def default_stride(windows: Sequence[int]) -> int:
    """Return the paper's 256 tokens, or half the shortest window where that is less."""
    return min(256, max(1, min(windows) // 2))


def evaluate_perplexity(
    loaded: LoadedModel,
    source: str,
    windows: Sequence[int],
    stride: int,
    documents: int | None = None,
    progress: Progress | None = None,
    *,
    choice: Choice | None = None,
    by_position: bool = False,
    shared: bool = False,
) -> PerplexityScores:
    """Measure the documents of `source` that are at least as long as the longest window.

    `documents` limits their number, `choice` says more. `by_position` adds the mean loss by the number of tokens before
    a token, in the longest window. With `shared`, where every process has the whole model, each measures its part of
    the documents, and an interrupted evaluation continues when it is called again.

    Raises:
        DataError: the source cannot be read, no document is long enough, or the stride is too long.
        ModelError: the tokenizer does not fit the model, or the model's losses are not finite.
        Interrupted: by Ctrl-C, when `shared`.
    """
    longest = max(windows)
    bins = min(BINS, longest - 1) if by_position else 0
    sweep = Sweep(tuple(sorted(windows)), stride, bins, depends_on_length(loaded.config))
    choice = choice or Choice()
    chosen = choose_documents(loaded, source, replace(choice, documents=documents or choice.documents), longest)
    decided_by, what = {"data": source, **asdict(sweep)}, f"of {len(chosen.documents)} documents"
    with journaled(loaded, decided_by, what) if shared else nullcontext() as journal:
        found = _measure(loaded, chosen.documents, sweep, journal, progress or silent)
    if not math.isfinite(added(loss for each in found for loss in each.by_window.values()).loss):
        dtype = str(loaded.model.dtype).removeprefix("torch.")
        raise ModelError(f"{loaded.name}: its losses are no numbers in {dtype}; try another --dtype")
    return PerplexityScores(
        **described(loaded),
        data=source,
        documents=len(chosen.documents),
        documents_too_short=chosen.too_short,
        min_tokens=chosen.choice.min_tokens,
        truncate=chosen.choice.truncate,
        seed=chosen.choice.seed,
        bos=chosen.documents[0].ids[0] == loaded.tokenizer.bos_token_id,
        stride=stride,
        weighting="token",
        windows=window_scores(found),
        per_document=[
            DocumentPerplexity(name=document.name, tokens=len(document.ids), windows=window_scores([losses]))
            for document, losses in zip(chosen.documents, found, strict=True)
        ],
        **({"by_position": _by_position(found, longest)} if by_position else {}),
    )


def _measure(
    loaded: LoadedModel, documents: Sequence[Measured], sweep: Sweep, journal: Journal | None, progress: Progress
) -> list[DocumentLosses]:
    """Return the losses of each document; progress counts the pieces that this process sends through the model."""
    names = [hashlib.sha256(document.ids).hexdigest() for document in documents]
    ids = {name: document.ids for name, document in zip(names, documents, strict=True)}
    total = sum(len(piece) for name in to_measure(list(ids), journal) for piece in sweep.plan(len(ids[name])))
    done = 0

    def count(pieces: int) -> None:
        nonlocal done
        done += pieces
        progress(done, total)

    def measure(name: str) -> DocumentLosses:
        return document_losses(loaded.model, ids[name], sweep, done=count)

    found = measure_each(DocumentLosses, list(ids), measure, journal)
    return [found[name] for name in names]


def _by_position(found: Sequence[DocumentLosses], window: int) -> LossByPosition:
    sums = [added(each) for each in zip(*(each.by_position for each in found), strict=True)]
    bounds = position_bounds(window, len(sums))
    bins = [
        PositionLoss(first=first, last=last, loss=each.loss / each.tokens, tokens=each.tokens)
        for each, first, last in zip(sums, bounds, bounds[1:], strict=False)
    ]
    return LossByPosition(window=window, bins=bins)

"""Sliding-window perplexity of a model on the documents of a source: model and source in, typed result out."""

import hashlib
import math
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

from pi_lora.data.documents import Document
from pi_lora.data.sources import Choice, evaluation_documents
from pi_lora.data.tokens import CHARACTERS_AT_ONCE, Tokens, in_batches, tokenized
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import check_ids, check_numbers, depends_on_length, described
from pi_lora.evaluation.journal import Journal, journaled
from pi_lora.evaluation.perplexity import losses
from pi_lora.evaluation.perplexity.losses import DocumentLosses, Sweep, window_scores
from pi_lora.evaluation.results import DocumentPerplexity, LossByPosition, PerplexityScores, PositionLoss
from pi_lora.models.load import LoadedModel
from pi_lora.planning.evaluating import sweep_of
from pi_lora.types import Progress, silent

# What a tokenizer may add to a text, such as BOS; of the text itself it makes at most one token per byte.
FRAME_TOKENS = 16
BINS = 32
ALL_DOCUMENTS = Choice()


class Measured(NamedTuple):
    """A document as it is measured: its name, and its token ids, truncated if asked."""

    name: str
    ids: "array[int]"


class Chosen(NamedTuple):
    """The documents that are measured, the choice that was applied, and how many documents were too short for it."""

    documents: list[Measured]
    choice: Choice
    too_short: int


def evaluate_perplexity(
    loaded: LoadedModel,
    source: str,
    windows: Sequence[int] | None = None,
    stride: int | None = None,
    choice: Choice = ALL_DOCUMENTS,
    progress: Progress = silent,
    *,
    by_position: bool = False,
    shared: bool = False,
) -> PerplexityScores:
    """Measure those documents of `source` that `choice` takes and that are at least as long as the longest window, by
    default the model's own. `by_position` adds the mean loss by the tokens before a token in the longest window. With
    `shared` each process measures its part of the documents, with the whole model, and an interrupted evaluation
    continues when it is called again.
    """
    windows, stride = sweep_of(windows, stride, loaded.window)
    longest = max(windows)
    bins = min(BINS, longest - 1) if by_position else 0
    sweep = Sweep(tuple(windows), stride, bins, depends_on_length(loaded.config))
    chosen = choose_documents(loaded, source, choice, longest)
    decided_by, what = {"data": source, **asdict(sweep)}, f"of {len(chosen.documents)} documents"
    with journaled(loaded, decided_by, what, shared) as journal:
        found = _measure(loaded, chosen.documents, sweep, journal, progress)
    total = losses.added(loss for each in found for loss in each.by_window.values())
    check_numbers(loaded.name, loaded.model.dtype, math.isfinite(total.loss))
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
            DocumentPerplexity(name=document.name, tokens=len(document.ids), windows=window_scores([its]))
            for document, its in zip(chosen.documents, found, strict=True)
        ],
        **({"by_position": _by_position(found, longest)} if by_position else {}),
    )


def _measure(
    loaded: LoadedModel, documents: Sequence[Measured], sweep: Sweep, journal: Journal, progress: Progress
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
        its = losses.document_losses(loaded.model, ids[name], sweep, done=count)
        before.append(its.by_window[longest])
        return its

    found = journal.measure(DocumentLosses, list(ids), measure)
    return [found[name] for name in names]


def _perplexity(sums: losses.LossSum) -> str:
    """What overflows is refused at the end, with the reason."""
    mean = sums.loss / sums.tokens
    return f"{math.exp(mean):.2f}" if mean < 100 else "too large"


def _by_position(found: Sequence[DocumentLosses], window: int) -> LossByPosition:
    sums = [losses.added(each) for each in zip(*(each.by_position for each in found), strict=True)]
    bounds = losses.position_bounds(window, len(sums))
    bins = [
        PositionLoss(first=first, last=last, loss=each.loss / each.tokens, tokens=each.tokens)
        for each, first, last in zip(sums, bounds, bounds[1:], strict=False)
    ]
    return LossByPosition(window=window, bins=bins)


def choose_documents(loaded: LoadedModel, source: str, choice: Choice, longest: int) -> Chosen:
    """Return the documents of `source` for windows of up to `longest` tokens; a preset completes the `choice`."""
    choice = choice.of(source)
    if choice.truncate is not None and choice.truncate < longest:
        raise DataError(f"--truncate: {choice.truncate} tokens do not hold a window of {longest}; choose more")
    needed = max(longest, choice.min_tokens or 0)
    documents: Iterable[Document] = evaluation_documents(source, choice.split, choice.column)
    passed_over = 0
    if choice.seed is not None:
        documents, passed_over = _drawn(documents, choice.seed, needed)
    found: list[Measured] = []
    lengths: list[int] = []
    for name, ids in _encoded(loaded, documents):
        lengths.append(len(ids))
        if len(ids) >= needed:
            check_ids(loaded, ids)
            found.append(Measured(name, array("i", ids[: choice.truncate])))
        if len(found) == choice.documents:
            break
    if not found:
        option = "--windows" if needed == longest else "--min-tokens"
        longer = f"{needed} tokens is longer than every document of {source} (the longest has {max(lengths)})"
        raise DataError(f"{option}: {longer}; choose a shorter window")
    return Chosen(found, choice, passed_over + len(lengths) - len(found))


def _drawn(documents: Iterable[Document], seed: int, needed: int) -> tuple[list[Document], int]:
    """Return what may have `needed` tokens by its bytes, or else the longest, shuffled, and how many others came."""
    held: list[Document] = []
    longest, seen = Document("", ""), 0
    for document in documents:
        seen += 1
        longest = max(longest, document, key=lambda each: len(each.text))
        if len(document.text.encode()) + FRAME_TOKENS >= needed:
            held.append(document)
    held = held or [longest]
    random.Random(seed).shuffle(held)
    return held, seen - len(held)


def _encoded(loaded: LoadedModel, documents: Iterable[Document]) -> Iterator[tuple[str, Tokens]]:
    """Yield names and token ids; without EOS, which the model would be asked to predict."""
    for batch in in_batches(documents, lambda document: len(document.text), CHARACTERS_AT_ONCE):
        ids = tokenized(loaded.tokenizer, [document.text for document in batch])
        yield from zip((document.name for document in batch), ids, strict=True)

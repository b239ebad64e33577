"""A sweep of windows over documents, in one process or shared between several, and kept while it goes on."""

import dataclasses
import hashlib
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pi_lora.data.cache import cache_folder
from pi_lora.data.corpus import Choice
from pi_lora.distributed import from_all, is_leader, share_of
from pi_lora.errors import Interrupted, ModelError
from pi_lora.evaluation.journal import Journal, depends_on_length, identity_of
from pi_lora.evaluation.perplexity.losses import (
    DocumentLosses,
    LossSum,
    added,
    check_sweep,
    document_losses,
    passes,
    position_bounds,
    window_scores,
)
from pi_lora.evaluation.perplexity.selection import Chosen, Measured, choose_documents
from pi_lora.evaluation.results import described
from pi_lora.models.load import LoadedModel
from pi_lora.types import Json, Progress


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What is measured of every document: windows in tokens and their stride; bins of positions, if any; and whether
    windows have to go through the model one by one.
    """

    windows: tuple[int, ...]
    stride: int
    bins: int = 0
    apart: bool = False


def measure_here(
    model: Any, documents: Sequence[Measured], sweep: Sweep, progress: Progress | None
) -> list[DocumentLosses]:
    """The losses of every document, all in this process."""
    count = _Count(documents, sweep, progress)
    return [_losses(model, document, sweep, count) for document in documents]


def measure_shared(
    model: Any,
    documents: Sequence[Measured],
    sweep: Sweep,
    decided_by: Mapping[str, Any],
    progress: Progress | None,
) -> list[DocumentLosses]:
    """The losses of every document, each measured in one of all processes; the same in all of them.

    What an interrupted call with the same documents, sweep and `decided_by` found is not measured again.

    Raises:
        Interrupted: by Ctrl-C.
    """
    journal = Journal(cache_folder(), {**decided_by, **dataclasses.asdict(sweep)})
    # One process says what is known already: another may look when a third has found more.
    known = from_all([journal.found] if is_leader() else [])[0]
    names = [_digest(document.ids) for document in documents]
    left = {name: document for name, document in zip(names, documents, strict=True) if name not in known}
    mine = share_of(list(left))
    count = _Count([left[name] for name in mine], sweep, progress)
    try:
        for name in mine:
            journal.add(name, _as_json(_losses(model, left[name], sweep, count)))
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted after {len(journal.found)} of {len(documents)} documents; the same command goes on from there"
        ) from None
    found = {**known, **dict(from_all([(name, journal.found[name]) for name in mine]))}
    if is_leader():
        journal.finish()
    return [_from_json(found[name]) for name in names]


class _Count:
    """How many pieces of text went through the model, of all that are to."""

    def __init__(self, documents: Sequence[Measured], sweep: Sweep, progress: Progress | None) -> None:
        self.progress, self.done = progress, 0
        self.total = sum(
            passes(len(each.ids), sweep.windows, sweep.stride, sweep.bins, sweep.apart) for each in documents
        )

    def __call__(self, pieces: int) -> None:
        self.done += pieces
        if self.progress:
            self.progress(self.done, self.total)


def _losses(model: Any, document: Measured, sweep: Sweep, count: _Count) -> DocumentLosses:
    return document_losses(
        model, document.ids, sweep.windows, sweep.stride, bins=sweep.bins, apart=sweep.apart, done=count
    )


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(array("i", ids).tobytes()).hexdigest()


def _as_json(found: DocumentLosses) -> dict[str, Any]:
    return {
        "by_window": [[window, each.loss, each.tokens] for window, each in found.by_window.items()],
        "by_position": [[each.loss, each.tokens] for each in found.by_position],
    }


def _from_json(found: Mapping[str, Any]) -> DocumentLosses:
    return DocumentLosses(
        {window: LossSum(loss, tokens) for window, loss, tokens in found["by_window"]},
        [LossSum(loss, tokens) for loss, tokens in found["by_position"]],
    )


BINS = 32


def default_windows(window: int, shortest: int = 256) -> list[int]:
    """The model's window and its halves, down to `shortest` tokens.

    >>> default_windows(1024)
    [256, 512, 1024]
    """
    halves = [window]
    while halves[0] // 2 >= shortest:
        halves.insert(0, halves[0] // 2)
    return halves


def default_stride(windows: list[int]) -> int:
    """The paper's 256 tokens, or half the shortest window where that is less."""
    return min(256, max(1, min(windows) // 2))


def evaluate_perplexity(
    loaded: LoadedModel,
    source: str,
    windows: list[int],
    stride: int,
    documents: int | None = None,
    progress: Progress | None = None,
    *,
    choice: Choice | None = None,
    by_position: bool = False,
    shared: bool = False,
    warn: Callable[[str], None] = lambda line: None,
) -> Json:
    """Sliding-window perplexity on the documents of `source` that are at least as long as the longest window.

    `documents` says how many of them, `choice` more. `by_position` adds the mean loss against the number of tokens
    before a token, in the longest window. `shared` is for a command of its own, where every process has the whole
    model: each measures its part of the documents, and an interrupted evaluation goes on when it is called again.
    `warn` is told of windows that the model was not made for; they are measured all the same.

    Raises:
        DataError: the source cannot be read, no document is long enough, or the stride is too long.
        ModelError: the tokenizer does not fit the model, or the model's losses are no numbers.
        Interrupted: by Ctrl-C, when `shared`.
    """
    check_sweep(windows, stride)
    choice = choice or Choice()
    chosen = choose_documents(
        loaded, source, dataclasses.replace(choice, documents=documents or choice.documents), max(windows)
    )
    if max(windows) > loaded.window:
        warn(
            f"{loaded.name}: a window of {max(windows)} tokens is beyond the {loaded.window} that its scaling covers; "
            "measured all the same"
        )
    bins = min(BINS, max(windows) - 1) if by_position else 0
    sweep = Sweep(tuple(sorted(windows)), stride, bins, depends_on_length(loaded.config))
    if shared:
        found = measure_shared(
            loaded.model, chosen.documents, sweep, {"model": identity_of(loaded), "data": source}, progress
        )
    else:
        found = measure_here(loaded.model, chosen.documents, sweep, progress)
    if not math.isfinite(added(loss for each in found for loss in each.by_window.values()).loss):
        dtype = str(loaded.model.dtype).removeprefix("torch.")
        raise ModelError(f"{loaded.name}: its losses are no numbers in {dtype}; try another --dtype")
    return {
        **described(loaded),
        "window": loaded.window,
        "data": source,
        **_described_documents(loaded, chosen),
        "stride": stride,
        "weighting": "token",
        "windows": _windows(found),
        "per_document": [
            {"name": document.name, "tokens": len(document.ids), "windows": _windows([losses])}
            for document, losses in zip(chosen.documents, found, strict=True)
        ],
        **({"by_position": _by_position(found, max(windows))} if by_position else {}),
    }


def _described_documents(loaded: LoadedModel, chosen: Chosen) -> Json:
    """How many documents, how they were chosen and cut, and whether they begin with BOS."""
    choice = chosen.choice
    return {
        "documents": len(chosen.documents),
        "documents_too_short": chosen.too_short,
        "min_tokens": choice.min_tokens,
        "truncate": choice.truncate,
        "seed": choice.seed,
        "bos": chosen.documents[0].ids[0] == loaded.tokenizer.bos_token_id,
    }


def _windows(found: Sequence[DocumentLosses]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(score) for score in window_scores(found)]


def _by_position(found: Sequence[DocumentLosses], window: int) -> dict[str, Any]:
    """Mean losses in nats of the tokens with `from` to `to` - 1 tokens before them in their window."""
    bins = [added(each) for each in zip(*(each.by_position for each in found), strict=True)]
    bounds = position_bounds(window, len(bins))
    rows = [
        {"from": first, "to": last, "loss": each.loss / each.tokens, "tokens": each.tokens}
        for each, first, last in zip(bins, bounds, bounds[1:], strict=False)
    ]
    return {"window": window, "bins": rows}

"""A sweep of windows over documents, in one process or shared between several, and kept while it goes on."""

import dataclasses
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from pi_lora.data.cache import cache_folder
from pi_lora.errors import Interrupted
from pi_lora.evals.journal import Journal
from pi_lora.evals.perplexity import DocumentLosses, LossSum, document_losses, passes
from pi_lora.evaluate.documents import Measured
from pi_lora.evaluate.scores import Progress
from pi_lora.processes import from_all, is_leader, share_of


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

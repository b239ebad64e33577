"""Sliding-window perplexity on the documents that a user names."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from pi_lora.data.presets import Choice
from pi_lora.errors import ModelError
from pi_lora.evals.perplexity import DocumentLosses, added, check_sweep, position_bounds, window_scores
from pi_lora.evaluate.documents import Chosen, choose_documents
from pi_lora.evaluate.models import depends_on_length, identity_of
from pi_lora.evaluate.scores import Progress, Scores, described
from pi_lora.evaluate.sweep import Sweep, measure_here, measure_shared
from pi_lora.run import LoadedModel

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
) -> Scores:
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


def _described_documents(loaded: LoadedModel, chosen: Chosen) -> Scores:
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

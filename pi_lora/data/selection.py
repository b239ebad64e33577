"""Documents chosen by a score of each: the gain of a model from distant context, or the compression ratio."""

import gzip
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from typing import Protocol

from pi_lora.data.documents import Document
from pi_lora.data.sources import Table
from pi_lora.errors import DataError
from pi_lora.recipe.data import Selection
from pi_lora.types import Json, Progress

# The documents that are named in messages: so many of the best, and so many of the worst.
NAMED = 3


class Scorer(Protocol):
    """Scores documents by a model."""

    @property
    def decided_by(self) -> Json:
        """JSON that decides the score of a text: the model, and how it scores."""

    def score(self, document: Document) -> float | None:
        """Return the score of a document; None if it is too short."""


def selected(table: Table, gains: Callable[[Selection], Scorer] | None, notes: list[str], progress: Progress) -> Table:
    """Return a table of the documents that its source selects. They are scored when the first one is read, so that
    packed data in the cache needs no scores. Then the `notes` name the best and the worst.
    """
    select = table.source.select
    if select is None:
        return table
    identity = table.identity | select.model_dump()
    score: Callable[[Document], float | None] = compression_ratio
    if select.by == "gain":
        assert gains, "a model scores the gain"
        scorer = gains(select)
        identity |= scorer.decided_by
        score = scorer.score

    @cache
    def choose() -> Collection[str]:
        scored = []
        total = sum(1 for _ in table.documents())
        for done, document in enumerate(table.documents(), 1):
            value = score(document)
            if value is not None:
                scored.append((value, document.digest, document.name))
            progress(done, total, "documents scored")
        if not scored:
            raise DataError(f"data.source: {table.source.name}: no document has distant context; name longer ones")
        scored.sort(reverse=True)
        # Rounded, since 0.07 * 100 is a little more than 7.
        number = len(scored)
        kept = math.ceil(round(select.keep * number, 6))
        first = 0
        if select.by == "gzip":
            first = (number - kept) // 2
        notes.append(f"{table.source.name}: {kept:,} of {number:,} documents chosen by {select.by}")
        best = scored[:NAMED]
        worst = scored[NAMED:][-NAMED:]
        for value, _, name in best + worst:
            notes.append(f"{select.by} {value:.4f}: {name}")
        return {digest for _, digest, _ in scored[first : first + kept]}

    return replace(table, identity=identity, choose=choose)


def compression_ratio(document: Document) -> float:
    """Return the size of a text after gzip as a share of its bytes.

    Olmo 3 leaves out the fifth of long documents that gzip compresses most, and the fifth that it compresses least
    (Team Olmo 2025, arXiv 2512.13961). gzip finds what repeats within 32 KB.
    """
    text = document.text.encode()
    return len(gzip.compress(text)) / len(text)

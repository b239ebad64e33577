"""Documents chosen by a score of each: the gain of a model from distant context, or the compression ratio."""

import functools
import gzip
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from pi_lora.data.sources import Table
from pi_lora.recipe.schema import Data, Selection
from pi_lora.types import Json, Progress

# The documents that are named in messages: so many of the best, and so many of the worst.
NAMED = 3


class Scored(NamedTuple):
    """A document: its score, a digest of its text, and its name."""

    score: float
    digest: str
    name: str


class Scorer(Protocol):
    """Scores the documents of sources by a model."""

    def identity(self, select: Selection) -> Json:
        """Return as JSON all that decides the score of a text."""

    def scores(self, table: Table, select: Selection, progress: Progress) -> list[Scored]:
        """Return the documents that train and have a score, each text once."""


def selected(table: Table, gains: Scorer | None, notes: list[str], progress: Progress) -> Table:
    """Return a table without the documents that its source does not select. They are scored when the first document is
    read, which data in the cache does without; the `notes` then name the best and the worst.
    """
    select = table.source.select
    if select is None:
        return table
    identity = select.model_dump()
    if select.by == "gzip":
        score: Callable[[], list[Scored]] = functools.partial(compression_ratios, table)
    else:
        assert gains, "a model scores the gain"
        identity["scored_by"] = gains.identity(select)
        score = functools.partial(gains.scores, table, select, progress)

    @functools.cache
    def choose() -> Collection[str]:
        scored = sorted(score(), reverse=True)
        chosen = chosen_of(scored, select)
        notes.extend(_described(scored, chosen, table.source.name, select.by))
        return {document.digest for document in chosen}

    return replace(table, identity={**table.identity, "select": identity}, choose=choose)


def chosen_of(scored: Sequence[Scored], select: Selection) -> Sequence[Scored]:
    """Return the share to keep of documents in falling order: the first ones by gain, the middle ones by gzip.

    >>> documents = [Scored(score, "", "") for score in (0.5, 0.4, 0.3, 0.2, 0.1)]
    >>> [document.score for document in chosen_of(documents, Selection(by="gain", keep=0.3))]
    [0.5, 0.4]
    >>> [document.score for document in chosen_of(documents, Selection(by="gzip", keep=0.6))]
    [0.4, 0.3, 0.2]
    """
    # Rounded, since 0.07 * 100 is a little more than 7.
    number = math.ceil(round(select.keep * len(scored), 6))
    first = (len(scored) - number) // 2 if select.by == "gzip" else 0
    return scored[first : first + number]


def compression_ratios(table: Table) -> list[Scored]:
    """Return the documents of a table with the size of the text after gzip, as a share of its bytes.

    Olmo 3 leaves out the fifth of long documents that gzip compresses most, and the fifth that it compresses least
    (Team Olmo 2025, arXiv 2512.13961). gzip finds what repeats within 32 KB.
    """
    scored = {}
    for document in table.documents():
        text = document.text.encode()
        ratio = len(gzip.compress(text)) / len(text)
        scored[document.digest] = Scored(ratio, document.digest, document.name)
    return list(scored.values())


def _described(scored: Sequence[Scored], chosen: Sequence[Scored], source: str, by: str) -> list[str]:
    """Return lines with the number of documents, and the names of the best and the worst."""
    label = "gain in nats" if by == "gain" else "compression ratio"
    named = [*scored[:NAMED], *scored[NAMED:][-NAMED:]]
    return [
        f"{source}: {len(chosen):,} of {len(scored):,} documents chosen by {by}",
        *(f"{label} {document.score:.4f}: {document.name}" for document in named),
    ]


def scoring_lines(data: Data) -> list[str]:
    """Return a line for each source whose documents a model has to score before they are packed."""
    return [
        f"data: {source.name}: the base scores the documents before they are packed, except those in the cache"
        for source in data.source
        if source.select and source.select.by == "gain"
    ]

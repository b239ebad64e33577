"""Scores in tables, as the pages of several experiments show them."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import record
from pages import table
from pi_lora.evaluation.changes import Row
from pi_lora.evaluation.intervals import wilson
from pi_lora.evaluation.measurement import Metric, Scores
from pi_lora.evaluation.perplexity import DocumentPerplexity, PerplexityScores, WindowPerplexity
from pi_lora.evaluation.suite import MEASUREMENTS, metric_rows, metrics_of
from pi_lora.report.scores import shown_metrics


def read_scores(name: str) -> list[Any]:
    """The scores in a file of `pi-lora eval --json`, of one model or of several; none before they are measured."""
    content = record.read(name)
    results = content if isinstance(content, list) else [content]
    return [MEASUREMENTS[result["measurement"]].scores.model_validate(result) for result in results if result]


def metrics_table(columns: Mapping[str, Iterable[Scores]]) -> Iterator[str]:
    """A metric a row, a model a column."""
    metrics: list[dict[str, Metric]] = []
    for column in columns.values():
        metrics.append({})
        for scores in column:
            metrics[-1].update(shown_metrics(scores))
    rows = []
    for row in metric_rows(metrics):
        rows.append([cell or "not asked" for cell in row])
    yield from table(("", *columns), rows)


def changes_table(label: str, rows: Iterable[Row]) -> Iterator[str]:
    """A metric of a base and a run a row, with the verdict and the interval of the change."""
    cells = []
    for row in rows:
        cells.append((row.measurement, f"{row.base:,.3f}", f"{row.run:,.3f}", row.verdict, row.interval_text))
    yield from table((label, "base", "run", "verdict", "95 % interval"), cells)


def change_text(row: Row) -> str:
    """The change of a metric with the interval."""
    return f"{row.change:+.1f} {row.unit} ({row.interval_text})"


def perplexity_at(scores: PerplexityScores, window: int) -> Metric:
    """The perplexity at a window."""
    [metric] = [metric for metric in metrics_of(scores) if metric.at == window]
    return metric


def by_novel(scores: PerplexityScores, names: Collection[str] | None = None) -> PerplexityScores:
    """Perplexities with one value for every novel: two documents of one novel are not independent. Only of the
    documents of these names, if any are given.
    """
    documents: dict[str, list[DocumentPerplexity]] = {}
    for document in scores.per_document or ():
        if names is None or document.name in names:
            novel = Path(document.name).stem.removesuffix("_half")
            documents.setdefault(novel, []).append(document)
    novels = []
    for novel, parts in documents.items():
        novels.append(DocumentPerplexity(name=novel, tokens=0, windows=mean_windows(parts)))
    return scores.model_copy(update={"per_document": novels, "windows": mean_windows(novels)})


def mean_windows(documents: Sequence[DocumentPerplexity]) -> list[WindowPerplexity]:
    """The perplexity of documents of one length by window."""
    windows = []
    for rows in zip(*(document.windows for document in documents), strict=True):
        loss = fmean(math.log(row.perplexity) for row in rows)
        windows.append(rows[0].model_copy(update={"perplexity": math.exp(loss)}))
    return windows


def outcomes_of(name: str) -> list[bool]:
    """Which passkeys were retrieved, at all distances; none if they were not asked."""
    return [outcome for scores in read_scores(name) for depth in scores.depths for outcome in depth.outcomes]


def retrieved(name: str) -> str:
    """The passkeys that were retrieved, with the interval."""
    outcomes = outcomes_of(name)
    if not outcomes:
        return "not asked"
    trials = len(outcomes)
    low, high = wilson(fmean(outcomes), trials)
    return f"{sum(outcomes)} of {trials} ({low:.0%} to {high:.0%})"

"""Scores as a table in Markdown and as the hub's `model-index`, and text that Markdown shows as it is."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from huggingface_hub import EvalResult

from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.metrics import Metric
from pi_lora.evaluation.registry import metrics_of


def metrics_table(columns: Mapping[str, Mapping[str, Scores]]) -> str:
    """Return the scores of several models or stages, by measurement, as a Markdown table of their metrics; a cell is
    empty where a model was not measured.
    """
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for label, results in columns.items():
        for name, metric in _metrics(results):
            cells.setdefault((name, metric.heading, public_name(metric.dataset)), {})[label] = metric.text
    rows = sorted(cells, key=lambda row: row[0])  # by measurement, and in it as they come
    return markdown_table(
        ["metric", "data", *columns], [[*row[1:], *(cells[row].get(label, "") for label in columns)] for row in rows]
    )


def eval_results(results: Mapping[str, Scores]) -> list[EvalResult]:
    """Return the metrics in the scores of a model, by measurement, as the hub takes them."""
    found = []
    for _, metric in _metrics(results):
        name = public_name(metric.dataset)
        data = re.sub(r"[^\w./-]+", "-", name).strip("-")  # as the hub spells its own
        title = f"{metric.heading}, {metric.unit}" if metric.unit else metric.heading
        found.append(EvalResult("text-generation", data, name, metric.hub_name, metric.value, metric_name=title))
    return found


def _metrics(results: Mapping[str, Scores]) -> Iterator[tuple[str, Metric]]:
    for name, scores in sorted(results.items()):
        yield from ((name, metric) for metric in metrics_of(scores) if not metric.is_detail)


def public_name(name: str) -> str:
    """Return a name as strangers may read it: the last part of a path on this machine, and any other name as it is.

    >>> public_name("/home/me/books/*.txt"), public_name("~/base"), public_name("owner/base")
    ('*.txt', 'base', 'owner/base')
    """
    local = name.startswith(("/", "~", ".")) or os.path.exists(name)
    return Path(name).name or name if local else name


def literal(text: str) -> str:
    r"""Return a text, which may come from elsewhere, as Markdown that shows it: no images, links, HTML or cells in it.

    >>> print(literal("![](http://x/y.png) <b> a|b"))
    \!\[\](http://x/y.png) \<b> a\|b
    """
    return re.sub(r"([\\`!\[\]<|])", r"\\\1", " ".join(text.split()))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    first, *others = (f"| {' | '.join(map(literal, cells))} |\n" for cells in (head, *rows))
    return first + "|---" * len(head) + "|\n" + "".join(others)

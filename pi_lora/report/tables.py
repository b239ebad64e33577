"""Scores as a table in Markdown and as the hub's `model-index`, and text that Markdown shows as it is."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from huggingface_hub import EvalResult

from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.metrics import Metric
from pi_lora.evaluation.registry import differences, metrics_of, setting_of

# Scores by model or stage, and by measurement.
Columns = Mapping[str, Mapping[str, Scores]]


def scores_sections(columns: Columns) -> Iterator[str]:
    """Yield Markdown for the scores of several models or stages: for each measurement its text and settings, and a
    table of the metrics. What was measured otherwise has a table of its own.
    """
    for name in sorted({name for results in columns.values() for name in results}):
        for number, group in enumerate(groups_of(name, columns)):
            otherwise = ", measured otherwise and not to be compared" if number else ""
            yield f"**{literal(name)}**{otherwise}: {literal(public_setting(group))}"
            yield _metrics_table(group)


def groups_of(name: str, columns: Columns) -> list[dict[str, Scores]]:
    """Return the scores of a measurement by label, in groups that compare: those of the last label come first."""
    groups: list[dict[str, Scores]] = []
    for label, results in reversed(list(columns.items())):
        if (scores := results.get(name)) is None:
            continue
        for group in groups:
            if not differences(scores, next(iter(group.values()))):
                group[label] = scores
                break
        else:
            groups.append({label: scores})
    return [dict(reversed(list(group.items()))) for group in groups]


def public_setting(group: Mapping[str, Scores]) -> str:
    """Return on which text and how a group of scores was measured, without paths of this machine."""
    scores = next(iter(group.values()))
    text = setting_of(scores)
    for metric in metrics_of(scores):
        text = text.replace(metric.dataset, public_name(metric.dataset)) if metric.dataset else text
    return text


def _metrics_table(group: Mapping[str, Scores]) -> str:
    cells: dict[str, dict[str, str]] = {}
    for label, scores in group.items():
        for metric in _metrics(scores):
            cells.setdefault(metric.heading, {})[label] = metric.text
    rows = [[heading, *(row.get(label, "") for label in group)] for heading, row in cells.items()]
    return markdown_table(["metric", *group], rows).rstrip("\n")


def eval_results(results: Mapping[str, Scores]) -> list[EvalResult]:
    """Return the metrics in the scores of a model, by measurement, as the hub takes them."""
    found = []
    for metric in (metric for _, scores in sorted(results.items()) for metric in _metrics(scores)):
        name = public_name(metric.dataset)
        data = re.sub(r"[^\w./-]+", "-", name).strip("-")  # as the hub spells its own
        title = f"{metric.heading}, {metric.unit}" if metric.unit else metric.heading
        found.append(EvalResult("text-generation", data, name, metric.hub_name, metric.value, metric_name=title))
    return found


def _metrics(scores: Scores) -> Iterator[Metric]:
    yield from (metric for metric in metrics_of(scores) if not metric.is_detail)


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

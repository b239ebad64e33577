"""A run with its scores, and scores as tables in Markdown and as the hub's `model-index`."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from pi_lora.evaluation.measurement import Metric, Scores
from pi_lora.evaluation.suite import differences, metrics_of, read_scores, setting_of
from pi_lora.models.files import ADAPTER_CONFIG_FILE, read_adapter_settings, read_config
from pi_lora.recipe.schema import Model
from pi_lora.run import BASE, STEP_0, Run

# Scores by model or stage, and by measurement.
Columns = Mapping[str, Mapping[str, Scores]]


@dataclass(frozen=True)
class MeasuredRun(Run):
    """A run with its scores, or an adapter folder of other origin.

    `merged` is the folder of full weights that were made of it, `merged_with` the base, if the adapter names none. Of
    a base that was extended without tuning, `merged` is `path`.
    """

    merged: Path | None = None
    merged_with: str = ""

    @property
    def untuned(self) -> bool:
        """Whether it is a base that was extended without tuning."""
        return self.merged == self.path

    @property
    def is_merged(self) -> bool:
        """Whether it is an adapter that was merged."""
        return self.merged is not None and not self.untuned

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config of the extended model."""
        return read_config(self.merged or self.path)

    @cached_property
    def base(self) -> Model:
        """The base of the adapter, or of full tuning."""
        if not (self.path / ADAPTER_CONFIG_FILE).is_file():
            return Model.model_construct(name=self.merged_with, revision="main") if self.untuned else self.recipe.model
        adapter = read_adapter_settings(self.path)
        name = adapter.base_model_name_or_path or self.merged_with or "unknown"
        return Model.model_construct(name=name, revision=adapter.revision or "main")

    @property
    def original(self) -> int | None:
        """The original window (L, tokens), if the run or its recipe says it."""
        return self.provenance.original or (self.recipe.context.original if self.has_recipe else None)

    @cached_property
    def scores(self) -> dict[str, dict[str, Scores]]:
        """Scores by stage and measurement; the stages in order: base, step 0, step 200, ..., tuned."""
        stages: dict[str, dict[str, Scores]] = {}
        for stage, name, file in self.score_files():
            if scores := read_scores(file):
                stages.setdefault(stage, {})[name] = scores
        return stages

    @property
    def last_scores(self) -> dict[str, Scores]:
        """The scores of the finished run, or else of the last step, by measurement."""
        return {name: scores for stage in self.scores if stage != BASE for name, scores in self.scores[stage].items()}

    @property
    def columns(self) -> dict[str, dict[str, Scores]]:
        """The scores that tables and pictures show side by side: base, step 0, and the last of every measurement."""
        last, columns = self.last_scores, {}
        for stage, results in self.scores.items():
            always = stage in (BASE, STEP_0)
            if shown := {name: scores for name, scores in results.items() if always or scores is last[name]}:
                columns[stage] = shown
        return columns


def scores_sections(run: MeasuredRun) -> Iterator[str]:
    """Yield Markdown for the scores of a run: for each measurement its text and settings, and a table of the metrics of
    base, step 0 and run. What was measured otherwise has a table of its own, which says what differs; if it is the
    base, or if there is no base, the command that measures it like the run follows.
    """
    for name in sorted({name for results in run.columns.values() for name in results}):
        first, *others = groups_of(name, run.columns)
        yield f"**{literal(name)}**: {literal(public_setting(first))}"
        yield _metrics_table(first)
        for group in others:
            keys = ", ".join(differences(next(iter(group.values())).options, next(iter(first.values()))))
            keys = keys.replace("_", " ")
            setting = literal(public_setting(group))
            yield f"**{literal(name)}**, not to be compared, since measured with other {keys}: {setting}"
            yield _metrics_table(group)
        if BASE not in first:
            command = shlex.join(["pi-lora", "compare", public_name(run.base.name), "."])
            yield f"The base was not measured in the same way. In the folder of the run, `{command}` measures it."


def groups_of(name: str, columns: Columns) -> list[dict[str, Scores]]:
    """Return the scores of a measurement by label, in groups that compare: those of the last label come first."""
    left = {label: results[name] for label, results in columns.items() if name in results}
    groups: list[dict[str, Scores]] = []
    while left:
        last = list(left.values())[-1]
        groups.append({label: scores for label, scores in left.items() if not differences(scores.options, last)})
        left = {label: scores for label, scores in left.items() if label not in groups[-1]}
    return groups


def public_setting(group: Mapping[str, Scores]) -> str:
    """Return on which text and how a group of scores was measured, without paths of this machine."""
    *_, scores = group.values()  # the run's: a base of older runs may have fewer depths
    text = setting_of(scores)
    for metric in metrics_of(scores):
        text = text.replace(metric.dataset, public_name(metric.dataset)) if metric.dataset else text
    return text


def _metrics_table(group: Mapping[str, Scores]) -> str:
    columns = [{metric.heading: metric.text for metric in _metrics(scores)} for scores in group.values()]
    headings = dict.fromkeys(heading for column in columns for heading in column)
    rows = [[heading, *(column.get(heading, "") for column in columns)] for heading in headings]
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


def _metrics(scores: Scores) -> list[Metric]:
    return [metric for metric in metrics_of(scores) if not metric.is_detail]


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

"""A run with its scores, and scores as tables in Markdown and as the hub's `model-index`."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from pi_lora.evaluation.measurement import Metric, Scores
from pi_lora.evaluation.suite import differences, metric_rows, metrics_of, other_arithmetic, read_scores, setting_of
from pi_lora.models.files import ADAPTER_CONFIG_FILE, public_name, read_adapter_settings, read_config
from pi_lora.recipe.schema import Model
from pi_lora.run import BASE, MERGE_FILE, STEP_0, MergeRecord, Run
from pi_lora.storage import read_json

# The heading of the base under the scaling of the run, without tuning.
UNTUNED = "untuned"


@dataclass(frozen=True)
class MeasuredRun(Run):
    """A run with its scores, or an adapter folder of other origin.

    Attributes:
        merged: The folder of the full weights, while the run is merged.
        untuned: Whether the model is a base that was extended without tuning.
        base_name: The name of the base, where no adapter names it.
    """

    merged: Path | None = None
    untuned: bool = False
    base_name: str = "unknown"

    @property
    def merge(self) -> MergeRecord | None:
        """The content of `merge.json`, if the weights are merged."""
        file = (self.merged or self.path) / MERGE_FILE
        return read_json(file, MergeRecord, "merge again") if file.is_file() else None

    @property
    def has_full_weights(self) -> bool:
        """Whether the model is no adapter, or one that is merged."""
        return self.merged is not None or not (self.path / ADAPTER_CONFIG_FILE).is_file()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config of the extended model."""
        return read_config(self.merged or self.path)

    @cached_property
    def base(self) -> Model:
        """The base of the adapter or of full tuning."""
        if (self.path / ADAPTER_CONFIG_FILE).is_file():
            adapter = read_adapter_settings(self.path)
            name = adapter.base_model_name_or_path or self.base_name
            return Model(name=name, revision=adapter.revision or "main")
        if self.untuned:
            return Model(name=self.base_name)
        if self.merge:
            return Model(name=self.merge.base, revision=self.commit or "main")
        return self.recipe.model

    @cached_property
    def scores(self) -> dict[str, dict[str, Scores]]:
        """Scores by measurement and stage; the stages in order: base, step 0, step 200, ..., tuned."""
        measured: dict[str, dict[str, Scores]] = {}
        for stage, name, file in self.score_files():
            scores = read_scores(file)
            if scores:
                measured.setdefault(name, {})[stage] = scores
        return dict(sorted(measured.items()))

    def scores_at(self, stage: str) -> dict[str, Scores]:
        """Return the scores of a stage by measurement."""
        return {name: stages[stage] for name, stages in self.scores.items() if stage in stages}

    @property
    def last_scores(self) -> dict[str, Scores]:
        """The scores of the finished run, or else of the last step, by measurement."""
        last = {}
        for name, stages in self.scores.items():
            *_, stage = stages
            if stage != BASE:
                last[name] = stages[stage]
        return last

    def side_by_side(self, name: str) -> tuple[dict[str, Scores], dict[str, Scores]]:
        """Return the scores of base, untuned model (step 0) and the last stage of a measurement, in two groups.

        The first group was measured with the options of the last stage; tables and pictures show it. The second was
        measured with other options.
        """
        stages = self.scores[name]
        *_, last = stages
        alike = {}
        others = {}
        for stage in (BASE, STEP_0, last):
            if stage not in stages:
                continue
            scores = stages[stage]
            label = UNTUNED if stage == STEP_0 else stage
            if differences(scores.options, stages[last]):
                others[label] = scores
            else:
                alike[label] = scores
        return alike, others


def shown_metrics(scores: Scores) -> dict[str, Metric]:
    """Return the metrics that cards and comparisons show, by heading."""
    return {metric.heading: metric for metric in metrics_of(scores) if metric.hub_name}


def comparable_metrics(other: Scores | None, scores: Scores) -> dict[str, Metric]:
    """Return the metrics of another model by heading, none if it was not measured in the same way as `scores`."""
    return shown_metrics(other) if other and not differences(other.options, scores) else {}


def scores_section(run: MeasuredRun, name: str) -> Iterator[str]:
    """Yield Markdown for the scores of a measurement: the text and settings, and a table of the metrics of base, step 0
    and run. Scores with other options are named and not shown. If the base is not in the table, the command that
    measures it follows.
    """
    alike, others = run.side_by_side(name)
    *_, last = alike.values()
    yield f"**{literal(name)}**: {literal(public_setting(last))}"
    rows = metric_rows([shown_metrics(scores) for scores in alike.values()])
    table = markdown_table(["metric", *alike], rows)
    yield table.rstrip("\n")
    for stage, scores in alike.items():
        if differing := other_arithmetic(scores, last):
            yield f"The {stage} and the last column were measured with {differing}."
    for stage, scores in others.items():
        keys = ", ".join(differences(scores.options, last)).replace("_", " ")
        yield f"Not shown: {stage}, measured with other {keys} ({literal(public_setting(scores))})."
    if BASE not in alike:
        command = shlex.join(["pi-lora", "compare", public_name(run.base.name), "."])
        yield f"The base was not measured in the same way. In the folder of the run, `{command}` measures it."


def public_setting(scores: Scores) -> str:
    """Return the text and settings of a measurement, without paths of this machine."""
    setting = setting_of(scores, public_name)
    return f"{setting}, the model is tuned on it" if scores.tuned_on else setting


def eval_results(results: Mapping[str, Scores]) -> Iterator[EvalResult]:
    """Yield the metrics in the scores of a model as entries of the hub's `model-index`, but for those of texts that the
    model is tuned on.
    """
    for scores in results.values():
        if scores.tuned_on:
            continue
        for heading, metric in shown_metrics(scores).items():
            dataset_name = public_name(metric.dataset)
            # As the hub spells the types of data sets.
            dataset_type = re.sub(r"[^\w./-]+", "-", dataset_name).strip("-")
            yield EvalResult(
                task_type="text-generation",
                dataset_type=dataset_type,
                dataset_name=dataset_name,
                metric_type=metric.hub_name,
                metric_value=metric.value,
                metric_name=f"{heading}, {metric.unit}" if metric.unit else heading,
            )


def literal(text: str) -> str:
    r"""Return Markdown that shows a text, which may come from elsewhere, without images, links, HTML or cells.

    >>> print(literal("![](http://x/y.png) <b> a|b"))
    \!\[\](http://x/y.png) \<b> a\|b
    """
    return re.sub(r"([\\`!\[\]<|])", r"\\\1", " ".join(text.split()))


def code_cell(text: str) -> str:
    r"""Return a text as code in a cell of a Markdown table.

    >>> print(code_cell("a|b.txt"), code_cell("a`b"))
    `a\|b.txt` `` a`b ``
    """
    ticks = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (ticks + 1)
    padding = " " if ticks else ""
    content = " ".join(text.split()).replace("|", r"\|")
    return f"{fence}{padding}{content}{padding}{fence}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    rule = "|---" * len(head) + "|\n"
    return "".join([_markdown_row(head), rule, *map(_markdown_row, rows)])


def _markdown_row(cells: Sequence[str]) -> str:
    content = " | ".join(literal(cell) for cell in cells)
    return f"| {content} |\n"

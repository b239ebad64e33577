"""A run with its scores, and scores as tables in Markdown and as the hub's `model-index`."""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from pi_lora.evaluation.measurement import Metric, Scores
from pi_lora.evaluation.suite import differences, metric_rows, metrics_of, read_scores, setting_of
from pi_lora.models.files import ADAPTER_CONFIG_FILE, read_adapter_settings, read_config
from pi_lora.recipe.schema import Model
from pi_lora.run import BASE, STEP_0, Run


@dataclass(frozen=True)
class MeasuredRun(Run):
    """A run with its scores, or an adapter folder of other origin.

    If it was merged, `merged` is the folder of the full weights. A base that was extended without tuning is `untuned`.
    `base_name` is the name of the base, where no adapter names it.
    """

    merged: Path | None = None
    untuned: bool = False
    base_name: str = "unknown"

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config of the extended model."""
        return read_config(self.merged or self.path)

    @cached_property
    def base(self) -> Model:
        """The base of the adapter, or of full tuning."""
        if (self.path / ADAPTER_CONFIG_FILE).is_file():
            adapter = read_adapter_settings(self.path)
            return Model(name=adapter.base_model_name_or_path or self.base_name, revision=adapter.revision or "main")
        return Model(name=self.base_name) if self.untuned else self.recipe.model

    @cached_property
    def scores(self) -> dict[str, dict[str, Scores]]:
        """Scores by measurement and stage; the stages in order: base, step 0, step 200, ..., tuned."""
        measured: dict[str, dict[str, Scores]] = {}
        for stage, name, file in self.score_files():
            if scores := read_scores(file):
                measured.setdefault(name, {})[stage] = scores
        return dict(sorted(measured.items()))

    @property
    def last_scores(self) -> dict[str, Scores]:
        """The scores of the finished run, or else of the last step, by measurement."""
        stages = [(name, stage) for name in self.scores for stage in self.scores[name] if stage != BASE]
        return {name: self.scores[name][stage] for name, stage in stages}

    def side_by_side(self, name: str) -> tuple[dict[str, Scores], dict[str, Scores]]:
        """Return the scores of base, step 0, and the last stage of a measurement: those that were measured like the
        last, which tables and pictures show, and the others.
        """
        stages = self.scores[name]
        *_, last = stages
        shown = {stage: stages[stage] for stage in (BASE, STEP_0, last) if stage in stages}
        others = {stage: scores for stage, scores in shown.items() if differences(scores.options, stages[last])}
        return {stage: scores for stage, scores in shown.items() if stage not in others}, others


def shown_metrics(scores: Scores) -> dict[str, Metric]:
    """Return the metrics that cards and comparisons show, by heading."""
    return {metric.heading: metric for metric in metrics_of(scores) if not metric.is_detail}


def scores_sections(run: MeasuredRun) -> Iterator[str]:
    """Yield Markdown for the scores of a run: for each measurement its text and settings, and a table of the metrics of
    base, step 0 and run. What was measured otherwise is named and not shown. If the base is not in the table, the
    command that measures it like the run follows.
    """
    for name in run.scores:
        alike, others = run.side_by_side(name)
        *_, last = alike.values()
        yield f"**{literal(name)}**: {literal(public_setting(last))}"
        rows = metric_rows([shown_metrics(scores) for scores in alike.values()])
        yield markdown_table(["metric", *alike], rows).rstrip("\n")
        for stage, scores in others.items():
            keys = ", ".join(differences(scores.options, last)).replace("_", " ")
            yield f"Not shown: {stage}, measured with other {keys} ({literal(public_setting(scores))})."
        if BASE not in alike:
            command = shlex.join(["pi-lora", "compare", public_name(run.base.name), "."])
            yield f"The base was not measured in the same way. In the folder of the run, `{command}` measures it."


def public_setting(scores: Scores) -> str:
    """Return on which text and how a model was measured, without paths of this machine."""
    data = str(scores.options.model_dump().get("data"))
    return setting_of(scores).replace(data, public_name(data))


def eval_results(results: Mapping[str, Scores]) -> list[EvalResult]:
    """Return the metrics in the scores of a model, by measurement, as the hub takes them."""
    entries = []
    for scores in results.values():
        for heading, metric in shown_metrics(scores).items():
            name = public_name(metric.dataset)
            data = re.sub(r"[^\w./-]+", "-", name).strip("-")  # as the hub spells its own
            title = f"{heading}, {metric.unit}" if metric.unit else heading
            entries.append(EvalResult("text-generation", data, name, metric.hub_name, metric.value, metric_name=title))
    return entries


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


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    first, *others = (f"| {' | '.join(map(literal, cells))} |\n" for cells in (head, *rows))
    return first + "|---" * len(head) + "|\n" + "".join(others)

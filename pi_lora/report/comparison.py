"""The comparison of a base and a run, with a 95 % interval and a verdict for each metric.

Both models read the same documents, prompts and examples: where both results hold the outcomes, differences are paired.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from pydantic import BaseModel
from rich.table import Table

from pi_lora.errors import ModelError
from pi_lora.evaluation.changes import Row, changes_between
from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.suite import (
    Requested,
    evaluate,
    name_of_text_scores,
    other_arithmetic,
    requested_of_run,
    scores_of,
    setting_of,
)
from pi_lora.models.resolve import extension_of, run_folder
from pi_lora.models.source import ModelSource
from pi_lora.recipe.evaluation import ChatOptions
from pi_lora.report.scores import MeasuredRun, comparable_metrics, shown_metrics
from pi_lora.report.verdict import verdict_of
from pi_lora.run import BASE, STEP_0, TUNED

# Formats of values by unit; other values have three decimals.
VALUE_FORMATS = {"tokens": "{:,.0f}", "points": "{:.1f} %"}


class Comparison(BaseModel):
    """The comparison of a base and a run.

    Attributes:
        base: The name of the base, with a remark if it is not the base of the run.
        run: The name of the run.
        original: The original window (L) in tokens, if it is known.
        verdict: How far the run reads, what it finds, what the tuning added and what short inputs lost, in words
            (`verdict_of`).
        settings: The text and settings of both models, by measurement.
        rows: A row for each metric.
        untuned: The same rows beside the base under the scaling of the run, without tuning; empty if not measured.
    """

    base: str
    run: str
    original: int | None
    verdict: dict[str, str] = {}
    settings: dict[str, str] = {}
    rows: list[Row] = []
    untuned: list[Row] = []


def compare_run(
    base: ModelSource,
    run: str,
    resolve: Callable[[], ModelSource],
    requested: Mapping[str, ChatOptions],
    *,
    data: str | None,
    another: bool,
    untuned: bool,
    again: bool,
) -> Comparison:
    """Compare a run with its base in the scores of the run, the measurements of its recipe, and `requested` ones.

    Missing scores are measured and kept in the scores of the run, except those of `another` model, which is measured
    with the options of the run's scores.

    Args:
        base: The base of the run, or another model.
        run: A folder or hub id.
        resolve: Returns the model of the run.
        requested: Further measurements, with options.
        data: Another text for perplexity than the run's.
        another: Allow a `base` that the run was not tuned from.
        untuned: Compare also with the base under the scaling of the run, without tuning.
        again: Measure again what has scores.

    Raises:
        ModelError: `base` is not the base of the run.
        PiLoraError: A measurement cannot be made.
    """
    folder = MeasuredRun(run_folder(run))
    all_requested = _all_requested(folder, requested, data)
    is_base = base.base.is_base_of(folder) and not _is_extended(base, folder)
    if not is_base and not another:
        raise ModelError(
            f"{run}: was tuned from another model ({folder.base.name}) than {base.name}; name its own, or add --another"
        )
    measure = partial(scores_of, folder, again=again)
    run_scores = measure(TUNED, all_requested, resolve)
    used_options = {name: scores.options for name, scores in run_scores.items()}
    base_name = base.name
    untuned_scores: Mapping[str, Scores] = {}
    if is_base:
        base_scores = measure(BASE, used_options, lambda: base)
        extension = extension_of(folder.recipe)
        if untuned and extension and extension.scaling != "direct":
            untuned_scores = measure(STEP_0, used_options, partial(base.extended, extension))
    else:
        base_name += " (another model)"
        measured = evaluate([base], used_options, {}, section="evaluation")
        base_scores = {name: scores[0] for name, scores in measured.items()}
    original = folder.metadata.original
    verdict = verdict_of(base_scores, untuned_scores, run_scores, original)
    comparison = Comparison(base=base_name, run=run, original=original, verdict=verdict)
    for name, scores in run_scores.items():
        rows = _told_apart(compare(base_scores[name], scores), scores, comparison.rows)
        comparison.rows.extend(rows)
        if name in untuned_scores:
            untuned_rows = compare(untuned_scores[name], scores)
            comparison.untuned.extend(_told_apart(untuned_rows, scores, comparison.untuned))
        comparison.settings[name] = setting_of(scores)
        if scores.tuned_on:
            comparison.settings[name] += "; the run is tuned on it"
        if differing := other_arithmetic(base_scores[name], scores):
            comparison.settings[name] += f"; base and run were measured with {differing}"
        if not rows:
            comparison.settings[name] += "; not compared: the base reads other rows or tokens; see --again"
    return comparison


def _told_apart(rows: Iterable[Row], scores: Scores, earlier: Iterable[Row]) -> list[Row]:
    """Return rows that name their text if `earlier` ones, of another text, have the same headings."""
    known = {row.measurement for row in earlier}
    told = []
    for row in rows:
        if row.measurement in known:
            row.measurement += f", {Path(scores.options.data).name}"
        told.append(row)
    return told


def _is_extended(base: ModelSource, run: MeasuredRun) -> bool:
    """Whether a model with the weights of the run's base reads further than the base: `extend` changes no weights."""
    recipe = run.recipe
    if recipe.scaling == "keep":
        return False
    if run.metadata.original and not recipe.context.original:
        return base.rope.trained > run.metadata.original
    return base.rope.trained >= recipe.context.target


def _all_requested(run: MeasuredRun, requested: Mapping[str, ChatOptions], data: str | None) -> Requested:
    """Return the measurements of the recipe, of the scores and of the command, in this order.

    The options in the scores hold unless the recipe has others, and those of the command come before both. Other chats
    than those have scores of their own.
    """
    all_requested = dict(requested_of_run(run, data))
    for name, stages in run.scores.items():
        if TUNED in stages and name not in all_requested:
            all_requested[name] = stages[TUNED].options
    for name, options in requested.items():
        kept = all_requested.get(name, options)
        if (kept.data, kept.column) != (options.data, options.column):
            name = name_of_text_scores(options.data, name)
        all_requested[name] = options
    return all_requested


def compare(base: Scores, run: Scores) -> Iterator[Row]:
    """Return rows of the metrics that two results share, if both were measured on the same text in the same way."""
    return changes_between(comparable_metrics(base, run), shown_metrics(run).values())


def comparison_table(comparison: Comparison) -> Table:
    """Return the rows as a table that fits 80 columns."""
    lines = [f"{label}: {text}" for label, text in comparison.verdict.items()]
    title = "\n".join([f"{comparison.base} and {comparison.run}", *lines])
    table = Table("", title=title, title_justify="left", caption_justify="left", box=None, pad_edge=False)
    for heading in ("base", "run", "verdict", "95 % interval"):
        table.add_column(heading, justify="right")
    for row in comparison.rows:
        value_format = VALUE_FORMATS.get(row.unit, "{:,.3f}")
        table.add_row(
            row.measurement,
            value_format.format(row.base),
            value_format.format(row.run),
            row.verdict,
            row.interval_text,
        )
    lines = [f"{name}: {setting}" for name, setting in comparison.settings.items()]
    last_line = "intervals of the change, in the unit of the verdict"
    if comparison.original:
        last_line = f"the original window has {comparison.original:,} tokens; {last_line}"
    table.caption = "\n".join([*lines, last_line])
    return table

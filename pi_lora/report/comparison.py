"""What an extension gained and cost: a base and its run side by side, with a 95 % interval and a verdict for each row.
Both models read the same documents, prompts and examples: where both results hold the outcomes, differences are paired.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from pydantic import BaseModel
from rich.table import Table

from pi_lora.errors import ModelError
from pi_lora.evaluation.intervals import Interval, Pairs, of_means, of_successes, pairs_needed
from pi_lora.evaluation.measurement import Metric, Scores, Value
from pi_lora.evaluation.suite import (
    Asked,
    differences,
    evaluate,
    requested_of_run,
    scores_of,
    setting_of,
)
from pi_lora.models.model import Model, run_folder
from pi_lora.report.scores import MeasuredRun, shown_metrics
from pi_lora.run import BASE, TUNED
from pi_lora.types import How

# Fewer documents than these may tell nothing even of a large change; a change that needs more than these is noise.
FEW, MANY = 5, 100
# Digits after the point of a change, by unit; else one.
DIGITS = {"tokens": 0, "": 3}


class Row(BaseModel):
    """A metric of a base and its run, and the change in `unit`. `pairs` are the documents, trials or examples whose
    differences gave the interval; None if it was made of the two single intervals.
    """

    measurement: str
    base: float
    run: float
    unit: str
    change: float
    interval: Interval | None = None
    pairs: int | None = None
    verdict: str


class Comparison(BaseModel):
    """The rows of a base and its run, and by measurement on which text and how both were measured. `original` is the
    original window (L, tokens) if it is known. `base` says so if it is another model than the run's.
    """

    base: str
    run: str
    original: int | None
    settings: dict[str, str] = {}
    rows: list[Row] = []


def compare_run(
    base: str,
    run: str,
    find: Callable[..., list[Model]],
    asked: Asked,
    *,
    data: str | None = None,
    another: bool = False,
    how: How = How(),
) -> Comparison:
    """Compare a run with its base, or if allowed with `another` model, in what was measured of it, what its recipe
    names, and what is `asked` besides; `data` is another text for perplexity. What is missing is measured and kept in
    the run's scores, but of another model: the base with the options of the run's scores. `find` returns the models of
    some names. Raise ModelError if `base` is not the base of the run; PiLoraError as a measurement does.
    """
    folder = MeasuredRun(run_folder(run))
    kept = {name: stages[TUNED].options for name, stages in folder.scores.items() if TUNED in stages}
    named = requested_of_run(folder, data)
    asked = {**named, **kept, **named, **asked}  # in the order of the recipe
    [model] = find(base)
    is_base = model.is_base_of(folder)
    if not is_base and not another:
        raise ModelError(
            f"{run}: was tuned from other weights ({folder.base.name}) than {base}; name its own, or add --another"
        )
    tuned = scores_of(folder, TUNED, asked, lambda: find(run)[0], how)
    options = {name: scores.options for name, scores in tuned.items()}
    if is_base:
        before = scores_of(folder, BASE, options, lambda: model, how)
    else:
        base += " (another model)"
        before = {name: scores for name, [scores] in evaluate([model], options, {}, how).items()}
    comparison = Comparison(base=base, run=run, original=folder.metadata.original)
    for name, scores in tuned.items():
        rows = list(compare(before[name], scores))
        comparison.rows.extend(rows)
        comparison.settings[name] = setting_of(scores) + ("" if rows else "; not compared: the base reads other tokens")
    return comparison


def compare(base: Scores, run: Scores) -> Iterator[Row]:
    """Yield rows of the metrics that two results share, if both were measured on the same text in the same way."""
    before = {} if differences(base.options, run) else shown_metrics(base)
    for heading, metric in shown_metrics(run).items():
        other = before.get(heading)
        # Perplexities of other tokens do not compare: another tokenizer, or documents that were changed.
        if other and metric.compares_with(other):
            yield change_of(other, metric)


def verdict(change: float, interval: Interval | None, unit: str, higher_is_better: bool = True) -> str:
    """Return a change in plain words.

    >>> verdict(3.14, (1.0, 5.0), "%", higher_is_better=False), verdict(-2.0, (-4.0, 0.5), "points")
    ('3.1 % worse', 'within noise')
    """
    if interval is not None and interval[0] <= 0 <= interval[1]:
        return "within noise"
    if change == 0:
        return "the same"
    amount = f"{abs(change):,.{DIGITS.get(unit, 1)}f} {unit}".rstrip()
    if unit == "tokens":
        return f"{amount} {'longer' if change > 0 else 'shorter'}"
    word = "better" if (change > 0) == higher_is_better else "worse"
    return f"{amount} {word}" + (", no interval" if interval is None else "")


def comparison_table(comparison: Comparison) -> Table:
    """Return the rows as a table."""
    title = f"{comparison.base} and {comparison.run}"
    table = Table("", title=title, caption_justify="left", box=None, pad_edge=False)  # fits 80 columns
    for heading in ("base", "run", "verdict", "95 % interval"):
        table.add_column(heading, justify="right")
    for row in comparison.rows:
        number = {"tokens": "{:,.0f}", "points": "{:.1f} %"}.get(row.unit, "{:,.3f}")
        interval = " to ".join(f"{end:+,.{DIGITS.get(row.unit, 1)}f}" for end in row.interval or ())
        table.add_row(row.measurement, number.format(row.base), number.format(row.run), row.verdict, interval)
    settings = [f"{name}: {setting}" for name, setting in comparison.settings.items()]
    window = f"the original window has {comparison.original:,} tokens; " if comparison.original else ""
    table.caption = "\n".join([*settings, f"{window}intervals of the change, in the unit of the verdict"])
    return table


def change_of(base: Metric, run: Metric) -> Row:
    """Return the change from one metric to another, of the same model or of two; paired if both hold the same values.
    The windows of both may differ.
    """
    unit = "%" if run.is_ratio else "points" if run.unit == "%" else run.unit
    change = _percent(math.log(run.value / base.value)) if run.is_ratio else run.value - base.value
    before, after = {value.name: value for value in base.values}, {value.name: value for value in run.values}
    pairs = [(before[name], value) for name, value in after.items()] if before.keys() == after.keys() else []
    paired = _paired_interval(pairs, run) if pairs else None
    interval = paired or run.change_from(base)
    return Row(
        measurement=run.heading,
        base=base.value,
        run=run.value,
        unit=unit,
        change=change,
        interval=interval,
        pairs=len(pairs) if paired else None,
        verdict=_too_few(change, interval, len(pairs), run) or verdict(change, interval, unit, run.higher_is_better),
    )


def _too_few(change: float, interval: Interval | None, pairs: int, metric: Metric) -> str:
    """Return how many documents would tell whether a change is more than noise, if there are too few of them."""
    if not metric.is_ratio or not change or not 0 < pairs < FEW or (interval and interval[0] * interval[1] > 0):
        return ""
    needed = FEW
    if interval:
        low, high = (math.log1p(bound / 100) for bound in interval)
        needed = pairs_needed(math.log1p(change / 100), (high - low) / 2, pairs, MANY)
    if needed == MANY:
        return ""
    amount = verdict(change, None, "%", metric.higher_is_better).removesuffix(", no interval")
    return f"{amount}, but too few documents to tell: {pairs}, about {needed} would do"


def _paired_interval(pairs: Sequence[tuple[Value, Value]], metric: Metric) -> Interval | None:
    """The interval of the change of a metric, in percent of it or in points."""
    scaled = math.log if metric.is_ratio else float
    groups: dict[str, Pairs] = {}
    for before, after in pairs:
        groups.setdefault(after.group, []).append((scaled(before.value), scaled(after.value), after.weight))
    is_binary = not metric.is_ratio and all(value.value in (0, 1) for pair in pairs for value in pair)
    interval = of_successes(*groups.values()) if is_binary and len(groups) == 1 else of_means(list(groups.values()))
    if interval is None or not (metric.is_ratio or metric.unit == "%"):
        return interval
    low, high = (_percent(bound) if metric.is_ratio else 100 * bound for bound in interval)
    return low, high


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)

"""What an extension gained and cost: a base and its run side by side, with a 95 % interval and a verdict for each row.
Both models read the same documents, prompts and examples: where both results hold the outcomes, differences are paired.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import BaseModel
from rich.table import Table

from pi_lora.evaluation.metrics import DECIMALS, Metric, Sample, metrics_of
from pi_lora.evaluation.results import Scores
from pi_lora.report.intervals import Interval, of_means, of_pairs, unpaired

Unit = Literal["", "%", "points", "tokens"]


class Row(BaseModel):
    """A metric of a base and its run, and the change in `unit`. `pairs` are the documents, trials or examples whose
    differences gave the interval; None if the interval is of two standard errors.
    """

    measurement: str
    base: float
    run: float
    unit: Unit
    change: float
    interval: Interval | None = None
    pairs: int | None = None
    verdict: str


def compare(base: Scores, run: Scores, original: int | None = None) -> Iterator[Row]:
    """Yield rows of the metrics that two results share; `original` (L, tokens) tells the old window from what is
    beyond it.
    """
    before = {metric.label: metric for metric in metrics_of(base)}
    for metric in metrics_of(run):
        if metric.label in before:
            yield _row(before[metric.label], metric, original)


def verdict(change: float, interval: Interval | None, unit: Unit, higher_is_better: bool = True) -> str:
    """Return a change in plain words.

    >>> verdict(3.14, (1.0, 5.0), "%", higher_is_better=False), verdict(-2.0, (-4.0, 0.5), "points")
    ('3.1 % worse', 'within noise')
    """
    if interval is not None and interval[0] <= 0 <= interval[1]:
        return "within noise"
    if change == 0:
        return "the same"
    if unit == "tokens":
        return f"{abs(change):,.0f} tokens {'longer' if change > 0 else 'shorter'}"
    word = "better" if (change > 0) == higher_is_better else "worse"
    amount = f"{abs(change):.1f} {unit}" if unit else f"{abs(change):.3f}"
    return f"{amount} {word}" + (", no interval" if interval is None else "")


def verdict_table(base: str, run: str, rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    table = Table("", title=f"{base} beside {run}")
    for heading in ("base", "run", "change", "95 % interval"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for row in rows:
        # A change in % is that of a number without a unit.
        value = DECIMALS[{"%": "", "points": "%"}.get(row.unit, row.unit)]
        change = 0 if row.unit == "tokens" else 1 if row.unit else 3
        low_high = "" if row.interval is None else " to ".join(f"{end:+,.{change}f}" for end in row.interval)
        cells = (f"{row.base:,.{value}f}", f"{row.run:,.{value}f}", f"{row.change:+,.{change}f} {row.unit}", low_high)
        table.add_row(row.measurement, *cells, row.verdict)
    table.caption = "intervals of differences paired by document, trial or example, or else two standard errors"
    return table


def _row(base: Metric, run: Metric, original: int | None) -> Row:
    unit: Unit = "%" if run.relative else "points" if run.unit == "%" else run.unit
    change = _percent(math.log(run.value / base.value)) if run.relative else run.value - base.value
    pairs = [(base.samples[key], sample) for key, sample in run.samples.items() if key in base.samples]
    paired = len(pairs) == len(base.samples) == len(run.samples) > 0
    interval = _paired_interval(pairs, run) if paired else unpaired(base.value, run.value, base.stderr, run.stderr)[1]
    place = "" if run.window is None or original is None else " (old window)" if run.window <= original else " (beyond)"
    return Row(
        measurement=run.label + place + (f", {run.unit}" if run.unit == "%" else ""),
        base=base.value,
        run=run.value,
        unit=unit,
        change=change,
        interval=interval,
        pairs=len(pairs) if paired else None,
        verdict=verdict(change, interval, unit, run.higher_is_better),
    )


def _paired_interval(pairs: Sequence[tuple[Sample, Sample]], metric: Metric) -> Interval | None:
    """The interval of the change of a metric, in percent of it, or in its unit."""
    if metric.binary:
        low, high = of_pairs([before.value > 0 for before, _ in pairs], [after.value > 0 for _, after in pairs])[1]
        return 100 * low, 100 * high
    groups: dict[str, tuple[list[float], list[float]]] = {}
    for before, after in pairs:
        differences, weights = groups.setdefault(after.group, ([], []))
        differences.append(after.value - before.value)
        weights.append(after.weight)
    interval = of_means(list(groups.values()))[1]
    if interval is None:
        return None
    scale = _percent if metric.relative else lambda share: 100 * share
    return scale(interval[0]), scale(interval[1])


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)

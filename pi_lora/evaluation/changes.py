"""The change of a metric between two models, with a 95 % interval and a verdict. Both models are measured on the same
documents, prompts and examples. Differences are paired if both results contain the outcomes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pydantic import BaseModel

from pi_lora.evaluation.intervals import Interval, Pairs, of_means, of_successes, pairs_needed
from pi_lora.evaluation.measurement import Metric, Value

# Below this number of documents, even a large change may be within noise.
MIN_DOCUMENTS = 5
# A change that needs this many documents or more to show is called noise.
MAX_DOCUMENTS = 100
# Digits after the point of a change, by unit; one for other units.
UNIT_DIGITS = {"tokens": 0, "": 3, "nats": 3}


class Row(BaseModel):
    """A metric of a base and a run, and the change in `unit`. The differences of so many `pairs` of documents, trials
    or examples gave the interval; `pairs` is None if the two separate intervals gave it.
    """

    measurement: str
    base: float
    run: float
    unit: str
    change: float
    interval: Interval | None = None
    pairs: int | None = None
    verdict: str

    @property
    def interval_text(self) -> str:
        """The interval in words, or an empty text if there is none."""
        digits = UNIT_DIGITS.get(self.unit, 1)
        return " to ".join(f"{bound:+,.{digits}f}" for bound in self.interval or ())

    @property
    def text(self) -> str:
        """The verdict with the interval."""
        interval = f"{self.interval_text} {self.unit}".strip()
        return f"{self.verdict} ({interval})" if self.interval else self.verdict


def changes_between(before: Mapping[str, Metric], after: Iterable[Metric]) -> Iterator[Row]:
    """Yield the changes of metrics from those of another model by heading, as far as it has them."""
    for metric in after:
        other = before.get(metric.heading)
        # Perplexities of other tokens do not compare: another tokenizer, or documents that were changed.
        if other and metric.compares_with(other):
            yield change_of(other, metric)


def change_of(base: Metric, run: Metric) -> Row:
    """Return the change from one metric to another, of the same model or of two. The change is paired if both metrics
    have values of the same names. Their windows may differ.
    """
    if run.is_ratio:
        unit = "%"
        change = _percent(math.log(run.value / base.value))
    else:
        unit = "points" if run.unit == "%" else run.unit
        change = run.value - base.value
    base_values = base.by_name
    run_values = run.by_name
    pairs = []
    if base_values.keys() == run_values.keys():
        pairs = [(base_values[name], value) for name, value in run_values.items()]
    paired_interval = _paired_interval(pairs, run) if pairs else None
    interval = paired_interval or run.change_from(base)
    too_few = _too_few_documents(change, interval, len(pairs), run)
    return Row(
        measurement=run.heading,
        base=base.value,
        run=run.value,
        unit=unit,
        change=change,
        interval=interval,
        pairs=len(pairs) if paired_interval else None,
        verdict=too_few or in_words(change, interval, unit, higher_is_better=run.higher_is_better),
    )


def _too_few_documents(change: float, interval: Interval | None, pairs: int, metric: Metric) -> str:
    """Return a verdict with the number of documents that would tell a change from noise; empty if that many exist."""
    if not metric.is_ratio or change == 0 or pairs == 0 or pairs >= MIN_DOCUMENTS:
        return ""
    needed = MIN_DOCUMENTS
    if interval:
        low, high = interval
        if low * high > 0:
            return ""
        log_half_width = (math.log1p(high / 100) - math.log1p(low / 100)) / 2
        log_change = math.log1p(change / 100)
        needed = pairs_needed(log_change, half_width=log_half_width, pairs=pairs, most=MAX_DOCUMENTS)
    if needed == MAX_DOCUMENTS:
        return ""
    amount = _size_in_words(change, "%", higher_is_better=metric.higher_is_better)
    return f"{amount}, but too few documents to tell: {pairs}, about {needed} would do"


def _paired_interval(pairs: Sequence[tuple[Value, Value]], metric: Metric) -> Interval | None:
    """Return the interval of the change of a metric: a ratio in percent, a share in points, or in the metric's unit."""
    scale = math.log if metric.is_ratio else float
    groups: dict[str, Pairs] = {}
    for before, after in pairs:
        pair = (scale(before.value), scale(after.value), after.weight)
        groups.setdefault(after.group, []).append(pair)
    outcomes = {value.value for pair in pairs for value in pair}
    if outcomes <= {0, 1} and not metric.is_ratio and len(groups) == 1:
        [group] = groups.values()
        interval: Interval | None = of_successes(group)
    else:
        interval = of_means(list(groups.values()))
    if interval is None:
        return None
    low, high = interval
    if metric.is_ratio:
        return _percent(low), _percent(high)
    if metric.unit == "%":
        return 100 * low, 100 * high
    return interval


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)


def in_words(change: float, interval: Interval | None, unit: str, *, higher_is_better: bool = True) -> str:
    """Return a change in words.

    >>> in_words(3.14, (1.0, 5.0), "%", higher_is_better=False), in_words(-2.0, (-4.0, 0.5), "points")
    ('3.1 % worse', 'within noise')
    >>> in_words(0.0123, (0.01, 0.02), "nats")
    '0.012 nats better'
    """
    if interval is not None and interval[0] <= 0 <= interval[1]:
        return "within noise"
    if change == 0:
        return "the same"
    amount = _size_in_words(change, unit, higher_is_better=higher_is_better)
    return f"{amount}, no interval" if interval is None and unit != "tokens" else amount


def _size_in_words(change: float, unit: str, *, higher_is_better: bool) -> str:
    """Return the size of a change and the direction, such as `3.1 % worse`."""
    digits = UNIT_DIGITS.get(unit, 1)
    amount = f"{abs(change):,.{digits}f} {unit}".rstrip()
    if unit == "tokens":
        word = "longer" if change > 0 else "shorter"
    else:
        word = "better" if (change > 0) == higher_is_better else "worse"
    return f"{amount} {word}"

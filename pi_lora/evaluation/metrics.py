"""Metrics: the numbers of every result, in the one form that tables, cards, the hub and comparisons are made from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

# Standard errors to each side of a 95 % interval.
NORMAL_95 = 1.96
Interval = tuple[float, float]


class Value(NamedTuple):
    """The value of one document, trial or example, by a name that is the same for every model; its `weight` in the
    mean, such as its tokens; and the `group` that it was drawn from, such as a task.
    """

    name: str
    value: float
    weight: float = 1.0
    group: str = ""


@dataclass(frozen=True)
class Metric:
    """A number that a measurement found.

    `at` is the window, distance or length of context in tokens that it belongs to, if any. `samples` is the number of
    tokens, trials or examples that it is the mean of, `interval` its 95 % interval. Where `values` are known, the value
    is their weighted mean, or if `is_ratio` their geometric mean, and two models differ by a ratio. `dataset` and
    `hub_name` are the words of the hub; a detail, which only the terminal shows, has none.
    """

    label: str
    value: float
    unit: str = ""
    higher_is_better: bool = True
    at: int | None = None
    digits: int = 0
    samples: int | None = None
    interval: Interval | None = None
    values: Sequence[Value] = ()
    is_ratio: bool = False
    dataset: str = ""
    hub_name: str = ""

    @property
    def is_detail(self) -> bool:
        """Whether the metric is left out of cards and comparisons."""
        return not self.hub_name

    @property
    def heading(self) -> str:
        """The label, with the tokens that the metric belongs to."""
        return self.label if self.at is None else f"{self.label} at {self.at:,}"

    def compares_with(self, other: "Metric") -> bool:
        """Whether a ratio to another metric means something: both are of the same values, if these are known."""
        return not self.is_ratio or {each.name for each in self.values} == {each.name for each in other.values}

    @property
    def text(self) -> str:
        """The value with its unit and its interval."""
        unit = f" {self.unit}" if self.unit else ""
        bounds = "" if self.interval is None else " ({:,.{n}f} to {:,.{n}f})".format(*self.interval, n=self.digits)
        return f"{self.value:,.{self.digits}f}{unit}{bounds}"


def share(label: str, values: Sequence[Value], **others: Any) -> Metric:
    """Return the mean of values from 0 to 1 in percent, with its Wilson interval. Of values between 0 and 1, or from
    several groups, the interval is wider than need be, never too narrow.
    """
    mean = math.fsum(each.value for each in values) / len(values)
    return share_of_samples(label, mean, len(values), values=values, **others)


def share_of_samples(label: str, mean: float, samples: int, **others: Any) -> Metric:
    """Return a share of so many samples as a metric in percent; a digit after the point needs a thousand of them."""
    low, high = (100 * bound for bound in wilson(mean, samples))
    digits = 1 if samples >= 1000 else 0
    return Metric(label, 100 * mean, "%", digits=digits, samples=samples, interval=(low, high), **others)


def wilson(mean: float, samples: int) -> Interval:
    """Return the 95 % interval of a share (Wilson 1927), which has a width also where all samples agree.

    >>> [round(bound, 3) for bound in wilson(1.0, 5)], [round(bound, 3) for bound in wilson(0.5, 100)]
    ([0.566, 1.0], [0.404, 0.596])
    """
    squared = NORMAL_95**2
    center = (mean + squared / (2 * samples)) / (1 + squared / samples)
    reach = NORMAL_95 * math.sqrt(mean * (1 - mean) / samples + squared / (4 * samples**2)) / (1 + squared / samples)
    return max(0.0, center - reach), min(1.0, center + reach)


def longest_passing(scores: Mapping[int, float], threshold: float) -> int:
    """Return the greatest length in tokens such that it and all shorter ones reach the threshold; 0 if none does.

    >>> longest_passing({2048: 0.9, 4096: 0.7, 8192: 0.8}, 0.75)
    2048
    """
    passing = takewhile(lambda length: scores[length] >= threshold, sorted(scores))
    return max(passing, default=0)

"""What a measurement is: options and a model in, typed scores out, and the metrics in them that everything else shows:
the terminal's table, the model card, the hub, and the comparison of a run with its base.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from pi_lora.drawing import Panel
from pi_lora.evaluation.intervals import Interval, wilson
from pi_lora.evaluation.journal import Session
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import Options
from pi_lora.types import Json


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

    @property
    def text(self) -> str:
        """The value with its unit and its interval."""
        unit = f" {self.unit}" if self.unit else ""
        bounds = "" if self.interval is None else " ({:,.{n}f} to {:,.{n}f})".format(*self.interval, n=self.digits)
        return f"{self.value:,.{self.digits}f}{unit}{bounds}"

    def compares_with(self, other: "Metric") -> bool:
        """Whether a ratio to another metric means something: both are of the same values, if these are known."""
        return not self.is_ratio or {each.name for each in self.values} == {each.name for each in other.values}

    def change_from(self, before: "Metric") -> Interval | None:
        """Return the interval of the difference to the same metric of another model, from both intervals (Newcombe
        1998, method 10); None if one of them has none.
        """
        if before.interval is None or self.interval is None:
            return None
        change = self.value - before.value
        down = math.hypot(self.value - self.interval[0], before.interval[1] - before.value)
        up = math.hypot(self.interval[1] - self.value, before.value - before.interval[0])
        return change - down, change + up


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


def longest_passing(scores: Mapping[int, float], threshold: float) -> int:
    """Return the greatest length in tokens such that it and all shorter ones reach the threshold; 0 if none does.

    >>> longest_passing({2048: 0.9, 4096: 0.7, 8192: 0.8}, 0.75)
    2048
    """
    passing = takewhile(lambda length: scores[length] >= threshold, sorted(scores))
    return max(passing, default=0)


class Result(BaseModel):
    """A part of a result; only fields that were set are written, and fields of other versions are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class Scores(Result):
    """What every result says of its model: name, scale L'/L, dtype, attention kernel, window in tokens, step; and the
    options it was measured with, complete, which measure another model in the same way. Files written before options
    were kept have None.
    """

    measurement: ClassVar[str]

    model: str
    scale: float = 1.0
    dtype: str | None = None
    kernel: str | None = None
    quantized_kernel: str | None = None
    window: int | None = None
    step: int | None = None
    options: Any = None


Asked = TypeVar("Asked", bound=Options)
Found = TypeVar("Found", bound=Scores)


class Measurement(Protocol[Asked, Found]):
    """A measurement: `name` is the section of a recipe, the command, and the file in a run's scores.

    A new one is a module with its scores and a class like this, its options in `pi_lora.recipe.evaluation`, and one
    line in `pi_lora.evaluation.suite`.
    """

    name: str
    options: type[Asked]
    scores: type[Found]

    def prepare(self, options: Asked, models: Sequence[Model]) -> Asked:
        """Return the options with defaults that depend on the models filled in, so that all are measured alike. Raise
        PiLoraError for what shows before weights are read: a missing package, a data set that cannot be read.
        """
        return options

    def run(self, model: Model, options: Asked, session: Session) -> Found:
        """Measure a model; `options` need not be prepared."""

    def metrics(self, scores: Found) -> list[Metric]:
        """Return the metrics in the order of the table."""

    def about(self, scores: Sequence[Found]) -> str:
        """Return how several models were measured, for the caption of their table."""

    def panels(self, scores: Mapping[str, Found]) -> list[Panel]:
        """Return the functions that draw the scores of several models by label, each on matplotlib axes of its own."""
        return []


def as_json(scores: Scores) -> Json:
    """Return scores as they are written."""
    content = scores.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return {"measurement": scores.measurement, **content}

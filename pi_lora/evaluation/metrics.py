"""Metrics: the numbers of every result, in the one form that tables, cards, the hub and comparisons are made from."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, NamedTuple

from pi_lora.evaluation import results
from pi_lora.evaluation.ruler.effective import PAPERS_THRESHOLD, SHARE_OF_BASE

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


@singledispatch
def metrics_of(scores: results.Scores) -> Iterator[Metric]:
    """Yield the metrics of a result."""
    raise TypeError(type(scores).__name__)


@metrics_of.register
def _perplexity(scores: results.PerplexityScores) -> Iterator[Metric]:
    for row in scores.windows:
        documents = [
            Value(f"{document.name} of {document.tokens} tokens", part.perplexity, part.tokens)
            for document in scores.per_document or ()
            for part in document.windows
            if part.window == row.window
        ]
        others: dict[str, Any] = {"dataset": scores.data, "hub_name": "perplexity", "values": documents}
        yield Metric("perplexity", row.perplexity, "", False, row.window, 3, row.tokens, is_ratio=True, **others)


@metrics_of.register
def _passkey(scores: results.PasskeyScores) -> Iterator[Metric]:
    hub: dict[str, Any] = {"at": scores.target, "dataset": f"passkey retrieval in {scores.target} tokens"}
    yield Metric("k_max", scores.k_max, "tokens", hub_name="k_max", **hub)
    trials = [
        Value(f"key {scores.seed}/{trial} at {depth.k} of {scores.target}", float(outcome))
        for depth in scores.depths
        for trial, outcome in enumerate(depth.outcomes or ())
    ]
    if trials and not scores.k_max_only:
        yield share("passkeys retrieved", trials, hub_name="accuracy", **hub)


@metrics_of.register
def _passkey_map(scores: results.PasskeyMap) -> Iterator[Metric]:
    for length in scores.lengths:
        yield from metrics_of(length)


@metrics_of.register
def _benchmarks(scores: results.BenchmarkScores) -> Iterator[Metric]:
    for task, score in scores.tasks.items():
        hub: dict[str, Any] = {"dataset": task}
        if score.acc is not None:
            values = [Value(f"{task} {number}", value) for number, value in enumerate(score.outcomes or ())]
            yield share_of_samples(task, score.acc, score.examples, values=values, hub_name="accuracy", **hub)
        for name, value in (score.metrics or {}).items():
            if "_stderr" not in name:
                yield Metric(f"{task} {name}", value, digits=3, hub_name=name, **hub)


@metrics_of.register
def _ruler(scores: results.RulerScores) -> Iterator[Metric]:
    for length in scores.lengths:
        values = [
            Value(f"{name} {scores.seed} of {task.length} tokens: {prompt}", value, group=name)
            for name, task in length.tasks.items()
            for prompt, value in enumerate(task.outcomes or ())
        ]
        about = f"RULER, {len(length.tasks)} tasks at {length.window} tokens"
        others: dict[str, Any] = {"at": length.window, "dataset": about, "hub_name": "score", "values": values}
        yield share_of_samples("mean", length.score, sum(task.samples for task in length.tasks.values()), **others)
    effective = {f"{PAPERS_THRESHOLD:.1%}": scores.effective_length}
    if scores.relative is not None:
        effective[f"{SHARE_OF_BASE:.0%} of the base"] = scores.relative.effective_length
    for threshold, tokens in effective.items():
        label = f"effective length ({threshold})"
        yield Metric(label, tokens, "tokens", dataset="RULER", hub_name="effective length")


@metrics_of.register
def _summarization(scores: results.SummarizationScores) -> Iterator[Metric]:
    data = scores.data if isinstance(scores.data, str) else str(scores.data.get("name", ""))
    for name in ("rouge1", "rouge2", "rougeL"):
        interval = (scores.intervals or {}).get(name)
        label = f"ROUGE-{name.removeprefix('rouge')}"
        yield Metric(label, getattr(scores, name), digits=2, interval=interval, dataset=data, hub_name=name)

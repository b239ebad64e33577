"""Metrics: the numbers of every result, in the one form that tables, cards, the hub and comparisons are made from."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Literal

from pi_lora.evaluation import results
from pi_lora.evaluation.ruler.effective import PAPERS_THRESHOLD, SHARE_OF_BASE

DECIMALS = {"": 3, "%": 1, "tokens": 0}
NORMAL_95 = 1.96


@dataclass(frozen=True)
class Sample:
    """What a metric is for one document, trial or example. A metric is the mean over its groups of samples, of the
    weighted mean in each; under `Metric.relative`, the exponential of that.
    """

    value: float
    weight: float = 1
    group: str = ""


@dataclass(frozen=True)
class Metric:
    """A number of a result in `unit`, and `stderr`, its standard error, if known. `data` and `kind` are the names of
    data set and metric on the hub; `window` is the window that it is measured at, in tokens. Two results are compared
    by `label`, in pairs if they have the same `samples`; `binary` ones succeed (1) or fail (0).
    """

    label: str
    value: float
    data: str
    kind: str
    unit: Literal["", "%", "tokens"] = ""
    higher_is_better: bool = True
    relative: bool = False  # whether a change is given in percent of the value
    stderr: float | None = None
    window: int | None = None
    binary: bool = False
    samples: Mapping[str, Sample] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The label with the unit."""
        return f"{self.label}, {self.unit}" if self.unit else self.label

    @property
    def cell(self) -> str:
        """The value, with two standard errors if they are known."""
        error = "" if self.stderr is None else f" ± {2 * self.stderr:.{DECIMALS[self.unit]}f}"
        return f"{self.value:,.{DECIMALS[self.unit]}f}{error}"


@singledispatch
def metrics_of(scores: results.Scores) -> Iterator[Metric]:
    """Yield the metrics of a result."""
    raise TypeError(type(scores).__name__)


@metrics_of.register
def _perplexity(scores: results.PerplexityScores) -> Iterator[Metric]:
    for row in scores.windows:
        yield Metric(
            f"perplexity at {row.window:,}, stride {scores.stride:,}",
            row.perplexity,
            scores.data,
            "perplexity",
            higher_is_better=False,
            relative=True,
            window=row.window,
            samples={
                f"{document.name}, {document.tokens} tokens": Sample(math.log(part.perplexity), part.tokens)
                for document in scores.per_document or ()
                for part in document.windows
                if part.window == row.window
            },
        )


@metrics_of.register
def _passkey(scores: results.PasskeyScores) -> Iterator[Metric]:
    data = f"passkey retrieval in {scores.target} tokens"
    if not scores.k_max_only:  # which tries no more than decides k_max
        samples = {
            f"seed {scores.seed}, k {depth.k}, trial {trial}": Sample(float(success))
            for depth in scores.depths
            for trial, success in enumerate(depth.outcomes or ())
        }
        rate = sum(depth.success_rate * depth.trials for depth in scores.depths)
        trials = sum(depth.trials for depth in scores.depths)
        share = 100 * rate / trials
        yield Metric(f"passkeys in {scores.target:,}", share, data, "accuracy", "%", binary=True, samples=samples)
    yield Metric(f"k_max of {scores.target:,}", scores.k_max, data, "k_max", "tokens")


@metrics_of.register
def _passkey_map(scores: results.PasskeyMap) -> Iterator[Metric]:
    for length in scores.lengths:
        yield from metrics_of(length)


@metrics_of.register
def _benchmarks(scores: results.BenchmarkScores) -> Iterator[Metric]:
    for task, score in scores.tasks.items():
        if score.acc is not None:
            error = None if score.stderr is None else 100 * score.stderr
            samples = {str(example): Sample(float(value == 1)) for example, value in enumerate(score.outcomes or ())}
            yield Metric(task, 100 * score.acc, task, "accuracy", "%", stderr=error, binary=True, samples=samples)
        for name, value in (score.metrics or {}).items():
            lower = name.endswith(("perplexity", "bits_per_byte"))
            yield Metric(f"{task} {name}", value, task, name, higher_is_better=not lower)


@metrics_of.register
def _ruler(scores: results.RulerScores) -> Iterator[Metric]:
    for length in scores.lengths:
        yield Metric(
            f"RULER at {length.window:,}, {len(length.tasks)} tasks",
            100 * length.score,
            f"RULER, {len(length.tasks)} tasks at {length.window} tokens",
            "score",
            "%",
            stderr=100 * length.stderr if length.stderr else None,  # 0 if all outcomes are the same: not known
            window=length.window,
            samples={
                f"seed {scores.seed}, {name} in {task.length} tokens, {prompt}": Sample(value, group=name)
                for name, task in length.tasks.items()
                for prompt, value in enumerate(task.outcomes or ())
            },
        )
    effective = {f"{PAPERS_THRESHOLD:.1%}": scores.effective_length}
    if scores.relative is not None:
        effective[f"{SHARE_OF_BASE:.0%} of the base"] = scores.relative.effective_length
    for threshold, tokens in effective.items():
        yield Metric(f"effective length, {threshold}", tokens, "RULER", "effective length", "tokens")


@metrics_of.register
def _summarization(scores: results.SummarizationScores) -> Iterator[Metric]:
    data = scores.data if isinstance(scores.data, str) else str(scores.data.get("name", ""))
    for name in ("rouge1", "rouge2", "rougeL"):
        low, high = (scores.intervals or {}).get(name, (None, None))
        error = None if low is None or high is None else (high - low) / (2 * NORMAL_95)
        yield Metric(name, getattr(scores, name), data, name, "%", stderr=error)

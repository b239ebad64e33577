"""Short-context benchmarks as a measurement: scores and metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

from pi_lora.evaluation.benchmarks.scores import TITLES, BenchmarkScores, check_packages
from pi_lora.evaluation.journal import Session
from pi_lora.evaluation.measurement import Measurement
from pi_lora.evaluation.metrics import Metric, Value, share_of_samples
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import BenchmarksOptions


class Benchmarks(Measurement[BenchmarksOptions, BenchmarkScores]):
    """Short-context benchmarks (paper, table 5) through lm-eval."""

    name = "benchmarks"
    options = BenchmarksOptions
    scores = BenchmarkScores

    def prepare(self, options: BenchmarksOptions, models: Sequence[Model]) -> BenchmarksOptions:
        """Read the examples of the tasks."""
        check_packages("benchmarks", "lm_eval")
        from pi_lora.evaluation.benchmarks.tasks import find_tasks

        find_tasks(options)
        return options

    def run(self, model: Model, options: BenchmarksOptions, session: Session) -> BenchmarkScores:
        """Measure a model."""
        from pi_lora.evaluation.benchmarks.measure import evaluate_benchmarks

        return evaluate_benchmarks(model, options, session)

    def metrics(self, scores: BenchmarkScores) -> list[Metric]:
        """Return the accuracy of each task, or what lm-eval reports for it instead."""
        metrics = []
        for task, score in scores.tasks.items():
            label = f"{TITLES.get(task, task)} ({score.shots or 0}-shot)"
            if score.acc is not None:
                values = [Value(f"{task} {number}", value) for number, value in enumerate(score.outcomes or ())]
                hub: dict[str, Any] = {"dataset": task, "hub_name": "accuracy"}
                metrics.append(share_of_samples(label, score.acc, score.examples, values=values, **hub))
            for name, value in (score.metrics or {}).items():
                if "_stderr" not in name:
                    lower = name.endswith(("perplexity", "bits_per_byte"))
                    others: dict[str, Any] = {"digits": 3, "dataset": task, "hub_name": name}
                    metrics.append(Metric(f"{label} {name}", value, higher_is_better=not lower, **others))
        return metrics

    def about(self, scores: Sequence[BenchmarkScores]) -> str:
        """Return the limits of inputs and examples, and the version of lm-eval."""
        windows = "/".join(dict.fromkeys(str(each.window) for each in scores))
        limit = scores[0].options.limit if scores[0].options else None
        examples = f", the first {limit} examples" if limit else ""
        return f"accuracy{examples}, inputs cut to {windows} tokens, lm-eval {scores[0].lm_eval}"

    def draw(self, axes: Any, scores: Mapping[str, BenchmarkScores]) -> None:
        """Draw nothing: tasks do not form a curve."""

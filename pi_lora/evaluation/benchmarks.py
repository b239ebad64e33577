"""Short-context benchmarks (paper.tex, table 5) at a model's original window, with lm-eval's prompts, truncation and
metrics.
"""

from collections.abc import Sequence

from pi_lora.evaluation.forward import described
from pi_lora.evaluation.measurement import Measurement, Metric, Result, Scores, Session, Value, share
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import BenchmarksOptions
from pi_lora.types import Json


class TaskScore(Result):
    """Accuracy of a task with the `outcomes` of its examples, 1 or 0 (`stderr` is None for one example); or the
    `metrics` that lm-eval reports for a task without accuracy.
    """

    acc: float | None = None
    stderr: float | None = None
    examples: int = 0
    shots: int | None = None
    outcomes: list[float] | None = None
    metrics: dict[str, float] | None = None


class BenchmarkScores(Scores):
    """Short-context benchmarks by task, as lm-eval scores them."""

    measurement = "benchmarks"

    options: BenchmarksOptions
    lm_eval: str | None = None
    tasks: dict[str, TaskScore]


class Benchmarks(Measurement[BenchmarksOptions, BenchmarkScores]):
    """Short-context benchmarks (paper, table 5) through lm-eval."""

    scores = BenchmarkScores

    def prepare(self, options: BenchmarksOptions, models: Sequence[Model]) -> BenchmarksOptions:
        """Read the examples of the tasks."""
        from pi_lora.evaluation.harness import find_benchmarks

        find_benchmarks(options)
        return options

    def run(self, model: Model, options: BenchmarksOptions, session: Session) -> BenchmarkScores:
        """Measure every task with inputs cut to a window, by default the original one; lm-eval divides the examples
        among the processes. Raise Interrupted on Ctrl-C.
        """
        from pi_lora.evaluation.harness import VERSION, RankedLM, find_benchmarks

        window = options.window or model.original
        options = options.changed(window=window)
        lm = RankedLM(model, window, options.batch_size, options, session)
        tasks = {}
        for name, task in find_benchmarks(options).items():
            found = lm.evaluate(name, task, options.limit)
            numbers = {key.removesuffix(",none"): float(x) for key, x in found.items() if "," in key and x != "N/A"}
            measured: Json = {"metrics": numbers}
            if "acc" in numbers:
                outcomes = [float(sample["acc"]) for sample in found["samples"]]
                measured = {"acc": numbers["acc"], "stderr": numbers.get("acc_stderr"), "outcomes": outcomes}
            tasks[name] = TaskScore(examples=found["sample_len"], shots=found["shots"], **measured)
        return BenchmarkScores(**described(model) | {"window": window}, options=options, lm_eval=VERSION, tasks=tasks)

    def metrics(self, scores: BenchmarkScores) -> list[Metric]:
        """Return the accuracy of each task, or what lm-eval reports for it instead."""
        metrics = []
        for task, score in scores.tasks.items():
            label = f"{task} ({score.shots or 0}-shot)"
            if score.acc is not None:
                values = [Value(f"{task} {number}", value) for number, value in enumerate(score.outcomes or ())]
                hub: Json = {"dataset": task, "hub_name": "accuracy"}
                metrics.append(share(label, score.acc, score.examples, values=values, **hub))
            for name, value in (score.metrics or {}).items():
                if "_stderr" not in name:
                    higher = not name.endswith(("perplexity", "bits_per_byte"))
                    hub = {"dataset": task, "hub_name": name}
                    metrics.append(Metric(f"{label} {name}", value, higher_is_better=higher, digits=3, **hub))
        return metrics

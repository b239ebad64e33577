"""Short-context benchmarks (paper.tex, table 5) at a model's original window, with lm-eval's prompts, truncation and
metrics.
"""

from collections.abc import Sequence

from pi_lora.evaluation.measurement import Measurement, Metric, Result, Scores, Session, Value, proportion
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import BenchmarksOptions
from pi_lora.types import Json


class TaskScore(Result):
    """Accuracy of a task with the `outcomes` of its examples, 1 or 0; `stderr` is None for one example."""

    acc: float
    stderr: float | None = None
    examples: int = 0
    shots: int | None = None
    outcomes: list[float] | None = None


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
        """Fill in the window: the shortest original one."""
        return options.changed(window=options.window or min(model.original for model in models))

    def check(self, options: BenchmarksOptions) -> None:
        """Read the examples of the tasks."""
        from pi_lora.evaluation.harness import find_benchmarks

        find_benchmarks(options)

    def measure(self, model: Model, options: BenchmarksOptions, session: Session) -> Json:
        """Measure every task with inputs cut to the window; lm-eval divides the examples among the processes. Raise
        Interrupted on Ctrl-C.
        """
        from pi_lora.evaluation.harness import VERSION, RankedLM, find_benchmarks

        lm = RankedLM(model, options.window or model.original, options.batch_size, options, session)
        tasks = {}
        for name, task in find_benchmarks(options).items():
            result = lm.evaluate(name, task, options.limit)
            stderr = result["acc_stderr,none"]
            tasks[name] = TaskScore(
                acc=result["acc,none"],
                stderr=None if stderr == "N/A" else stderr,
                examples=result["sample_len"],
                shots=result["shots"],
                outcomes=[float(sample["acc"]) for sample in result["samples"]],
            )
        return {"window": options.window, "lm_eval": VERSION, "tasks": tasks}

    def metrics(self, scores: BenchmarkScores) -> list[Metric]:
        """Return the accuracy of each task."""
        metrics = []
        for task, score in scores.tasks.items():
            label = f"{task} ({score.shots or 0}-shot)"
            values = [Value(f"{task} {number}", value) for number, value in enumerate(score.outcomes or ())]
            metrics.append(
                proportion(label, score.acc, score.examples, values=values, dataset=task, hub_name="accuracy")
            )
        return metrics

"""Short-context benchmarks (paper.tex, table 5) at the original window of a model, with the prompts, truncation and
metrics of lm-eval.
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from pi_lora.evaluation.measurement import (
    Measurement,
    Metric,
    Preview,
    Result,
    Scores,
    Session,
    Value,
    header_of,
    proportion,
)
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.source import ModelSource
from pi_lora.recipe.evaluation import BenchmarksOptions
from pi_lora.storage import digest_of


class TaskScore(Result):
    """Accuracy of a task with the `outcomes` of its examples, 1 or 0, and a digest of the prompts; `stderr` is None for
    one example.
    """

    acc: float
    stderr: float | None = None
    examples: int = 0
    shots: int | None = None
    outcomes: list[float] | None = None
    prompts: str = ""


class BenchmarkScores(Scores):
    """Short-context benchmarks by task, as lm-eval scores them."""

    measurement = "benchmarks"

    options: BenchmarksOptions
    lm_eval: str | None = None
    tasks: dict[str, TaskScore]


class Benchmarks(Measurement[BenchmarksOptions, BenchmarkScores]):
    """Short-context benchmarks (paper, table 5) through lm-eval."""

    options = BenchmarksOptions
    scores = BenchmarkScores

    def prepare(self, options: BenchmarksOptions, models: Sequence[ModelSource]) -> BenchmarksOptions:
        """Fill in the window: the shortest original window of the models."""
        window = options.window or min(model.original for model in models)
        return options.changed(window=window)

    def problems(self, options: BenchmarksOptions, preview: Preview) -> Iterator[str]:
        """Yield the files of examples that are missing, and where lm-eval is here, the tasks that do not exist."""
        for task, file in options.files.items():
            if not Path(file).expanduser().is_file():
                yield f"{preview.key('data')}: {task}: {file}: no such file; correct the name"
        if find_spec("lm_eval"):
            from pi_lora.evaluation.harness import unknown_benchmarks

            for name in unknown_benchmarks(options.tasks):
                yield f"{preview.key('tasks')}: {name}: no such task of lm-eval; correct the name"

    def check(self, options: BenchmarksOptions) -> None:
        """Read the examples of the tasks."""
        from pi_lora.evaluation.harness import find_benchmarks

        find_benchmarks(options)

    def measure(self, model: LoadedModel, options: BenchmarksOptions, session: Session) -> BenchmarkScores:
        """Measure every task with inputs truncated to the window; lm-eval divides the examples among the processes.
        Raise Interrupted on Ctrl-C.
        """
        from pi_lora.evaluation.harness import VERSION, RankedLM, find_benchmarks

        window = options.window or model.source.original
        lm = RankedLM(model, window=window, batch_size=options.batch_size, options=options, session=session)
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
                prompts=digest_of([sample["prompt_hash"] for sample in result["samples"]]),
            )
        return BenchmarkScores(**header_of(model, window), options=options, lm_eval=VERSION, tasks=tasks)

    def metrics(self, scores: BenchmarkScores) -> Iterator[Metric]:
        """Yield the accuracy of each task."""
        for task, score in scores.tasks.items():
            outcomes = enumerate(score.outcomes or ())
            values = [Value(f"{task}{score.prompts} {number}", outcome) for number, outcome in outcomes]
            yield proportion(
                label=f"{task} ({score.shots or 0}-shot)",
                mean=score.acc,
                samples=score.examples,
                values=values,
                dataset=task,
                hub_name="accuracy",
            )

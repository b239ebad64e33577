"""Scores of short-context benchmarks."""

import importlib.util

from pi_lora.errors import PiLoraError
from pi_lora.evaluation.measurement import Result, Scores
from pi_lora.recipe.evaluation import BenchmarksOptions

TITLES = {"boolq": "BoolQ", "piqa": "PIQA", "race_middle": "RACE-M", "race_high": "RACE-H", "winogrande": "WinoGrande"}


class TaskScore(Result):
    """Accuracy of a task with the `outcomes` of its examples, 1 or 0 (`stderr` is None for one example); or the
    `metrics` that lm-eval reports for a task without accuracy.
    """

    acc: float | None = None
    stderr: float | None = None
    acc_norm: float | None = None
    examples: int = 0
    shots: int | None = None
    outcomes: list[float] | None = None
    metrics: dict[str, float] | None = None


class BenchmarkScores(Scores):
    """Short-context benchmarks by task, as lm-eval scores them."""

    measurement = "benchmarks"

    options: BenchmarksOptions | None = None
    lm_eval: str | None = None
    tasks: dict[str, TaskScore]


def check_packages(command: str, *packages: str) -> None:
    """Raise PiLoraError unless the packages that `pi-lora eval COMMAND` needs are installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise PiLoraError(f"pi-lora eval {command}: needs the package {package}; pip install 'pi-lora[eval]'")

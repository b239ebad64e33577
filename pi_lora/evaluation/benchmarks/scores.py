"""Scores of short-context benchmarks."""

import importlib.util

from pi_lora.errors import PiLoraError
from pi_lora.evaluation.measurement import Result, Scores
from pi_lora.recipe.evaluation import BenchmarksOptions


def check_has_lm_eval(name: str) -> None:
    """Raise PiLoraError unless the packages of the measurement `name` are installed."""
    for package in ("lm_eval", *(("nltk", "wonderwords") if name == "ruler" else ())):
        if importlib.util.find_spec(package) is None:
            raise PiLoraError(f"pi-lora eval {name}: needs the package {package}; pip install 'pi-lora[eval]'")


TITLES = {"boolq": "BoolQ", "piqa": "PIQA", "race_middle": "RACE-M", "race_high": "RACE-H", "winogrande": "WinoGrande"}


class TaskScore(Result):
    """Accuracy over `examples` (`stderr` None for one) and of each, or the `metrics` that lm-eval reports of others."""

    acc: float | None = None
    stderr: float | None = None
    examples: int = 0
    shots: int | None = None
    truncated_inputs: int | None = None
    acc_norm: float | None = None
    outcomes: list[float] | None = None
    metrics: dict[str, float] | None = None


class BenchmarkScores(Scores):
    """Short-context benchmarks by task, as lm-eval scores them."""

    measurement = "benchmarks"

    options: BenchmarksOptions | None = None
    metric: str | None = None
    lm_eval: str | None = None
    data: dict[str, str] | None = None
    tasks: dict[str, TaskScore]

"""What the `evaluation` section of a recipe asks for: each measurement, how it is made, and its table."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from pi_lora.data.sources import Choice
from pi_lora.errors import ModelError, PiLoraError
from pi_lora.evaluation import results
from pi_lora.evaluation.benchmarks.table import benchmarks_table
from pi_lora.evaluation.passkey.measure import evaluate_passkey, evaluate_passkey_map
from pi_lora.evaluation.passkey.prompt import Grid
from pi_lora.evaluation.passkey.table import passkey_table
from pi_lora.evaluation.perplexity.measure import evaluate_perplexity
from pi_lora.evaluation.perplexity.table import perplexity_table
from pi_lora.evaluation.results import Scores, options_of
from pi_lora.evaluation.ruler.table import ruler_table
from pi_lora.models.model import Model
from pi_lora.recipe import evaluation as schema
from pi_lora.recipe.evaluation import Evaluation
from pi_lora.recipe.files import RECIPE_FILE
from pi_lora.run import Run
from pi_lora.types import Progress, silent

Measure = Callable[[Model, Progress], Scores]


def _perplexity(asked: schema.PerplexityOptions) -> Measure:
    choice = Choice(asked.documents, asked.min_tokens, asked.truncate, asked.seed, asked.split, asked.column)
    return lambda loaded, progress: evaluate_perplexity(
        loaded, asked.data, asked.windows, asked.stride, choice, progress, by_position=asked.by_position, shared=True
    )


def _passkey(asked: schema.PasskeyOptions) -> Measure:
    def grid(target: int) -> Grid:
        return Grid(target, asked.depths, asked.trials, asked.seed)

    if targets := asked.targets:
        return lambda loaded, progress: evaluate_passkey_map(loaded, list(map(grid, targets)), progress, shared=True)
    return lambda loaded, progress: evaluate_passkey(
        loaded, grid(asked.target or loaded.window), progress, k_max_only=asked.k_max_only, shared=True
    )


def check_has_lm_eval(name: str) -> None:
    """Raise PiLoraError unless the packages of the measurement `name` are installed."""
    for package in ("lm_eval", *(("nltk", "wonderwords") if name == "ruler" else ())):
        if importlib.util.find_spec(package) is None:
            raise PiLoraError(f"pi-lora eval {name}: needs the package {package}; pip install 'pi-lora[eval]'")


def _benchmarks(asked: schema.BenchmarksOptions) -> Measure:
    check_has_lm_eval("benchmarks")
    # Imported here: it is an extra of this package, and takes seconds.
    from pi_lora.evaluation.benchmarks.measure import evaluate_benchmarks
    from pi_lora.evaluation.benchmarks.tasks import prepare

    prepared = prepare(asked)
    return lambda loaded, progress: evaluate_benchmarks(loaded, asked, prepared, progress)


def _ruler(asked: schema.RulerOptions) -> Measure:
    check_has_lm_eval("ruler")
    from pi_lora.evaluation.ruler.measure import evaluate_ruler
    from pi_lora.evaluation.ruler.prompts import TASKS, unavailable

    left_out = unavailable(asked.tasks or TASKS)
    return lambda loaded, progress: evaluate_ruler(loaded, asked, left_out, progress)


@dataclass(frozen=True)
class Measurement:
    """A measurement: the `kind` of its results, and what prepares a recipe's section before any model is loaded."""

    kind: type[Scores]
    prepare: Callable[[Any], Measure]
    table: Callable[..., Table]


# Named as the sections of a recipe's `evaluation` and the files in a run's scores; the paper's are first, in its order.
MEASUREMENTS: Mapping[str, Measurement] = {
    "perplexity": Measurement(results.PerplexityScores, _perplexity, perplexity_table),
    "passkey": Measurement(results.PasskeyScores, _passkey, passkey_table),
    "benchmarks": Measurement(results.BenchmarkScores, _benchmarks, benchmarks_table),
    "ruler": Measurement(results.RulerScores, _ruler, ruler_table),
}


def alike(scores: Scores) -> Measure:
    """Return what measures another model as a result was made, in a share of the work for each process."""
    asked = {key: value for key, value in options_of(scores).items() if value is not None}
    match scores:
        case results.PerplexityScores():
            return _perplexity(schema.PerplexityOptions.model_validate(asked))
        case results.PasskeyScores():
            return _passkey(schema.PasskeyOptions.model_validate(asked))
        case results.BenchmarkScores():
            return _benchmarks(schema.BenchmarksOptions.model_validate(asked))
        case results.RulerScores():
            return _ruler(schema.RulerOptions.model_validate(asked))
    raise TypeError(type(scores).__name__)


def asked_for(evaluation: Evaluation) -> dict[str, Any]:
    """Return the sections of `evaluation` by measurement, of those that it asks for."""
    return {name: section for name in MEASUREMENTS if (section := getattr(evaluation, name))}


def evaluation_of(run: Path) -> tuple[Evaluation, bool]:
    """Return what a run's recipe asks for, and whether it names anything; perplexity and passkey if it does not."""
    if not Run(run).has_recipe:
        raise ModelError(f"{run}: holds no {RECIPE_FILE}; name a run folder that pi-lora train made")
    evaluation = Run(run).recipe.evaluation
    if asked_for(evaluation):
        return evaluation, True
    return Evaluation(perplexity=schema.PerplexityOptions(), passkey=schema.PasskeyOptions()), False


def measure(loaded: Model, evaluation: Evaluation, progress: Progress = silent) -> dict[str, Scores]:
    """Measure a model that trains, as `evaluation` says in short. `progress` is called after each document or prompt;
    what it raises ends the measuring.
    """
    asked = asked_for(evaluation.in_short())
    return {name: MEASUREMENTS[name].prepare(section)(loaded, progress) for name, section in asked.items()}

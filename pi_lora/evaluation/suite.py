"""What the `evaluation` section of a recipe asks for: each measurement, how it is made, and its table."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from pi_lora.data.sources import Choice
from pi_lora.errors import ModelError, PiLoraError
from pi_lora.evaluation.benchmarks.table import benchmarks_table
from pi_lora.evaluation.passkey.measure import evaluate_passkey
from pi_lora.evaluation.passkey.prompt import Grid
from pi_lora.evaluation.passkey.table import passkey_table
from pi_lora.evaluation.perplexity.measure import evaluate_perplexity
from pi_lora.evaluation.perplexity.table import perplexity_table
from pi_lora.evaluation.results import BenchmarkScores, PasskeyScores, PerplexityScores, Scores
from pi_lora.models.load import LoadedModel
from pi_lora.recipe.files import RECIPE_FILE, load_recipe
from pi_lora.recipe.schema import BenchmarksEvaluation, Evaluation, PasskeyEvaluation, PerplexityEvaluation
from pi_lora.types import Progress, silent

Measure = Callable[[LoadedModel, Progress], Scores]


def _perplexity(asked: PerplexityEvaluation) -> Measure:
    choice = Choice(asked.documents, truncate=asked.truncate)
    return lambda loaded, progress: evaluate_perplexity(
        loaded, asked.data, asked.windows, asked.stride, choice, progress, shared=True
    )


def _passkey(asked: PasskeyEvaluation) -> Measure:
    return lambda loaded, progress: evaluate_passkey(
        loaded, Grid(asked.target or loaded.window, asked.depths, asked.trials, asked.seed), progress, shared=True
    )


def _benchmarks(asked: BenchmarksEvaluation) -> Measure:
    if importlib.util.find_spec("lm_eval") is None:
        raise PiLoraError("pi-lora eval benchmarks: needs the package lm_eval; pip install 'pi-lora[eval]'")
    # Imported here: it is an extra of this package, and takes seconds.
    from pi_lora.evaluation.benchmarks.measure import evaluate_benchmarks, prepare

    prepared = prepare(asked.tasks, asked.data)
    return lambda loaded, progress: evaluate_benchmarks(
        loaded, prepared, asked.limit, asked.batch_size, asked.window, progress
    )


@dataclass(frozen=True)
class Measurement:
    """A measurement and the `kind` of its results: `prepare` reads what a recipe's section needs before any model is
    loaded. Each process measures its part.
    """

    kind: type[Scores]
    prepare: Callable[[Any], Measure]
    table: Callable[..., Table]


# In the order of the paper, named as the sections of a recipe's `evaluation` and the files in a run's scores.
MEASUREMENTS: Mapping[str, Measurement] = {
    "perplexity": Measurement(PerplexityScores, _perplexity, perplexity_table),
    "passkey": Measurement(PasskeyScores, _passkey, passkey_table),
    "benchmarks": Measurement(BenchmarkScores, _benchmarks, benchmarks_table),
}


def asked_for(evaluation: Evaluation) -> dict[str, Any]:
    """Return the sections of `evaluation` by measurement, of those that it asks for."""
    return {name: section for name in MEASUREMENTS if (section := getattr(evaluation, name))}


def evaluation_of(run: Path) -> tuple[Evaluation, bool]:
    """Return what a run's recipe asks for, and whether it names anything; perplexity and passkey if it does not."""
    file = run / RECIPE_FILE
    if not file.is_file():
        raise ModelError(f"{run}: holds no {RECIPE_FILE}; name a run folder that pi-lora train made")
    evaluation = load_recipe(file).recipe.evaluation
    if asked_for(evaluation):
        return evaluation, True
    return Evaluation(perplexity=PerplexityEvaluation(), passkey=PasskeyEvaluation()), False


def measure(loaded: LoadedModel, evaluation: Evaluation) -> dict[str, Scores]:
    """Measure a model that trains, as `evaluation` says in short."""
    asked = asked_for(evaluation.in_short())
    return {name: MEASUREMENTS[name].prepare(section)(loaded, silent) for name, section in asked.items()}

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
from pi_lora.evaluation.results import BenchmarkScores, PasskeyScores, PerplexityScores, RulerScores, Scores
from pi_lora.evaluation.ruler.table import ruler_table
from pi_lora.models.load import LoadedModel
from pi_lora.recipe.files import RECIPE_FILE, load_recipe
from pi_lora.recipe.schema import (
    BenchmarksEvaluation,
    Evaluation,
    PasskeyEvaluation,
    PerplexityEvaluation,
    RulerEvaluation,
)
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


def check_has_lm_eval(name: str) -> None:
    """Raise PiLoraError unless the packages of the measurement `name` are installed."""
    for package in ("lm_eval", *(("nltk", "wonderwords") if name == "ruler" else ())):
        if importlib.util.find_spec(package) is None:
            raise PiLoraError(f"pi-lora eval {name}: needs the package {package}; pip install 'pi-lora[eval]'")


def _benchmarks(asked: BenchmarksEvaluation) -> Measure:
    check_has_lm_eval("benchmarks")
    # Imported here: it is an extra of this package, and takes seconds.
    from pi_lora.evaluation.benchmarks.measure import evaluate_benchmarks, prepare

    prepared = prepare(asked.tasks, asked.data)
    return lambda loaded, progress: evaluate_benchmarks(
        loaded, prepared, asked.limit, asked.batch_size, asked.window, progress
    )


def _ruler(asked: RulerEvaluation) -> Measure:
    check_has_lm_eval("ruler")
    from pi_lora.evaluation.ruler.measure import evaluate_ruler
    from pi_lora.evaluation.ruler.prompts import TASKS, find_texts

    texts = find_texts(asked.tasks or TASKS, Path(asked.haystack) if asked.haystack else None, asked.data)
    return lambda loaded, progress: evaluate_ruler(
        loaded, texts, asked.windows, asked.samples, asked.seed, asked.batch_size, asked.chat_template, progress
    )


@dataclass(frozen=True)
class Measurement:
    """A measurement and the `kind` of its results: `prepare` reads what a recipe's section needs before any model is
    loaded. Each process measures its part.
    """

    kind: type[Scores]
    prepare: Callable[[Any], Measure]
    table: Callable[..., Table]


# Named as the sections of a recipe's `evaluation` and the files in a run's scores; the paper's are first, in its order.
MEASUREMENTS: Mapping[str, Measurement] = {
    "perplexity": Measurement(PerplexityScores, _perplexity, perplexity_table),
    "passkey": Measurement(PasskeyScores, _passkey, passkey_table),
    "benchmarks": Measurement(BenchmarkScores, _benchmarks, benchmarks_table),
    "ruler": Measurement(RulerScores, _ruler, ruler_table),
}


def alike(scores: Scores) -> Measure:
    """Return what measures another model as a result was made, in a share of the work for each process."""
    match scores:
        case PerplexityScores():
            windows, choice = [row.window for row in scores.windows], (scores.documents, scores.min_tokens)
            chosen = Choice(*choice, scores.truncate, scores.seed)
            return lambda loaded, progress: evaluate_perplexity(
                loaded, scores.data, windows, scores.stride, chosen, progress, shared=True
            )
        case PasskeyScores():
            trials = max((depth.trials for depth in scores.depths), default=1)
            grid = Grid(scores.target, len(scores.depths), trials, scores.seed)
            return lambda loaded, progress: evaluate_passkey(loaded, grid, progress, shared=True)
        case BenchmarkScores():
            data = tuple(f"{name}={place}" for name, place in (scores.data or {}).items() if Path(place).exists())
            settings: dict[str, Any] = {"limit": scores.limit, "batch_size": scores.batch_size or 8}
            asked = BenchmarksEvaluation(tasks=tuple(scores.tasks), data=data, window=scores.window, **settings)
            return _benchmarks(asked)
        case RulerScores():
            files = {key: name for key, name in (scores.data or {}).items() if Path(name).is_file()}
            settings = {key: getattr(scores, key) for key in ("seed", "samples", "batch_size", "chat_template")}
            settings |= {"haystack": files.pop("essays", None), "tasks": tuple(scores.lengths[0].tasks)}
            data = tuple(f"{key}={name}" for key, name in files.items())
            return _ruler(RulerEvaluation(windows=tuple(each.window for each in scores.lengths), data=data, **settings))
    raise TypeError(type(scores).__name__)


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

"""What the `evaluation` section of a recipe asks for."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from pi_lora.errors import ModelError
from pi_lora.evaluation.benchmarks.measure import Prepared, evaluate_benchmarks, prepare
from pi_lora.evaluation.passkey.measure import evaluate_passkey
from pi_lora.evaluation.perplexity.measure import default_stride, default_windows, evaluate_perplexity
from pi_lora.models.load import LoadedModel
from pi_lora.recipe.files import RECIPE_FILE, load_recipe
from pi_lora.recipe.schema import BenchmarksEvaluation, Evaluation, PasskeyEvaluation, PerplexityEvaluation
from pi_lora.types import Json, Progress

# A model, and what moves a progress bar as the measurement does.
Measurement = Callable[[LoadedModel, Callable[..., None] | None], Json]


def measure(loaded: LoadedModel, evaluation: Evaluation) -> dict[str, Json]:
    """Perplexity and passkey, as far as `evaluation` asks for them, of a model that trains.

    Every process measures the whole, since a sharded model needs them all.
    """
    scores: dict[str, Json] = {}
    if wanted := evaluation.perplexity:
        scores["perplexity"] = _perplexity(wanted, False, loaded, None)
    if passkey := evaluation.passkey:
        scores["passkey"] = _passkey(passkey, False, loaded, None)
    return scores


def evaluation_of(run: Path) -> tuple[Evaluation, bool]:
    """What the recipe of a finished run asks for, and whether it names anything; perplexity and passkey if it does not.

    Raises:
        ModelError: it is no run folder.
    """
    file = run / RECIPE_FILE
    if not file.is_file():
        raise ModelError(f"{run}: holds no {RECIPE_FILE}; name a run folder that pi-lora train made")
    asked = load_recipe(file).recipe.evaluation
    if asked.perplexity or asked.passkey or asked.benchmarks:
        return asked, True
    return Evaluation(perplexity=PerplexityEvaluation(), passkey=PasskeyEvaluation()), False


def names_in(evaluation: Evaluation) -> list[str]:
    """What `evaluation` asks for, in the order of the paper."""
    asked = {
        "perplexity": evaluation.perplexity,
        "passkey": evaluation.passkey,
        "benchmarks": evaluation.benchmarks,
    }
    return [name for name, section in asked.items() if section]


def measurements(evaluation: Evaluation, names: list[str]) -> dict[str, Measurement]:
    """How to measure each of `names` on a loaded run; the examples of benchmarks are read here, before any model is.

    Each process measures its part, and what is found is kept until all of it is.

    Raises:
        DataError: as `prepare`.
    """
    found: dict[str, Measurement] = {}
    if "perplexity" in names and evaluation.perplexity:
        found["perplexity"] = partial(_perplexity, evaluation.perplexity, True)
    if "passkey" in names and evaluation.passkey:
        found["passkey"] = partial(_passkey, evaluation.passkey, True)
    if "benchmarks" in names and (wanted := evaluation.benchmarks):
        found["benchmarks"] = partial(_benchmarks, wanted, prepare(wanted.tasks, wanted.data))
    return found


def _perplexity(wanted: PerplexityEvaluation, shared: bool, loaded: LoadedModel, progress: Progress | None) -> Json:
    windows = list(wanted.windows or default_windows(loaded.window))
    stride = wanted.stride or default_stride(windows)
    return evaluate_perplexity(loaded, wanted.data, windows, stride, wanted.documents, progress, shared=shared)


def _passkey(wanted: PasskeyEvaluation, shared: bool, loaded: LoadedModel, progress: Progress | None) -> Json:
    target = wanted.target or loaded.window
    return evaluate_passkey(loaded, target, wanted.depths, wanted.trials, wanted.seed, progress, shared=shared)


def _benchmarks(
    wanted: BenchmarksEvaluation, prepared: list[Prepared], loaded: LoadedModel, progress: Callable[..., None] | None
) -> Json:
    return evaluate_benchmarks(loaded, prepared, wanted.limit, wanted.batch_size, wanted.window, progress)

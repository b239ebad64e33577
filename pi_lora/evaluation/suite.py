"""Models measured as a command or the `evaluation` section of a recipe asks, and their scores written and drawn."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pi_lora.distributed import is_leader
from pi_lora.drawing import figure_of, save
from pi_lora.errors import ModelError
from pi_lora.evaluation.journal import Session
from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.registry import MEASUREMENTS, read_scores, write_scores
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import Evaluation, PasskeyOptions, PerplexityOptions
from pi_lora.recipe.files import RECIPE_FILE
from pi_lora.recipe.section import Section
from pi_lora.run import Run
from pi_lora.types import Progress, silent
from pi_lora.writing import check_can_write

# Options by measurement.
Asked = Mapping[str, Section]
NO_FILES: Mapping[str, Path] = MappingProxyType({})


def _no_progress(title: str) -> AbstractContextManager[Progress]:
    return nullcontext(silent)


@dataclass(frozen=True)
class Display:
    """What a user sees while models are measured: lines, what is worked on, and progress; by default nothing."""

    say: Callable[[str], object] = str
    working: Callable[[str], AbstractContextManager[Any]] = nullcontext
    progress: Callable[[str], AbstractContextManager[Progress]] = _no_progress


SILENT = Display()


def evaluate(
    models: Sequence[Model],
    asked: Asked,
    files: Mapping[str, Path] = NO_FILES,
    *,
    plot: Path | None = None,
    beside: Sequence[Model] = (),
    dtype: str | None = None,
    display: Display = SILENT,
) -> dict[str, list[Scores]]:
    """Return the scores of models by measurement, written into `files` by measurement as soon as all models have them.

    Defaults of the options are the same for all models and those `beside` them. Raise PiLoraError for what shows before
    weights are read, such as a file that cannot be written. What was measured is kept until it is written.
    """
    check_can_write(plot, *files.values())
    with display.working("preparing the measurements"):
        prepared = {name: MEASUREMENTS[name].prepare(options, [*models, *beside]) for name, options in asked.items()}

    def load(model: Model) -> Model:
        if model.model is not None:
            return model
        with display.working(f"loading {model.name}"):
            return model.load(dtype)

    if len(models) == 1:
        models = [load(models[0])]
    scores: dict[str, list[Scores]] = {}
    for name, options in prepared.items():
        measurement = MEASUREMENTS[name]
        with Session(say=display.say, shared=True) as session:
            found: list[Scores] = []
            for model in models:
                loaded = load(model)
                with display.progress(f"{name} {model.name}") as session.progress:
                    found.append(measurement.run(loaded, options, session))
                if options.longest and options.longest > model.window:
                    display.say(f"{model.name}: covers {model.window} tokens; measured with {options.longest} anyway")
                del loaded  # before the next one is read
            scores[name] = found
            if is_leader() and name in files:
                write_scores(scores[name], files[name])
            if is_leader() and plot:
                draw(scores[name], plot)
    return scores


def evaluate_run(
    run: Path, find: Callable[[str], Model], *, again: bool = False, dtype: str | None = None, display: Display = SILENT
) -> dict[str, Scores]:
    """Return the scores of a run in what its recipe names; what is kept in its folder is measured only `again`."""
    asked = asked_of(run)
    files = {name: Run(run).scores_file(name) for name in asked}
    kept: dict[str, Scores] = {}
    for name, file in files.items():
        if file.is_file() and not again:
            display.say(f"{file}: measured before; measure again with --again")
            scores = read_scores(file)
            if scores is None or scores.measurement != name:
                raise ModelError(f"{file}: holds no scores of {name}; measure again with --again")
            kept[name] = scores
    missing = {name: options for name, options in asked.items() if name not in kept}
    measured = evaluate([find(str(run))], missing, files, dtype=dtype, display=display) if missing else {}
    return {name: kept[name] if name in kept else measured[name][0] for name in asked}


def measure(loaded: Model, evaluation: Evaluation, progress: Progress = silent) -> dict[str, Scores]:
    """Measure a model that trains, as `evaluation` says in short. `progress` is called after each document or prompt;
    what it raises ends the measuring.
    """
    asked = asked_for(evaluation.in_short())
    with Session(progress, shared=True) as session:
        return {name: MEASUREMENTS[name].run(loaded, options, session) for name, options in asked.items()}


def asked_for(evaluation: Evaluation) -> dict[str, Any]:
    """Return the options by measurement, of those that a recipe asks for."""
    return {name: options for name in MEASUREMENTS if (options := getattr(evaluation, name))}


def asked_of(run: Path) -> dict[str, Any]:
    """Return the options by measurement that a run's recipe asks for; perplexity and passkey if it names none."""
    if not Run(run).has_recipe:
        raise ModelError(f"{run}: holds no {RECIPE_FILE}; name a run folder that pi-lora train made")
    return asked_for(Run(run).recipe.evaluation) or asked_for(
        Evaluation(perplexity=PerplexityOptions(), passkey=PasskeyOptions())
    )


def draw(scores: Sequence[Scores], file: Path) -> None:
    """Draw the scores of several models as a PNG."""
    by_model = {each.model: each for each in scores}
    save(figure_of(partial(MEASUREMENTS[scores[0].measurement].draw, scores=by_model)), file)

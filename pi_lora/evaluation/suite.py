"""Models measured as a command or the `evaluation` section of a recipe asks, and their scores written and drawn."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_lora.distributed import is_leader
from pi_lora.drawing import new_figure, plain, save
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
    name: str,
    models: Sequence[Model],
    options: Any,
    *,
    dtype: str | None = None,
    json: Path | None = None,
    plot: Path | None = None,
    display: Display = SILENT,
) -> list[Scores]:
    """Return the scores of several models that are measured alike, one after another, and write and draw them where
    asked. Where nothing can be written is known before; what was measured is kept until it is.
    """
    measurement = MEASUREMENTS[name]
    check_can_write(json, plot)
    with display.working(f"preparing {name}"):
        options = measurement.prepare(options, models)
    with Session(say=display.say, shared=True, dtype=dtype) as session:
        scores = [
            _run(name, _loaded(model, {name: options}, dtype, display), options, session, display) for model in models
        ]
        base = min(scores, key=lambda each: each.window or 0)
        scores = [measurement.relate(base, each) for each in scores]
        _warn_of_length(models, options, display)
        if is_leader() and json:
            write_scores(scores, json)
        if is_leader() and plot:
            draw(scores, plot)
    return scores


def measure_into(
    model: Model,
    asked: Asked,
    files: Mapping[str, Path],
    *,
    dtype: str | None = None,
    display: Display = SILENT,
) -> dict[str, Scores]:
    """Return the scores of a model by measurement, each of which is written as soon as it is known."""
    loaded, scores = _loaded(model, asked, dtype, display), {}
    for name, options in asked.items():
        with Session(say=display.say, shared=True, dtype=dtype) as session:
            scores[name] = _run(name, loaded, options, session, display)
            if is_leader() and name in files:
                write_scores(scores[name], files[name])
    return scores


def evaluate_run(
    run: Path, find: Callable[[str], Model], *, again: bool = False, dtype: str | None = None, display: Display = SILENT
) -> dict[str, Scores]:
    """Return the scores of a run in what its recipe names; what is kept in its folder is measured only `again`."""
    evaluation, named = evaluation_of(run)
    asked, folder = asked_for(evaluation), Run(run)
    files = {name: folder.scores_file(name) for name in asked}
    kept = {name: read_scores(file) for name, file in files.items() if file.is_file() and not again}
    for name, scores in kept.items():
        display.say(f"{files[name]}: measured before; measure again with --again")
        if scores is None or scores.measurement != name:
            raise ModelError(f"{files[name]}: holds no scores of {name}; measure again with --again")
    missing = {name: options for name, options in asked.items() if name not in kept}
    check_can_write(*(files[name] for name in missing))
    measured: dict[str, Scores] = {}
    if missing:
        model = find(str(run))
        if not named:
            display.say(f"{run}: its recipe names no measurements; perplexity and passkey with their defaults")
        measured = measure_into(model, prepared(missing, [model]), files, dtype=dtype, display=display)
    return {name: kept.get(name) or measured[name] for name in asked}


def measure(loaded: Model, evaluation: Evaluation, progress: Progress = silent) -> dict[str, Scores]:
    """Measure a model that trains, as `evaluation` says in short. `progress` is called after each document or prompt;
    what it raises ends the measuring.
    """
    asked = asked_for(evaluation.in_short())
    with Session(progress, shared=True) as session:
        return {name: MEASUREMENTS[name].run(loaded, options, session) for name, options in asked.items()}


def asked_for(evaluation: Evaluation) -> dict[str, Section]:
    """Return the options by measurement, of those that a recipe asks for."""
    return {name: options for name in MEASUREMENTS if (options := getattr(evaluation, name))}


def evaluation_of(run: Path) -> tuple[Evaluation, bool]:
    """Return what a run's recipe asks for, and whether it names anything; perplexity and passkey if it does not."""
    if not Run(run).has_recipe:
        raise ModelError(f"{run}: holds no {RECIPE_FILE}; name a run folder that pi-lora train made")
    evaluation = Run(run).recipe.evaluation
    if asked_for(evaluation):
        return evaluation, True
    return Evaluation(perplexity=PerplexityOptions(), passkey=PasskeyOptions()), False


def prepared(asked: Asked, models: Sequence[Model]) -> dict[str, Section]:
    """Return the options with defaults filled in, the same for all models; raise PiLoraError for what shows before
    weights are read.
    """
    return {name: MEASUREMENTS[name].prepare(options, models) for name, options in asked.items()}


def draw(scores: Sequence[Scores], file: Path) -> None:
    """Draw the scores of several models as a PNG."""
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    MEASUREMENTS[scores[0].measurement].draw(axes, {each.model: each for each in scores})
    plain(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
    save(figure, file)


def _loaded(model: Model, asked: Asked, dtype: str | None, display: Display) -> Model:
    if not any(MEASUREMENTS[name].needs_weights(options) for name, options in asked.items()):
        return model
    with display.working(f"loading {model.name}"):
        return model.load(dtype)


def _run(name: str, model: Model, options: Section, session: Session, display: Display) -> Scores:
    with display.progress(f"{name} {model.name}") as session.progress:
        scores: Scores = MEASUREMENTS[name].run(model, options, session)
        return scores


def _warn_of_length(models: Sequence[Model], options: Any, display: Display) -> None:
    """Warn of models that are measured beyond the window that their scaling covers."""
    for model in models:
        if options.longest and options.longest > model.window:
            display.say(f"{model.name}: covers {model.window} tokens; measured with {options.longest} anyway")

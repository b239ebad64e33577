"""All measurements, the evaluation of models, and the files and tables of scores."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from glob import has_magic
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.table import Table

from pi_lora.data.chats import chat_problem
from pi_lora.data.documents import looks_local
from pi_lora.data.sources import trains_on
from pi_lora.distributed import is_main_process
from pi_lora.errors import DataError, ModelError
from pi_lora.evaluation.benchmarks import Benchmarks
from pi_lora.evaluation.chat import Chats
from pi_lora.evaluation.context import Context
from pi_lora.evaluation.measurement import Measurement, Metric, Preview, Scores, Session, as_json
from pi_lora.evaluation.passkey import Passkey
from pi_lora.evaluation.perplexity import Perplexity, PerplexityScores
from pi_lora.evaluation.prompting import Prompting
from pi_lora.evaluation.ruler import Ruler
from pi_lora.evaluation.summarization import Summarization
from pi_lora.evaluation.texts import measured_source, training_notes
from pi_lora.models.loaded import LoadedModel, load_model
from pi_lora.models.source import ModelSource
from pi_lora.recipe.data import Source
from pi_lora.recipe.evaluation import Evaluation, PasskeyOptions, PerplexityOptions, PromptOptions
from pi_lora.recipe.schema import Recipe
from pi_lora.recipe.section import Section
from pi_lora.run import TUNED, Run, check_tuned
from pi_lora.storage import check_can_write, digest_of, first_problem, read_json, write_json
from pi_lora.types import Progress, silent, ui

# By the names of the sections of a recipe's `evaluation` and of the files in a run's scores, the paper's first.
MEASUREMENTS: Mapping[str, Measurement[Any, Any]] = {
    measurement.scores.measurement: measurement
    for measurement in (Perplexity(), Context(), Passkey(), Benchmarks(), Ruler(), Summarization(), Chats())
}
# Options that change the duration of a measurement, but no metric that is compared.
SPEED_OPTIONS = {"batch_size"}
# Options that name the text of a perplexity, or a part of it.
OF_ONE_TEXT = {"data", "subset", "split", "column", "hold_out"}
# How a measurement of a whole recipe takes less time: alone, with other options.
OF_ONE = "pi-lora eval {measurement} with --{key} {value} takes less"
# Options by measurement.
Requested = Mapping[str, Section]


def evaluate(
    models: Sequence[ModelSource | LoadedModel],
    requested: Requested,
    files: Mapping[str, Path],
    *,
    section: str = "",
    chat: bool | None = None,
) -> dict[str, list[Scores]]:
    """Return the scores of models by measurement. Each measurement is written to the file in `files` as soon as all
    models have scores, and journalled until then.

    Defaults of the options are the same for all models, also whether `chat: auto` asks them in their chat template; it
    is decided here unless `chat` is given. Raise PiLoraError before weights are read if a file cannot be
    written, or if a measurement cannot be prepared or cannot work; `section` holds the options in a recipe, if any.
    """
    check_can_write(*files.values())
    sources = [model.source if isinstance(model, LoadedModel) else model for model in models]
    # The weights of a model that was given loaded may be others than those in its files.
    journalled = not any(isinstance(model, LoadedModel) for model in models)
    with ui.working("preparing the measurements"):
        prepared = prepare(requested, sources, section)
    say_training_notes(prepared, sources)

    prompting = Prompting(sources, chat)
    scores: dict[str, list[Scores]] = {}
    loaded: LoadedModel | None = None
    for name, options in prepared.items():
        results = []
        with Session(say=ui.say, journalled=journalled, remedy=OF_ONE if section else Session.remedy) as session:
            for model in models:
                if isinstance(model, LoadedModel):
                    loaded = model
                elif loaded is None or len(models) > 1:
                    loaded = None  # frees the memory before the next model is read
                    with ui.working(f"loading {model.name}"):
                        loaded = load_model(model)
                with ui.progress(f"{name} {model.name}") as session.progress:
                    settled = prompting.settled(options, loaded)
                    result = measurement_of(name).measure(loaded, settled, session)
                results.append(marked(result, loaded.source.texts))
            if is_main_process() and name in files:
                write_scores(results, files[name])
        scores[name] = results
    return scores


def say_training_notes(prepared: Requested, models: Sequence[ModelSource]) -> None:
    """Say which models are tuned on what is measured, or may be."""
    notes = [
        note
        for options in prepared.values()
        for model in models
        for note in training_notes(options, model.name, model.texts)
    ]
    for note in dict.fromkeys(notes):
        ui.say(note)


def marked(scores: Scores, texts: Sequence[Source]) -> Scores:
    """Return scores with the mark that the model is tuned on what is measured, if `texts` of the tuning were."""
    measured = measured_source(scores.options)
    if measured and trains_on(texts, measured):
        return scores.model_copy(update={"tuned_on": True})
    return scores


def scores_of(
    run: Run,
    stage: str,
    requested: Requested,
    resolve: Callable[[], ModelSource],
    *,
    again: bool = False,
) -> dict[str, Scores]:
    """Return scores of a run, or of the base of a run, by the names of the score files.

    Files are read if they were measured with the `requested` options. The others are measured and written, on the model
    that `resolve` returns; with `again`, all of them.
    """
    files = {name: run.scores_file(name, stage) for name in requested}
    scores_by_name: dict[str, Scores] = {}
    for name, section in requested.items():
        scores = read_scores(files[name]) if files[name].is_file() and not again else None
        # Options that are not requested may differ in scores of the run itself.
        if scores and not differences(section, scores, exclude_defaults=stage == TUNED):
            scores_by_name[name] = scores
    missing = {name: section for name, section in requested.items() if name not in scores_by_name}
    if missing:
        chat = None if again else chat_of(run)
        measured = evaluate([resolve()], missing, files, section="evaluation", chat=chat)
        for name, [scores] in measured.items():
            scores_by_name[name] = scores
    return {name: scores_by_name[name] for name in requested}


def chat_of(run: Run) -> bool | None:
    """Return whether a run, or the base of it, was asked in the chat template; None if it was not asked."""
    for _, _, file in run.score_files():
        scores = read_scores(file)
        if scores and isinstance(scores.options, PromptOptions):
            return scores.options.chat is True
    return None


def measure(
    loaded: LoadedModel,
    evaluation: Evaluation,
    progress: Progress = silent,
    say: Callable[[str], object] = str,
    *,
    chat: bool | None = None,
) -> dict[str, Scores]:
    """Measure a model during training, with the smaller options of `evaluation`. `progress` is called after each
    document or prompt, and may raise an exception to stop; `say` is told how long it takes; `chat` is as in `evaluate`.
    """
    prompting = Prompting([loaded.source], chat)
    requested = requested_measurements(evaluation.in_short())
    with Session(progress, say, remedy="evaluation.while_training.{key}={value} shortens it") as session:
        return {
            name: MEASUREMENTS[name].run(loaded, prompting.settled(options, loaded), session)
            for name, options in requested.items()
        }


def prepare(requested: Requested, models: Sequence[ModelSource], section: str = "") -> Requested:
    """Return the options with the defaults that depend on the models. Raise PiLoraError, before weights are read, if a
    measurement cannot be prepared, or cannot work on one of the models.
    """
    prepared = {name: measurement_of(name).prepare(options, models) for name, options in requested.items()}
    problems: list[str] = []
    for model in models:
        preview = Preview(model.window, model.tokenizer, section=section)
        problems += problems_of(prepared, preview)
    if problems:
        raise DataError(*dict.fromkeys(problems))
    for name, options in prepared.items():
        measurement_of(name).check(options)
    return prepared


def problems_of(requested: Requested, preview: Preview) -> Iterator[str]:
    """Yield what keeps measurements from working, as far as it shows before weights are read, a line each."""
    for name, options in requested.items():
        # Another text than that of a recipe is named by an option.
        section = f"{preview.section}.{name}" if preview.section and name in MEASUREMENTS else ""
        of_section = replace(preview, section=section)
        problem = ""
        if preview.tokenizer and isinstance(options, PromptOptions) and options.chat is True:
            problem = chat_problem(preview.tokenizer)
        if problem:
            yield f"{of_section.key('chat')}: {problem}; leave it out"
        else:
            yield from measurement_of(name).problems(options, of_section)


def measurement_of(name: str) -> Measurement[Any, Any]:
    """Return the measurement with which the name of scores begins: `perplexity`, or `perplexity-text_novels`."""
    return MEASUREMENTS[name.partition("-")[0]]


def measuring_command(name: str, recipe: Recipe | None) -> str:
    """Return the command that measures a run on the text that its recipe names; a source was trained on whole, so
    another text is asked for.
    """
    arguments = ["perplexity", name, "--data", "HELD_OUT_TEXT"]
    if recipe and recipe.data.has_examples:
        arguments = ["summarization", name]
        if all(looks_local(source.name) and not source.hold_out for source in recipe.data.source):
            arguments += ["--data", "HELD_OUT_ROWS"]
    elif recipe and requested_measurements(recipe.evaluation):
        arguments = ["all", name]
    return f"pi-lora eval {shlex.join(arguments)}"


def requested_measurements(evaluation: Evaluation) -> dict[str, Any]:
    """Return the options of the measurements that a recipe requests, by measurement."""
    return {name: options for name, options in evaluation if name in MEASUREMENTS and options}


def requested_of_run(run: Run, data: str | None = None) -> dict[str, Any]:
    """Return the options that the recipe of a run requests, by the names of the score files. The default measurements
    are perplexity and passkey. With `data`, perplexity is measured on this text instead. The scores then have a
    separate file, unless `data` is the text of the recipe.
    """
    check_tuned(run)
    requested = requested_measurements(run.recipe.evaluation)
    if not requested:
        requested = {"perplexity": PerplexityOptions(), "passkey": PasskeyOptions()}
    if data is None:
        return requested
    of_recipe = requested.pop("perplexity", PerplexityOptions())
    if of_recipe.data and Path(of_recipe.data) == Path(data):
        return {"perplexity": of_recipe, **requested}
    of_recipe_text = of_recipe.model_dump(exclude_unset=True, exclude=OF_ONE_TEXT)
    # All documents of one text are few, of another perhaps a million.
    of_all_texts = {key: value for key, value in of_recipe_text.items() if value != "all"}
    options = PerplexityOptions(data=data, **of_all_texts)
    return {name_of_text_scores(data): options, **requested}


def name_of_text_scores(data: str, measurement: str = "perplexity") -> str:
    """Return the name of the scores of another text than the one that a run names: texts of one name in two folders
    have two names.
    """
    path = Path(data).expanduser()
    is_here = path.exists() or has_magic(data)
    identity = digest_of(str(path.resolve()) if is_here else data)[:8]
    text = re.sub(r"\W+", "_", path.name).strip("_")
    # `text_`, as a stage follows a hyphen, and a text may have the name of a stage, such as `base`.
    return f"{measurement}-text_{text}_{identity}"


def metrics_of(scores: Scores) -> list[Metric]:
    """Return the metrics of any scores."""
    return list(MEASUREMENTS[scores.measurement].metrics(scores))


def setting_of(scores: Scores, shown: Callable[[str], str] = str) -> str:
    """Return the options that scores were measured with, and the numbers of documents, trials or examples. `shown`
    returns the text to show for an option that is a text.
    """
    options = scores.options.model_dump(mode="json", exclude={*SPEED_OPTIONS, "bos"}, exclude_none=True)
    parts = []
    for key, value in options.items():
        if isinstance(value, list):
            # Only numbers: the names of tasks are in the table.
            value = "/".join(str(item) for item in value if isinstance(item, int))
        elif isinstance(value, str):
            value = shown(value)
        if value != "" and value is not False:
            parts.append(f"{key.replace('_', ' ')} {value}")
    if isinstance(scores, PerplexityScores) and scores.bos not in (None, "none"):
        parts.append(f"BOS in {scores.bos}")
    numbers = dict.fromkeys(len(metric.values) for metric in metrics_of(scores) if metric.values)
    parts += [f"n = {number}" for number in numbers]
    return ", ".join(parts)


def differences(requested: Section, scores: Scores, *, exclude_defaults: bool = False) -> list[str]:
    """Return the options of scores that differ from the requested ones; scores are comparable if there are none.
    Options that change no number are ignored.
    """
    options = requested.model_dump(exclude=SPEED_OPTIONS, exclude_defaults=exclude_defaults)
    return [key for key, value in options.items() if getattr(scores.options, key) != value]


def other_arithmetic(before: Scores, after: Scores) -> str:
    """Return the dtypes, kernels and versions of libraries in which two results differ, as `torch 2.12.0 and 2.13.0`;
    empty if there are none. The results stay comparable: what is measured is in the options and digests.
    """
    facts, others = ({"dtype": each.dtype, "kernel": each.kernel, **each.versions} for each in (before, after))
    pairs = []
    for name in facts.keys() & others.keys():
        values = [facts[name], others[name]]
        if None not in values and values[0] != values[1]:
            pairs.append(f"{name} {values[0]} and {values[1]}")
    return ", ".join(sorted(pairs))


def read_scores(file: Path) -> Scores | None:
    """Return the scores in a file, or None if it holds something else; raise ModelError if it is no JSON or a field is
    invalid.
    """
    remedy = "measure again or remove it"
    content: Any = read_json(file, object, remedy)
    if not isinstance(content, dict):
        return None
    name = content.pop("measurement", None)
    if name not in MEASUREMENTS:
        return None
    try:
        scores: Scores = MEASUREMENTS[name].scores.model_validate(content)
        return scores
    except ValidationError as error:
        raise ModelError(f"{file}: {first_problem(error)}; {remedy}") from None


def write_scores(scores: Sequence[Scores], file: Path) -> None:
    """Write the scores of one model, or a list with the scores of several."""
    content = [as_json(result) for result in scores]
    write_json(file, content if len(content) > 1 else content[0])


def metric_rows(columns: Sequence[Mapping[str, Metric]]) -> Iterator[list[str]]:
    """Yield a row for each heading: the heading, and in every column the text of the metric, or an empty text."""
    headings = dict.fromkeys(chain.from_iterable(columns))
    for heading in headings:
        cells = [column[heading].text if heading in column else "" for column in columns]
        yield [heading, *cells]


def scores_table(scores: Sequence[Scores]) -> Table:
    """Return a row for each metric and a column for each model; all of one measurement."""
    columns = []
    table = Table("", title=scores[0].measurement, caption_justify="left")
    for result in scores:
        columns.append({metric.heading: metric for metric in metrics_of(result)})
        table.add_column(result.model, justify="right", overflow="fold")
    for row in metric_rows(columns):
        table.add_row(*row)
    scales = " / ".join(result.scale_text for result in scores)
    dtypes = ", ".join(dict.fromkeys(str(result.dtype) for result in scores))
    table.caption = f"scale {scales}, {dtypes}, {setting_of(scores[0])}"
    for result in scores:
        if result.tuned_on:
            table.caption += f"; {result.model} is tuned on it"
    if any(metric.interval for column in columns for metric in column.values()):
        table.caption += "; 95 % intervals"
    return table

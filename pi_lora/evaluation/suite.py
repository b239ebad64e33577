"""Every measurement, models measured as asked, and the files and tables of their scores."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.table import Table

from pi_lora.distributed import is_main_process
from pi_lora.errors import ModelError
from pi_lora.evaluation.benchmarks import Benchmarks
from pi_lora.evaluation.chat import Chats
from pi_lora.evaluation.measurement import Measurement, Metric, Scores, Session, as_json
from pi_lora.evaluation.passkey import Passkey
from pi_lora.evaluation.perplexity import Perplexity
from pi_lora.evaluation.ruler import Ruler
from pi_lora.evaluation.summarization import Summarization
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import Evaluation, PasskeyOptions, PerplexityOptions
from pi_lora.recipe.section import Section
from pi_lora.run import BASE, Run, check_tuned
from pi_lora.storage import check_can_write, first_problem, read_json, write_json
from pi_lora.types import How, Progress, silent

# Named as the sections of a recipe's `evaluation` and the files in a run's scores; the paper's are first, in its order.
MEASUREMENTS: Mapping[str, Measurement[Any, Any]] = {
    each.scores.measurement: each for each in (Perplexity(), Passkey(), Benchmarks(), Ruler(), Summarization(), Chats())
}
# Options that change how long a measurement takes, but no metric that is compared.
CHANGE_NO_NUMBER = {"batch_size"}
# Options by measurement.
Asked = Mapping[str, Section]


def evaluate(
    models: Sequence[Model],
    asked: Asked,
    files: Mapping[str, Path],
    how: How = How(),
) -> dict[str, list[Scores]]:
    """Return the scores of models by measurement, written into `files` by measurement as soon as all models have them.

    Defaults of the options are the same for all models. Raise PiLoraError for what shows before weights are read, such
    as a file that cannot be written. What was measured is kept until it is written.
    """
    check_can_write(*files.values())
    with how.working("preparing the measurements"):
        # Scores are named after their measurement: `perplexity`, or `perplexity-text_novels`.
        kinds = {name: MEASUREMENTS[name.partition("-")[0]] for name in asked}
        prepared = {name: kinds[name].prepare(options, models) for name, options in asked.items()}
        for name, options in prepared.items():
            kinds[name].check(options)

    scores: dict[str, list[Scores]] = {name: [] for name in asked}
    loaded: Model | None = None
    for name, options in prepared.items():
        with Session(say=how.say, shared=True) as session:
            for model in models:
                if loaded is None or len(models) > 1:
                    loaded = None  # before the next one is read
                    with how.working(f"loading {model.name}"):
                        loaded = model.load(how.dtype)
                with how.progress(f"{name} {model.name}") as session.progress:
                    scores[name].append(kinds[name].run(loaded, options, session))
            if is_main_process() and name in files:
                write_scores(scores[name], files[name])
    return scores


def scores_of(
    run: Run,
    stage: str,
    asked: Asked,
    find: Callable[[], Model],
    how: How = How(),
) -> dict[str, Scores]:
    """Return scores of a run, or of its base, by the names of their files: those that are kept with the options that
    are `asked`, and the others measured of the model that `find` returns and kept; if measured again, all of them.
    """
    files = {name: run.scores_file(name, stage) for name in asked}
    kept: dict[str, Scores] = {}
    for name, file in files.items():
        scores = read_scores(file) if file.is_file() and not how.again else None
        # Of a run's own scores, options that are not asked for may be anything.
        if scores and not differences(asked[name], scores, exclude_defaults=stage != BASE):
            kept[name] = scores
    missing = {name: options for name, options in asked.items() if name not in kept}
    if missing:
        kept |= {name: scores for name, [scores] in evaluate([find()], missing, files, how).items()}
    return {name: kept[name] for name in asked}


def measure(loaded: Model, evaluation: Evaluation, progress: Progress = silent) -> dict[str, Scores]:
    """Measure a model that trains, as `evaluation` says in short. `progress` is called after each document or prompt;
    what it raises ends the measuring.
    """
    asked = requested_measurements(evaluation.in_short())
    with Session(progress, shared=True) as session:
        return {name: MEASUREMENTS[name].run(loaded, options, session) for name, options in asked.items()}


def requested_measurements(evaluation: Evaluation) -> dict[str, Any]:
    """Return the options by measurement, of those that a recipe asks for."""
    return {name: options for name in MEASUREMENTS if (options := getattr(evaluation, name))}


def requested_of_run(run: Run, data: str | None = None) -> dict[str, Any]:
    """Return the options that a run's recipe asks for, by the names of their files; perplexity and passkey if it names
    none. With `data`, perplexity is measured on this text instead, into a file of its own unless it is the run's text.
    """
    check_tuned(run)
    asked = requested_measurements(run.recipe.evaluation) or {
        "perplexity": PerplexityOptions(),
        "passkey": PasskeyOptions(),
    }
    if data is None:
        return asked
    own = asked.pop("perplexity", PerplexityOptions())
    if own.data == data:
        return {"perplexity": own, **asked}
    other = PerplexityOptions(data=data, windows=own.windows, stride=own.stride, truncate=own.truncate)
    # A hyphen precedes a stage, and a text may be called `base`.
    return {"perplexity-text_" + re.sub(r"\W+", "_", Path(data).name).strip("_"): other, **asked}


def metrics_of(scores: Scores) -> list[Metric]:
    """Return the metrics of any scores."""
    return MEASUREMENTS[scores.measurement].metrics(scores)


def setting_of(scores: Scores) -> str:
    """Return the options that decided scores, and of how many documents, trials or examples the first metrics are."""
    options = scores.options.model_dump(mode="json", exclude=CHANGE_NO_NUMBER, exclude_none=True)
    parts = []
    for key, value in options.items():
        # Tasks are named in the table.
        shown = "/".join(str(each) for each in value if isinstance(each, int)) if isinstance(value, list) else value
        if shown != "" and shown is not False:
            parts.append(f"{key.replace('_', ' ')} {shown}")
    numbers = dict.fromkeys(str(len(metric.values)) for metric in metrics_of(scores) if metric.values)
    return ", ".join([*parts, *(f"n = {number}" for number in numbers)])


def differences(asked: Section, scores: Scores, exclude_defaults: bool = False) -> list[str]:
    """Return the options with which scores were measured otherwise than is asked; they compare where there are none.
    Options that change no number are left out.
    """
    wanted = asked.model_dump(exclude=CHANGE_NO_NUMBER, exclude_defaults=exclude_defaults)
    return [key for key, value in wanted.items() if getattr(scores.options, key) != value]


def read_scores(file: Path) -> Scores | None:
    """Return the scores in a file, or None if it holds none; raise ModelError if it is no JSON or a field is wrong.
    Files that do not name their measurement are named after it: `perplexity-base.json`.
    """
    again = "measure again or remove it"
    content: Any = read_json(file, object, again)
    if not isinstance(content, dict):
        return None
    name = content.pop("measurement", file.stem.partition("-")[0])
    if name not in MEASUREMENTS:
        return None
    try:
        scores: Scores = MEASUREMENTS[name].scores.model_validate(content)
        return scores
    except ValidationError as error:
        raise ModelError(f"{file}: {first_problem(error)}; {again}") from None


def write_scores(scores: Sequence[Scores], file: Path) -> None:
    """Write the scores of a model, or those of several as a list."""
    every = [as_json(each) for each in scores]
    write_json(file, every if len(every) > 1 else every[0])


def metric_rows(columns: Sequence[Mapping[str, Metric]]) -> Iterator[list[str]]:
    """Yield a row for each heading: the heading, and the text of its metric in every column, if the column has one."""
    for heading in dict.fromkeys(heading for column in columns for heading in column):
        yield [heading, *(column[heading].text if heading in column else "" for column in columns)]


def scores_table(scores: Sequence[Scores]) -> Table:
    """Return a row for each metric and a column for each model; all of one measurement."""
    columns = [{metric.heading: metric for metric in metrics_of(one)} for one in scores]
    table = Table("", title=scores[0].measurement, caption_justify="left")
    for one in scores:
        table.add_column(one.model, justify="right", overflow="fold")
    for row in metric_rows(columns):
        table.add_row(*row)
    scales = " / ".join(f"{one.scale:g}" for one in scores)
    dtypes = ", ".join(dict.fromkeys(str(one.dtype) for one in scores))
    table.caption = f"scale {scales}, {dtypes}, {setting_of(scores[0])}"
    if any(metric.interval for column in columns for metric in column.values()):
        table.caption += "; 95 % intervals"
    return table

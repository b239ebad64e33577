"""Short-context benchmarks at a model's original window, on the hub's data sets or the files that a user names."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pi_lora.errors import DataError, PiLoraError
from pi_lora.evaluation.benchmarks.local_data import TITLES
from pi_lora.evaluation.journal import journaled
from pi_lora.evaluation.results import BenchmarkScores, described
from pi_lora.models.load import LoadedModel
from pi_lora.types import Progress

PAPER_TASKS = tuple(TITLES)


@dataclass(frozen=True)
class Prepared:
    """A task or group of lm-eval that is ready to be measured, and the file, folder or hub ids of its examples."""

    name: str
    source: str
    tasks: dict[str, Any]


def prepare(tasks: Sequence[str] = PAPER_TASKS, data: Sequence[str] = ()) -> list[Prepared]:
    """Return the tasks with their examples: from `data`, as `boolq=FILE` or a folder of folders by task, or the hub's.

    A group that lm-eval gives no score of its own becomes its tasks.

    Raises:
        DataError: no such task, or its file or data set is missing or of another schema.
        PiLoraError: lm-eval is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise PiLoraError("pi-lora eval benchmarks: needs the package lm_eval; pip install 'pi-lora[eval]'")
    # Imported here: it is an extra of this package, and takes seconds.
    from pi_lora.evaluation.benchmarks.lm_eval_tasks import check_names, load_tasks

    check_names(tasks)
    places = _places(tasks, data)
    prepared: dict[str, Prepared] = {}
    for name in dict.fromkeys(tasks):
        loaded = load_tasks(name, places.get(name))
        group = loaded["groups"].get(name)
        whole = {name: loaded} if group is not None and group.has_aggregation else {}
        for each, part in (whole or {key: {"tasks": {key: task}} for key, task in loaded["tasks"].items()}).items():
            ids = dict.fromkeys(str(task.DATASET_PATH) for task in part["tasks"].values())
            prepared[each] = Prepared(each, str(places.get(name) or ", ".join(ids)), part)
    return list(prepared.values())


def evaluate_benchmarks(
    loaded: LoadedModel,
    prepared: Sequence[Prepared],
    limit: int | None = None,
    batch_size: int = 8,
    window: int | None = None,
    progress: Progress | None = None,
) -> BenchmarkScores:
    """Measure each task, inputs cut to `window` tokens, the original ones: what stretching costs there.

    For a command of its own: every process has the whole model and computes its share of the batches, which are kept
    until all tasks are measured.

    Raises:
        DataError: the window does not hold an answer.
        Interrupted: by Ctrl-C; the batches that were done are kept.
    """
    from pi_lora.evaluation.benchmarks.answering import Answering
    from pi_lora.evaluation.benchmarks.lm_eval_tasks import measure, quiet, version

    window = window or original_window(loaded)
    asked = {"lm_eval": version(), "limit": limit, "batch_size": batch_size}
    tasks = {}
    with journaled(
        loaded, {**asked, "window": window, "tasks": [each.name for each in prepared]}, "batches"
    ) as journal:
        with quiet():
            answering = Answering(loaded.model, loaded.tokenizer, window, batch_size, journal)
        for each in prepared:
            if progress:
                answering.progress = partial(progress, note=TITLES.get(each.name, each.name))
            tasks[each.name] = measure(answering, each.name, each.tasks, limit)
    return BenchmarkScores.model_validate(
        {
            **described(loaded),
            "window": window,
            "shots": 0,
            "metric": "acc, lm-eval's: the likeliest choice, its likelihood not divided by its length",
            **asked,
            "data": {each.name: each.source for each in prepared},
            "tasks": tasks,
        }
    )


def original_window(loaded: LoadedModel) -> int:
    """Return L in tokens; the config of a model tuned with `scaling: direct` tells only L'."""
    return round(loaded.window / loaded.scale)


def _places(tasks: Sequence[str], data: Sequence[str]) -> dict[str, Path]:
    """Where the examples of each task are, as far as `data` says."""
    places: dict[str, Path] = {}
    for given in data:
        name, equals, path = given.partition("=")
        folder = Path(given).expanduser()
        if equals and name in tasks:
            places[name] = Path(path).expanduser()
        elif folder.is_dir():
            inside = {each: folder / each for each in tasks if (folder / each).exists()}
            if not inside:
                raise DataError(f"--data: {given}: holds none of {', '.join(tasks)}; name each as TASK=FILE")
            places = inside | places
        elif equals:
            raise DataError(f"--data: {given}: {name} is not among the tasks {', '.join(tasks)}; correct either")
        else:
            raise DataError(f"--data: {given}: is no folder, and no TASK=FILE; name either")
    return places

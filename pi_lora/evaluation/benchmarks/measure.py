"""Short-context benchmarks at a model's original window, on the hub's data sets or the files that a user names."""

import importlib.util
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from pi_lora.errors import DataError, PiLoraError
from pi_lora.evaluation.benchmarks.local_data import TITLES
from pi_lora.evaluation.journal import journaled
from pi_lora.evaluation.results import BenchmarkScores, described
from pi_lora.models.load import LoadedModel
from pi_lora.types import Progress, silent

PAPER_TASKS = tuple(TITLES)


class Prepared(NamedTuple):
    """A task or group of lm-eval that is ready to be measured, and the file, folder or hub ids of its examples."""

    source: str
    tasks: dict[str, Any]


def prepare(tasks: Sequence[str] = PAPER_TASKS, data: Sequence[str] = ()) -> dict[str, Prepared]:
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
    prepared = {}
    for name in dict.fromkeys(tasks):
        for each, part in load_tasks(name, places.get(name)).items():
            ids = dict.fromkeys(str(task.DATASET_PATH) for task in part["tasks"].values())
            prepared[each] = Prepared(str(places.get(name) or ", ".join(ids)), part)
    return prepared


def evaluate_benchmarks(
    loaded: LoadedModel,
    prepared: dict[str, Prepared],
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
    from pi_lora.evaluation.benchmarks.lm_eval_tasks import measure, quiet

    # The config of a model tuned with `scaling: direct` tells only L'.
    window = window or round(loaded.window / loaded.scale)
    asked: dict[str, Any] = {"lm_eval": version("lm_eval"), "limit": limit, "batch_size": batch_size}
    tasks = {}
    with journaled(loaded, {**asked, "window": window, "tasks": list(prepared)}, "batches") as journal:
        with quiet():
            answering = Answering(loaded.model, loaded.tokenizer, window, batch_size, journal)
        for name, (_, parts) in prepared.items():
            answering.progress = partial(progress or silent, note=TITLES.get(name, name))
            tasks[name] = measure(answering, name, parts, limit)
    return BenchmarkScores(
        **{**described(loaded), "window": window},
        shots=0,
        metric="acc, lm-eval's: the likeliest choice, its likelihood not divided by its length",
        **asked,
        data={name: each.source for name, each in prepared.items()},
        tasks=tasks,
    )


def _places(tasks: Sequence[str], data: Sequence[str]) -> dict[str, Path]:
    """Return where the examples of each task are, as far as `data` says."""
    places: dict[str, Path] = {}
    for given in data:
        name, equals, path = given.partition("=")
        folder = Path(given).expanduser()
        inside = {each: folder / each for each in tasks if (folder / each).exists()}
        if equals and name in tasks:
            places[name] = Path(path).expanduser()
        elif inside:
            places = inside | places
        elif folder.is_dir():
            raise DataError(f"--data: {given}: holds none of {', '.join(tasks)}; name each as TASK=FILE")
        elif equals:
            raise DataError(f"--data: {given}: {name} is not among the tasks {', '.join(tasks)}; correct either")
        else:
            raise DataError(f"--data: {given}: is no folder, and no TASK=FILE; name either")
    return places

"""Short-context benchmarks at a model's original window, on the hub's data sets or the files that a user names."""

import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_lora.data.cache import cache_folder
from pi_lora.distributed import from_all, is_leader
from pi_lora.errors import DataError, Interrupted, PiLoraError
from pi_lora.evaluation.benchmarks.local_data import SCHEMAS, Row, read_examples
from pi_lora.evaluation.journal import Journal, identity_of
from pi_lora.evaluation.results import described
from pi_lora.models.load import LoadedModel
from pi_lora.types import Json, Progress

TASKS = tuple(SCHEMAS)


@dataclass(frozen=True)
class Prepared:
    """A task that is ready to be measured: lm-eval's own, its examples, and the file, folder or hub id of them."""

    name: str
    source: str
    examples: tuple[Row, ...] | None
    task: Any


def prepare(tasks: Sequence[str] = TASKS, data: Sequence[str] = ()) -> list[Prepared]:
    """The tasks with their examples: from `data`, as `boolq=FILE` or a folder of folders by task, or from the hub.

    Raises:
        DataError: no such task, or its file or data set is missing or of another schema.
        PiLoraError: lm-eval is not installed.
    """
    if unknown := [name for name in tasks if name not in SCHEMAS]:
        raise DataError(f"--tasks: {unknown[0]}: no such benchmark; there are {', '.join(TASKS)}")
    places = _places(tasks, data)
    examples = {name: tuple(read_examples(name, path)) for name, path in places.items()}
    if importlib.util.find_spec("lm_eval") is None:
        raise PiLoraError("pi-lora eval benchmarks: needs the package lm_eval; pip install 'pi-lora[eval]'")
    # Imported here: it is an extra of this package, and takes seconds.
    from pi_lora.evaluation.benchmarks.lm_eval_tasks import load_task

    prepared = []
    for name in dict.fromkeys(tasks):
        task = load_task(name, examples.get(name))
        source = str(places[name]) if name in places else str(task.DATASET_PATH)
        prepared.append(Prepared(name, source, examples.get(name), task))
    return prepared


def evaluate_benchmarks(
    loaded: LoadedModel,
    prepared: Sequence[Prepared],
    limit: int | None = None,
    batch_size: int = 8,
    window: int | None = None,
    progress: Progress | None = None,
) -> Json:
    """Zero-shot accuracy on each task, inputs cut to `window` tokens, the original ones: what stretching costs there.

    For a command of its own: every process has the whole model and computes its part of the batches, and what is found
    is kept until all of a task is.

    Raises:
        DataError: the window does not hold an answer.
        Interrupted: by Ctrl-C; the batches that were done are kept.
    """
    from pi_lora.evaluation.benchmarks.lm_eval_tasks import version

    window = window or original_window(loaded)
    return {
        **described(loaded),
        "window": window,
        "shots": 0,
        "metric": "acc, lm-eval's: the likeliest choice, its likelihood not divided by its length",
        "lm_eval": version(),
        "limit": limit,
        "batch_size": batch_size,
        "data": {each.name: each.source for each in prepared},
        "tasks": {each.name: _measured(loaded, each, window, limit, batch_size, progress) for each in prepared},
    }


def original_window(loaded: LoadedModel) -> int:
    """L in tokens. Of a model tuned with `scaling: direct` the config tells only L'."""
    return round(loaded.window / loaded.scale)


def _measured(
    loaded: LoadedModel, prepared: Prepared, window: int, limit: int | None, batch_size: int, progress: Progress | None
) -> Json:
    from pi_lora.evaluation.benchmarks.lm_eval_tasks import benchmark, version

    asked = {"limit": limit, "batch_size": batch_size, "window": window, "lm_eval": version()}
    decided_by = {**asked, "benchmark": prepared.name, "examples": prepared.examples}
    journal = Journal(cache_folder(), {**decided_by, "model": identity_of(loaded)})

    def tell(done: int, total: int) -> None:
        if progress:
            progress(done, total, SCHEMAS[prepared.name].title)

    try:
        score = benchmark(loaded.model, loaded.tokenizer, prepared.task, window, limit, batch_size, journal, tell)
    except KeyboardInterrupt:
        raise Interrupted(
            f"{loaded.name}: interrupted; the examples that were measured are kept, the same command goes on from there"
        ) from None
    from_all([])  # Until here another process may read the journal.
    if is_leader():
        journal.finish()
    return {key: value for key, value in dataclasses.asdict(score).items() if key != "acc_norm" or value is not None}


def _places(tasks: Sequence[str], data: Sequence[str]) -> dict[str, Path]:
    """Where the examples of each task are, as far as `data` says."""
    places: dict[str, Path] = {}
    for given in data:
        name, equals, path = given.partition("=")
        if equals and name in SCHEMAS:
            if name not in tasks:
                raise DataError(
                    f"--data: {given}: {name} is not among the tasks {', '.join(tasks)}; add it, or leave it out"
                )
            places[name] = Path(path).expanduser()
            continue
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise DataError(
                f"--data: {given}: is no folder, and no TASK=FILE with a task of {', '.join(TASKS)}; name either"
            )
        inside = {each: folder / each for each in tasks if (folder / each).exists()}
        if not inside:
            raise DataError(f"--data: {given}: holds none of {', '.join(tasks)}; name each as TASK=FILE")
        places = inside | places
    return places

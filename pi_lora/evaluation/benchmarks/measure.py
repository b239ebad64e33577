"""Short-context benchmarks at a model's original window, with the prompts, truncation and metrics of the installed
lm-eval.
"""

import contextlib
import difflib
import io
import json
import logging
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import lm_eval.tasks
import numpy as np
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.utils import set_torch_seed
from rich.console import Console
from rich.file_proxy import FileProxy

from pi_lora.errors import DataError, first_line
from pi_lora.evaluation.benchmarks.answering import Answering
from pi_lora.evaluation.benchmarks.local_data import FORMATS, TITLES, articles, read_examples
from pi_lora.evaluation.forward import described
from pi_lora.evaluation.journal import journaled
from pi_lora.evaluation.results import BenchmarkScores, TaskScore
from pi_lora.models.model import Model
from pi_lora.models.weights import quiet_loading
from pi_lora.types import Progress, silent

FOLDERS = ("super_glue/boolq", "piqa", "race", "winogrande")
# lm-eval's `race` is RACE-H, and its data set has no other part. RACE-M is the same task on the authors' middle school
# part, whose rows hold a question each and not an article.
OURS = {"race_high": "race", "race_middle": "race"}
RACE_MIDDLE = {
    "dataset_path": "ehovy/race",
    "dataset_name": "middle",
    "process_docs": lambda questions: type(questions).from_list(articles(questions)),
}


class Prepared(NamedTuple):
    """A task or group of lm-eval that is ready to be measured, and the file, folder or hub ids of its examples."""

    source: str
    tasks: dict[str, Any]


@cache
def manager(paper: bool) -> lm_eval.tasks.TaskManager:
    """Return lm-eval's tasks: with `paper` those of the paper, since the index of all 14,000 takes ten seconds."""
    root = Path(lm_eval.tasks.__file__).parent
    folders: list[str | Path] = [root / folder for folder in FOLDERS]
    return lm_eval.tasks.TaskManager(include_path=folders if paper else None, include_defaults=not paper)


def prepare(names: Sequence[str], data: Sequence[str] = ()) -> dict[str, Prepared]:
    """Return tasks with their examples, from `data` (`boolq=FILE`, or a folder of folders by task) or the hub. Raise
    DataError if there is no such task, group or tag, or its file or data set is missing or of another schema.
    """
    for name in names:
        if name not in TITLES and name not in (known := manager(paper=False).task_index):
            close = difflib.get_close_matches(name, {*TITLES, *known})
            hint = f"did you mean {' or '.join(close)}?" if close else "lm-eval ls tasks lists them"
            raise DataError(f"--tasks: {name}: no such benchmark in lm-eval {lm_eval.__version__}; {hint}")
    places = _places(names, data)
    prepared = {}
    for name in dict.fromkeys(names):
        for each, part in load_tasks(name, places.get(name)).items():
            ids = dict.fromkeys(str(task.DATASET_PATH) for task in part["tasks"].values())
            prepared[each] = Prepared(str(places.get(name) or ", ".join(ids)), part)
    return prepared


def _places(names: Sequence[str], data: Sequence[str]) -> dict[str, Path]:
    places: dict[str, Path] = {}
    for given in data:
        name, equals, path = given.partition("=")
        folder = Path(given).expanduser()
        if equals and name in names:
            places[name] = Path(path).expanduser()
        elif inside := {each: folder / each for each in names if (folder / each).exists()}:
            places = inside | places
        else:
            wanted = f"neither TASK=FILE nor a folder of what is asked for, {', '.join(names)}"
            raise DataError(f"--data: {given}: is {wanted}; correct it, or name the task with --tasks")
    return places


def load_tasks(name: str, path: Path | None) -> dict[str, dict[str, Any]]:
    """Return what is measured for a name, on the examples at `path` or the hub's: a task, a group with a score of its
    own, or else each task of it. Raise DataError if the examples cannot be read.
    """
    tasks, base = manager(paper=name in TITLES), OURS.get(name, name)
    if path is not None and "TASK" not in tasks.task_index[base].kind.name:
        raise DataError(f"--data: {name}={path}: {name} is a group of several tasks; name one of its tasks")
    with tempfile.TemporaryDirectory() as folder, quiet():
        hub = RACE_MIDDLE if name == "race_middle" else {}
        changes = hub if path is None else _on_local_files(name, path, Path(folder))
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        try:
            loaded = tasks.load([{"group": name, "task": [{"task": base, **changes}]} if changes else base])
        except Exception as error:
            # `datasets` raises a dozen kinds for what a user can mend: offline, gone, gated, of another schema.
            title, reason = TITLES.get(name, name), first_line(error)
            if path is not None:
                raise DataError(f"{path}: cannot be read as examples of {title} ({reason}); correct it") from error
            remedy = f"check the network, or give its file with --data {name}=FILE"
            raise DataError(f"{title}: cannot be had from the hub ({reason}); {remedy}") from error
        for task in loaded["tasks"].values():
            # As lm_eval.simple_evaluate, which this replaces: it gathers the versions of everything for seconds.
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    group = loaded["groups"].get(name)
    if group is not None and group.has_aggregation:
        return {name: dict(loaded)}
    each = {name if key == base else key: task for key, task in loaded["tasks"].items()}
    return {key: {"tasks": {key: task}} for key, task in each.items()}


def _on_local_files(name: str, path: Path, folder: Path) -> dict[str, Any]:
    data = folder / "data"
    data.mkdir()
    if name in FORMATS:
        rows = read_examples(name, path)
        (data / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    elif path.is_file():
        (data / f"test{path.suffix}").symlink_to(path.resolve())
    elif path.is_dir():
        data = path
    else:
        raise DataError(f"{path}: no such file or folder; name one that holds {name}")
    splits = dict.fromkeys(("training_split", "validation_split", "fewshot_split")) | {"test_split": "test"}
    # A folder: of `json` and a file, `datasets` (5.2) would tell its servers that it was used.
    settings = {"cache_dir": str(folder / "cache"), "keep_in_memory": True}
    own = {"dataset_path": str(data), "dataset_name": None, "dataset_kwargs": settings}
    return own if data == path else own | splits


def evaluate_benchmarks(
    loaded: Model,
    prepared: dict[str, Prepared],
    limit: int | None = None,
    batch_size: int = 8,
    window: int | None = None,
    progress: Progress = silent,
) -> BenchmarkScores:
    """Measure each task, inputs cut to `window` tokens, by default the original ones. Every process computes its share
    of the batches. Raise DataError if the window does not hold an answer, and Interrupted on Ctrl-C.
    """
    # The config of a model tuned with `scaling: direct` tells only L'.
    window = window or round(loaded.window / loaded.scale)
    asked: dict[str, Any] = {"lm_eval": lm_eval.__version__, "limit": limit, "batch_size": batch_size}
    tasks = {}
    with journaled(loaded, {**asked, "window": window, "tasks": list(prepared)}, "batches") as journal:
        with quiet():
            answering = Answering(loaded.model, loaded.tokenizer, window, batch_size, journal)
        answering.progress = progress
        for name, (_, parts) in prepared.items():
            title = TITLES.get(name, name)
            answering.note = lambda *_, title=title: title
            tasks[name] = measure(answering, name, parts, limit)
    return BenchmarkScores(
        **{**described(loaded), "window": window},
        shots=0,
        metric="acc, lm-eval's: the likeliest choice, its likelihood not divided by its length",
        **asked,
        data={name: each.source for name, each in prepared.items()},
        tasks=tasks,
    )


def measure(answering: Answering, name: str, tasks: dict[str, Any], limit: int | None) -> TaskScore:
    """Return the score on the first `limit` examples of each task; all processes call it. Raise DataError if the window
    does not hold an answer, or lm-eval cannot measure the task on such a model.
    """
    answering.truncated_inputs = answering.asked = 0
    set_torch_seed(DEFAULT_OTHER_SEED)
    with quiet():
        try:
            results = evaluate(answering, tasks, limit=limit)
        except (AssertionError, ValueError, NotImplementedError) as error:
            raise DataError(f"{name}: lm-eval cannot measure it ({first_line(error)}); leave it out") from error
    scores, samples = results["results"][name], results["samples"].get(name)
    numbers = {key.removesuffix(",none"): float(x) for key, x in scores.items() if "," in key and x != "N/A"}
    found: dict[str, Any] = {"examples": scores["sample_len"], "truncated_inputs": answering.truncated_inputs}
    if "acc" not in numbers:
        found["metrics"] = numbers
    else:
        found |= {"acc": numbers["acc"], "stderr": numbers.get("acc_stderr")}
        found |= {"outcomes": [float(sample["acc"]) for sample in samples]} if samples is not None else {}
    found |= {"acc_norm": numbers["acc_norm"]} if "acc_norm" in numbers else {}
    found |= {"shots": shots} if (shots := results["n-shot"].get(name)) else {}
    return TaskScore.model_validate(found)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what lm-eval and transformers print off the terminal, bars and warnings; rich finds it behind the proxy, for
    its bar.
    """
    logger = logging.getLogger("lm_eval")
    level, terminal = logger.level, getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    logger.setLevel(logging.ERROR)
    try:
        proxy = cast(IO[str], FileProxy(Console(quiet=True), terminal))
        with quiet_loading(), contextlib.redirect_stderr(proxy), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)

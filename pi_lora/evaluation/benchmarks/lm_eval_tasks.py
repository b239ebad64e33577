"""Tasks by name, with the prompts, truncation and metrics of the installed lm-eval, on its data sets or local files."""

import contextlib
import difflib
import functools
import json
import logging
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import lm_eval.tasks
import numpy as np
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.utils import set_torch_seed
from rich.console import Console
from rich.file_proxy import FileProxy

from pi_lora.errors import DataError
from pi_lora.evaluation.benchmarks.answering import Answering
from pi_lora.evaluation.benchmarks.local_data import FORMATS, TITLES, articles, read_examples
from pi_lora.evaluation.results import TaskScore

FOLDERS = ("super_glue/boolq", "piqa", "race", "winogrande")
# lm-eval's `race` is RACE-H, and its data set has no other part. RACE-M is the same task on the authors' middle school
# part, whose rows hold a question each and not an article.
OURS = {"race_high": "race", "race_middle": "race"}
RACE_MIDDLE = {
    "dataset_path": "ehovy/race",
    "dataset_name": "middle",
    "process_docs": lambda questions: type(questions).from_list(articles(questions)),
}


@functools.cache
def manager(paper: bool) -> lm_eval.tasks.TaskManager:
    """Return lm-eval's tasks: with `paper` those of the paper, since the index of all 14,000 takes ten seconds."""
    root = Path(lm_eval.tasks.__file__).parent
    folders: list[str | Path] = [root / folder for folder in FOLDERS]
    return lm_eval.tasks.TaskManager(include_path=folders if paper else None, include_defaults=not paper)


def check_names(names: Sequence[str]) -> None:
    """Raise DataError unless lm-eval has a task, group or tag of each name."""
    for name in names:
        if name not in TITLES and name not in (known := manager(paper=False).task_index):
            close = difflib.get_close_matches(name, {*TITLES, *known})
            hint = f"did you mean {' or '.join(close)}?" if close else "lm-eval ls tasks lists them"
            raise DataError(f"--tasks: {name}: no such benchmark in lm-eval {lm_eval.__version__}; {hint}")


def load_tasks(name: str, path: Path | None) -> dict[str, dict[str, Any]]:
    """Return what is measured for a name: a task, a group with a score of its own, or else each task of it.

    The examples are those of the hub, or of a file or folder of ours; raise DataError if they cannot be read.
    """
    tasks, base = manager(paper=name in TITLES), OURS.get(name, name)
    if path is not None and "TASK" not in tasks.task_index[base].kind.name:
        raise DataError(f"--data: {name}={path}: {name} is a group of several tasks; name one of its tasks")
    with tempfile.TemporaryDirectory() as folder, quiet():
        changes = RACE_MIDDLE if name == "race_middle" else {}
        if path is not None:
            changes = _on_local_files(name, path, Path(folder))
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        try:
            loaded = tasks.load([{"group": name, "task": [{"task": base, **changes}]} if changes else base])
        except Exception as error:
            # `datasets` raises a dozen kinds for what a user can mend: offline, gone, gated, of another schema.
            title, reason = TITLES.get(name, name), _reason(error)
            raise DataError(
                f"{path}: cannot be read as examples of {title} ({reason}); correct it"
                if path is not None
                else f"{title}: cannot be had from the hub ({reason}); check the network, "
                f"or give its file with --data {name}=FILE"
            ) from error
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
    """Return how a task's definition changes; `folder` is for files that are needed while it is loaded."""
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


def measure(answering: Answering, name: str, tasks: dict[str, Any], limit: int | None) -> TaskScore:
    """Return the score of a task or group on the first `limit` examples of each task; all processes call it.

    Raise DataError if the window does not hold an answer, or lm-eval cannot measure the task on such a model.
    """
    answering.truncated_inputs = answering.asked = 0
    set_torch_seed(DEFAULT_OTHER_SEED)
    with quiet():
        try:
            results = evaluate(answering, tasks, limit=limit, log_samples=False)
        except (AssertionError, ValueError, NotImplementedError) as error:
            raise DataError(f"{name}: lm-eval cannot measure it ({_reason(error)}); leave it out") from error
    scores = results["results"][name]
    numbers = {key.removesuffix(",none"): float(x) for key, x in scores.items() if "," in key and x != "N/A"}
    found: dict[str, Any] = {"examples": scores["sample_len"], "truncated_inputs": answering.truncated_inputs}
    if "acc" in numbers:
        found |= {"acc": numbers["acc"], "stderr": numbers.get("acc_stderr")}
    else:
        found["metrics"] = numbers
    found |= {"acc_norm": numbers["acc_norm"]} if "acc_norm" in numbers else {}
    found |= {"shots": shots} if (shots := results["n-shot"].get(name)) else {}
    return TaskScore.model_validate(found)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep lm-eval's bars and warnings off the terminal; rich finds it behind the proxy, for the progress bar."""
    logger = logging.getLogger("lm_eval")
    level, terminal = logger.level, getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(cast(IO[str], FileProxy(Console(quiet=True), terminal))):
            yield
    finally:
        logger.setLevel(level)


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""Tasks by name, with the prompts, truncation and metrics of the installed lm-eval, on its data sets or local files."""

import contextlib
import difflib
import functools
import importlib.metadata
import io
import json
import logging
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
import numpy as np
import yaml
from lm_eval.evaluator import evaluate

from pi_lora.errors import DataError
from pi_lora.evaluation.benchmarks.answering import Answering
from pi_lora.evaluation.benchmarks.local_data import FORMATS, TITLES, articles, read_examples
from pi_lora.evaluation.results import TaskScore

# lm-eval's `race` is RACE-H, and its data set has no other part. RACE-M is the same task on the authors' middle school
# part, whose rows hold a question each and not an article.
OURS = {"race_high": "race", "race_middle": "race"}
RACE_MIDDLE = {"dataset_path": "ehovy/race", "dataset_name": "middle"}
# lm-eval's default seeds, of Python, NumPy and the choice of few-shot examples.
SEEDS = (0, 1234, 1234)


def version() -> str:
    """Return that of lm-eval."""
    return importlib.metadata.version("lm_eval")


@functools.cache
def definitions() -> dict[str, Path | None]:
    """Return the file of each task of lm-eval by name, and None for each group and tag.

    lm-eval's own index parses 14,000 YAML files and takes twenty times as long.
    """
    keys = re.compile(r'^"?(task|group|tag)"? *: *(?:"?([^"#\n]+?)"? *(?:#.*)?$|((?:\n *- .*)+)|)', re.MULTILINE)
    tasks: dict[str, Path | None] = {}
    collections: set[str] = set()
    for file in sorted(Path(lm_eval.tasks.__file__).parent.rglob("*")):
        if file.suffix in (".yaml", "") and file.is_file():
            for key, name, names in keys.findall(file.read_text(encoding="utf-8")):
                if key != "task":
                    collections.update(re.findall(r"[^\s\"'\[\],-][^\s\"'\[\],]*", name + names))
                elif name and file.suffix:
                    tasks.setdefault(name, file)
    return dict.fromkeys(collections) | tasks | {name: tasks[base] for name, base in OURS.items()}


def check_names(names: Sequence[str]) -> None:
    """Raise DataError unless lm-eval has a task, group or tag of each name."""
    for name in names:
        if name not in definitions():
            close = difflib.get_close_matches(name, [*TITLES, *definitions()])
            hint = f"did you mean {' or '.join(close)}?" if close else "lm-eval ls tasks lists them"
            raise DataError(f"--tasks: {name}: no such benchmark in lm-eval {version()}; {hint}")


def load_tasks(name: str, path: Path | None) -> dict[str, Any]:
    """Return lm-eval's tasks and groups under a name, on its data set from the hub, or on a file or folder of ours.

    Raises:
        DataError: the data set cannot be had, or a file has another format.
    """
    file = definitions()[name]
    if file is None and path is not None:
        raise DataError(f"--data: {name}={path}: {name} is a group of several tasks; name one of its tasks")
    with tempfile.TemporaryDirectory() as folder, quiet():
        if file is not None:
            _define(Path(folder), name, file, path)
        manager = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=file is None)
        random.seed(SEEDS[0])
        np.random.seed(SEEDS[1])
        try:
            loaded = dict(manager.load([name]))
        except Exception as error:
            # `datasets` raises a dozen kinds for what a user can mend: offline, gone, gated, of another schema.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            title = TITLES.get(name, name)
            if path is not None:
                raise DataError(f"{path}: cannot be read as examples of {title} ({reason}); correct it") from error
            raise DataError(
                f"{title}: cannot be had from the hub ({reason}); check the network, "
                f"or give its file with --data {name}=FILE"
            ) from error
        for task in loaded["tasks"].values():
            # As lm_eval.simple_evaluate, which this replaces: it gathers the versions of everything for seconds.
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=SEEDS[2])
    return loaded


def measure(answering: Answering, name: str, tasks: dict[str, Any], limit: int | None) -> TaskScore:
    """Return the score of a task or group on the first `limit` examples of each task.

    All processes call it, each computes its share of the batches, and all return the same.

    Raises:
        DataError: the window does not hold an answer, or lm-eval cannot measure the task on such a model.
    """
    before, answering.stderr = answering.truncated_inputs, sys.stderr
    with quiet():
        try:
            results = evaluate(answering, tasks, limit=limit, log_samples=False)
        except (AssertionError, ValueError, NotImplementedError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(f"{name}: lm-eval cannot measure it ({reason}); leave it out") from error
    scores, shots = results["results"][name], results["n-shot"].get(name)
    numbers = {key.removesuffix(",none"): float(x) for key, x in scores.items() if "," in key and x != "N/A"}
    found: dict[str, Any] = {"acc": numbers["acc"], "stderr": numbers.get("acc_stderr")} if "acc" in numbers else {}
    found |= {"examples": scores["sample_len"], "truncated_inputs": answering.truncated_inputs - before}
    if "acc" not in numbers:
        found["metrics"] = numbers
    if "acc_norm" in numbers:
        found["acc_norm"] = numbers["acc_norm"]
    if shots:
        found["shots"] = shots
    return TaskScore.model_validate(found)


def race_articles(questions: Any) -> Any:
    """Turn a `datasets.Dataset` of RACE's questions into one of articles; task files name this function."""
    return type(questions).from_list(articles(questions))


def _define(folder: Path, name: str, file: Path, path: Path | None) -> None:
    """Write a task file that includes lm-eval's own and changes where its examples come from."""
    content: dict[str, Any] = {"include": str(file), "task": name}
    own_rows = ""
    if path is not None:
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
        if data != path:
            content |= {"test_split": "test", "validation_split": None, "training_split": None, "fewshot_split": None}
        # A folder: of `json` and a file, `datasets` (5.2) would tell its servers that it was used.
        settings = {"cache_dir": str(folder / "cache"), "keep_in_memory": True}
        content |= {"dataset_path": str(data), "dataset_name": None, "dataset_kwargs": settings}
    elif name == "race_middle":
        content |= RACE_MIDDLE
        own_rows = f"process_docs: !function {__name__}.race_articles\n"
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content) + own_rows, encoding="utf-8")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep lm-eval from the terminal: its bars, and warnings of what is as it should be."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)

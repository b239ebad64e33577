"""Tasks of the installed lm-eval with their examples, from the hub or from local files of the data set's schema."""

import difflib
import random
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
import numpy as np
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

from pi_lora.errors import DataError, first_line
from pi_lora.evaluation.benchmarks.lm import quiet
from pi_lora.evaluation.benchmarks.scores import TITLES
from pi_lora.recipe.evaluation import BenchmarksOptions
from pi_lora.types import Json

FOLDERS = ("super_glue/boolq", "piqa", "race", "winogrande")
# lm-eval's `race` is RACE-H, and its data set has no other part. RACE-M is the same task on the authors' middle school
# part, whose rows hold a question each and not an article.
OURS = {"race_high": "race", "race_middle": "race"}


@cache
def manager(paper: bool) -> lm_eval.tasks.TaskManager:
    """Return lm-eval's tasks: with `paper` those of the paper, since the index of all 14,000 takes ten seconds."""
    root = Path(lm_eval.tasks.__file__).parent
    folders: list[str | Path] = [root / folder for folder in FOLDERS]
    return lm_eval.tasks.TaskManager(include_path=folders if paper else None, include_defaults=not paper)


def find_tasks(options: BenchmarksOptions) -> dict[str, Json]:
    """Return what lm-eval measures, by name, with its examples. Raise DataError if there is no such task, group or tag,
    or its file or data set is missing or of another schema.
    """
    for name in options.tasks:
        if name not in TITLES and name not in (known := manager(paper=False).all_tasks):
            hint = " or ".join(difflib.get_close_matches(name, {*TITLES, *known})) or "one that lm-eval ls tasks lists"
            raise DataError(
                f"--tasks: {name}: no such benchmark in lm-eval {lm_eval.__version__}; did you mean {hint}?"
            )
    files: dict[str, Path] = {}
    for given in options.data:
        name, _, path = given.partition("=")
        if name not in options.tasks:
            raise DataError(f"--data: {given}: is not TASK=FILE with one of the --tasks; correct it")
        files[name] = Path(path).expanduser()
    tasks: dict[str, Json] = {}
    for name in options.tasks:
        tasks |= load_tasks(name, files.get(name))
    return tasks


def load_tasks(name: str, file: Path | None) -> dict[str, Json]:
    """Return what is measured for a name, on the examples in `file` or the hub's: a task, a group with a score of its
    own, or else each task of the group. Raise DataError if the examples cannot be read.
    """
    tasks, base = manager(paper=name in TITLES), OURS.get(name, name)
    changes = _race_middle() if name == "race_middle" else {}
    if file:
        reader = file.suffix.removeprefix(".").replace("jsonl", "json")
        splits = dict.fromkeys(("training_split", "validation_split", "fewshot_split")) | {"test_split": "test"}
        files = {"data_files": {"test": str(file)}}
        changes |= {"dataset_path": reader, "dataset_name": None, "dataset_kwargs": files} | splits
    # As lm_eval.simple_evaluate, which also asks several programs for their versions.
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    try:
        with quiet():
            loaded = tasks.load([{"group": name, "task": [{"task": base, **changes}]}] if changes else base)
    except Exception as error:  # `datasets` and jinja raise a dozen kinds for what a user can correct
        cause = f"{file or name}: cannot be read as examples of {name} ({first_line(error)})"
        raise DataError(f"{cause}; correct the file, or check the network") from error
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    group = loaded["groups"].get(name)
    if group is not None and group.has_aggregation:
        return {name: dict(loaded)}
    named = {name if key == base else key: task for key, task in loaded["tasks"].items()}
    return {part: {"tasks": {part: task}} for part, task in named.items()}


def _race_middle() -> Json:
    def process_docs(questions: Any) -> Any:
        return questions.from_list(articles(questions))

    return {"dataset_path": "ehovy/race", "dataset_name": "middle", "process_docs": process_docs}


def articles(questions: Any) -> list[Json]:
    """Put RACE's questions together as lm-eval's task reads them: a row per article, problems as a Python literal.

    >>> rows = [{"article": "A", "question": q, "options": list("wxyz"), "answer": "B"} for q in ("1?", "2?")]
    >>> [(row["article"], row["problems"].count("question")) for row in articles(rows)]
    [('A', 2)]
    """
    problems: dict[str, list[Json]] = {}
    for row in questions:
        problems.setdefault(row["article"], []).append({key: row[key] for key in ("question", "answer", "options")})
    return [{"article": article, "problems": repr(asked)} for article, asked in problems.items()]

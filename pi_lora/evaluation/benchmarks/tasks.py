"""Tasks of the installed lm-eval with their examples, from the hub or from local files of the data set's schema."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval.tasks

from pi_lora.errors import DataError, first_line
from pi_lora.evaluation.harness import check_names, load_tasks
from pi_lora.types import Json

# lm-eval's folders and names of the paper's tasks. Its `race` is RACE-H, and its data set has no other part. RACE-M is
# the same task on the authors' middle school part, whose rows hold a question each and not an article.
FOLDERS = ("super_glue/boolq", "piqa", "race", "winogrande")
PAPERS = {"boolq": "boolq", "piqa": "piqa", "race_middle": "race", "race_high": "race", "winogrande": "winogrande"}


@cache
def manager(paper: bool) -> lm_eval.tasks.TaskManager:
    """Return lm-eval's tasks: with `paper` those of the paper, since the index of all 14,000 takes ten seconds."""
    root = Path(lm_eval.tasks.__file__).parent
    folders: list[str | Path] = [root / folder for folder in FOLDERS]
    return lm_eval.tasks.TaskManager(include_path=folders if paper else None, include_defaults=not paper)


def find_tasks(names: Sequence[str], data: Sequence[str] = ()) -> dict[str, Any]:
    """Return lm-eval's tasks by name, and every task of a group, on the examples of the hub or of `data`, which are
    TASK=FILE. Raise DataError if there is no such task, group or tag, or its examples are missing or of another schema.
    """
    check_names(names, PAPERS if PAPERS.keys() >= set(names) else {*PAPERS, *manager(paper=False).all_tasks})
    files = {name: Path(path).expanduser() for name, _, path in (given.partition("=") for given in data)}
    if unknown := ", ".join(files.keys() - set(names)):
        raise DataError(f"--data: {unknown}: is not TASK=FILE with one of the --tasks; correct it")
    return {part: task for name in names for part, task in _load(name, files.get(name)).items()}


def _load(name: str, file: Path | None) -> dict[str, Any]:
    base = PAPERS.get(name, name)
    changes: Json = {}
    if name == "race_middle":
        changes = {"dataset_path": "ehovy/race", "dataset_name": "middle", "process_docs": articles}
    if file:
        reader = file.suffix.removeprefix(".").replace("jsonl", "json")
        splits = dict.fromkeys(("training_split", "validation_split", "fewshot_split")) | {"test_split": "test"}
        files = {"data_files": {"test": str(file)}}
        changes |= {"dataset_path": reader, "dataset_name": None, "dataset_kwargs": files} | splits
    asked = {"group": name, "task": [{"task": base, **changes}]} if changes else base
    try:
        tasks = load_tasks(manager(paper=name in PAPERS), asked)
    except Exception as error:  # `datasets` and jinja raise a dozen kinds for what a user can correct
        cause = f"{file or name}: cannot be read as examples of {name} ({first_line(error)})"
        raise DataError(f"{cause}; correct the file, or check the network") from error
    return {name if part == base else part: task for part, task in tasks.items()}


def articles(questions: Any) -> Any:
    """Put RACE's questions together as lm-eval's task reads them: a row per article, problems as a Python literal.

    >>> from datasets import Dataset
    >>> rows = [{"article": "A", "question": q, "options": list("wxyz"), "answer": "B"} for q in ("1?", "2?")]
    >>> [(row["article"], row["problems"].count("question")) for row in articles(Dataset.from_list(rows))]
    [('A', 2)]
    """
    problems: dict[str, list[Json]] = {}
    for row in questions:
        problems.setdefault(row["article"], []).append({key: row[key] for key in ("question", "answer", "options")})
    return questions.from_list([{"article": name, "problems": repr(asked)} for name, asked in problems.items()])

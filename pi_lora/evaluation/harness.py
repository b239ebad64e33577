"""lm-eval, as benchmarks and RULER use it: a loaded model as lm-eval takes one, with the processes of this run as ranks
and a cache of answers; and the tasks of the installed lm-eval with their examples.
"""

import copy
import math
import os
import random
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
import numpy as np
import yaml
from accelerate import Accelerator
from lm_eval.api.model import CachingLM
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from pi_lora.distributed import all_gather_objects, rank, world_size
from pi_lora.errors import DataError, first_line
from pi_lora.evaluation.forward import check_numbers
from pi_lora.evaluation.measurement import Session
from pi_lora.models.model import Model
from pi_lora.models.weights import quiet_loading
from pi_lora.recipe.evaluation import BenchmarksOptions, RulerOptions
from pi_lora.recipe.section import Section
from pi_lora.types import Json

VERSION = lm_eval.__version__
FOLDER = Path(lm_eval.tasks.__file__).parent
# lm-eval's folders of the paper's tasks, which end with its names of them. Its `race` is RACE-H, and its data set has
# no other part. RACE-M is the same task on the authors' middle school part, whose rows hold a question each and not an
# article.
PAPERS = {
    "boolq": "super_glue/boolq",
    "piqa": "piqa",
    "race_middle": "race",
    "race_high": "race",
    "winogrande": "winogrande",
}
RULER = FOLDER / "ruler"
RULER_TASKS: tuple[str, ...] = tuple(yaml.safe_load((RULER / "ruler.yaml").read_text(encoding="utf-8"))["task"])
# In tokens. RULER's beginnings of answers, and the answers of `ruler_fwe`, are not in lm-eval's count.
ROOM = 128
# In tokens. In shorter windows lm-eval (0.4.13, issue 2963) may look for a shorter prompt forever.
SHORTEST = {"ruler_vt": 1536, "ruler_cwe": 1536, "ruler_fwe": 768}
# `ruler_cwe` draws from a generator of its own, which is seeded when lm-eval executes this module.
WORDS_MODULE = "lm_eval.tasks.ruler.cwe_utils"
# Tasks of RULER whose prompts need not hold the answer.
QUESTIONS = ("ruler_qa_squad", "ruler_qa_hotpot")


class ModelCalls:
    """What lm-eval calls of a model. It would tie the embeddings of a torch module again (`HFLM.__init__` of lm_eval
    0.4.13), which discards embeddings that PEFT trains apart from their head.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, ids: Any) -> Any:
        """Return the model's outputs for token ids (rows, tokens)."""
        return self.model(ids)


class RankedLM(HFLM):
    """lm-eval's model for transformers, given a model that is loaded, in every process of this run. Inputs are cut to
    `window` tokens. Special tokens in texts are text.
    """

    def __init__(self, loaded: Model, window: int, batch_size: int, options: Section, session: Session) -> None:
        tokenizer = copy.deepcopy(loaded.tokenizer)  # lm-eval adds a padding token where there is none
        tokenizer.model_max_length = sys.maxsize  # and cuts inputs itself
        tokenizer.split_special_tokens = True
        calls: Any = ModelCalls(loaded.model)
        with quiet():
            super().__init__(calls, tokenizer=tokenizer, max_length=window, batch_size=batch_size)
        self.loaded, self.session = loaded, session
        decided_by = {**options.model_dump(exclude={"batch_size", "tasks"}), "lm_eval": VERSION}
        folder = session.journal(loaded, decided_by)
        self.answers = str(folder / f"answers-{self.rank}.db") if folder else ":memory:"
        if self.world_size > 1:
            self.accelerator = Accelerator()

    @property
    def rank(self) -> int:
        """Which process this is."""
        return rank()

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return world_size()

    def evaluate(self, name: str, task: Any, limit: int | None) -> Json:
        """Return lm-eval's scores of a task on the first `limit` examples, its `shots`, and the `samples`: all examples
        with their metrics. All processes call it. Answers are kept as soon as they are known, and not computed again.
        Raise DataError if there are fewer examples than processes: lm-eval (0.4.13) would wait forever.
        """
        examples = len(task.eval_docs)
        if min(examples, limit or examples) < self.world_size:
            raise DataError(f"{name}: fewer examples than processes; start fewer processes")
        lm: Any = CachingLM(self, self.answers)
        self.task, self.note, self.kept, self.answered = task, f"{name} at {self.max_length:,}", self.cache_hook, 0
        self.set_cache_hook(self)
        tasks: Any = {"tasks": {name: task}}
        with closing(lm.dbdict), quiet():
            results: Any = evaluate(lm, tasks, limit=limit)
        scores = []
        if results:  # in the first process
            samples = sorted(results["samples"][name], key=lambda sample: int(sample["doc_id"]))
            scores = [{**results["results"][name], "shots": results["n-shot"][name] or 0, "samples": samples}]
        return all_gather_objects(scores)[0]

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        """Keep the answer `res` to the request `req` of the method `attr`: lm-eval calls this with every answer."""
        check_numbers(self.loaded, isinstance(res, str) or math.isfinite(res[0]))
        self.answered += 1
        self.session.progress(self.answered, len(self.task.instances), self.note)
        self.kept.add_partial(attr, req, res)


def load_tasks(manager: TaskManager, spec: Any, seed: int = 0) -> dict[str, Any]:
    """Return lm-eval's task of a name or config with its examples, or every task of a group, seeded as
    `lm_eval.simple_evaluate` does, which also asks several programs for their versions.
    """
    random.seed(seed)
    np.random.seed(DEFAULT_OTHER_SEED + seed)
    with quiet():
        tasks: dict[str, Any] = manager.load([spec])["tasks"]
    for task in tasks.values():
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return tasks


@cache
def manager(folder: str = "") -> TaskManager:
    """Return lm-eval's tasks, or those of one folder: the index of all 14,000 takes ten seconds."""
    return TaskManager(include_path=FOLDER / folder, include_defaults=False)


def find_benchmarks(options: BenchmarksOptions) -> dict[str, Any]:
    """Return lm-eval's tasks by name, and every task of a group, on the examples of the hub or of files. Raise
    DataError if there is no such task, group or tag, if its examples are missing or of another schema, or if lm-eval
    gives no accuracy for it.
    """
    files = dict(given.partition("=")[::2] for given in options.data)
    if unknown := ", ".join(files.keys() - set(options.tasks)):
        raise DataError(f"--data: {unknown}: is not TASK=FILE with one of the --tasks; correct it")
    tasks: dict[str, Any] = {}
    for name in options.tasks:
        base, file = Path(PAPERS.get(name, name)).name, files.get(name)
        changes: Json = {}
        if name == "race_middle":
            changes = {"dataset_path": "ehovy/race", "dataset_name": "middle", "process_docs": articles}
        if file:
            reader = Path(file).suffix.removeprefix(".").replace("jsonl", "json")
            splits = dict.fromkeys(("training_split", "validation_split", "fewshot_split")) | {"test_split": "test"}
            data = {"data_files": {"test": file}}
            changes |= {"dataset_path": reader, "dataset_name": None, "dataset_kwargs": data} | splits
        spec = {"group": name, "task": [{"task": base, **changes}]} if changes else base
        try:
            named = load_tasks(manager(PAPERS.get(name, "")), spec)
        except Exception as error:  # `datasets` and jinja raise a dozen kinds for what a user can correct
            wrong = f"{file}: cannot be read as examples of {name}" if file else f"--tasks: {name}"
            raise DataError(
                f"{wrong} ({first_line(error)}); correct the task or the file, or check the network"
            ) from error
        for part, task in named.items():
            # lm-eval takes a column that is missing for the answer itself.
            if file and task.doc_to_target(next(iter(task.eval_docs))) == (column := task.config.doc_to_target):
                raise DataError(f"{file}: has no column {column}; convert it to the schema of {part} on the hub")
            if "acc" not in task.aggregation() or task.config.filter_list:
                raise DataError(f"--tasks: {part}: lm-eval gives no accuracy for it; leave it out")
            tasks[name if part == base else part] = task
    return tasks


def articles(questions: Any) -> Any:
    """Put RACE's questions together as lm-eval's task reads them: a row per article, problems as a Python literal.

    >>> from datasets import Dataset
    >>> rows = [{"article": "A", "question": q, "options": list("wxyz"), "answer": "B"} for q in ("1?", "2?")]
    >>> [(row["article"], row["problems"].count("question")) for row in articles(Dataset.from_list(rows))]
    [('A', 2)]
    """
    problems: dict[str, list[Json]] = {}
    for row in questions:
        article = row.pop("article")
        problems.setdefault(article, []).append(row)
    return questions.from_list([{"article": name, "problems": repr(rows)} for name, rows in problems.items()])


def save_tokenizer(tokenizer: Any, folder: str) -> None:
    """Save a tokenizer where lm-eval loads it, without the code that its config may name: lm-eval would execute it."""
    plain = copy.deepcopy(tokenizer)
    plain.init_kwargs.pop("auto_map", None)
    plain.save_pretrained(folder)


def ruler_task(name: str, options: RulerOptions, lm: RankedLM, tokenizer: str) -> tuple[Any, int]:
    """Return a task of RULER as lm-eval makes it: 500 prompts for the window of `lm`, counted by the `tokenizer` in a
    folder; and the tokens of its longest prompt with what is generated after it. Raise DataError if its texts are
    missing, or one of its first prompts does not fit the window with that, or lacks its answer.

    The prompts are those of `lm_eval run --seed SEED,SEED+1234,SEED --metadata '{"max_seq_lengths": [window - ROOM]}'`.
    """
    window = lm.max_length

    def unsuitable(reason: str) -> DataError:
        return DataError(f"--tasks: {name} in {window} tokens: {reason}; leave it out, or choose another window")

    if window < SHORTEST.get(name, 0):
        raise unsuitable(f"needs {SHORTEST[name]}")
    metadata: Any = {"max_seq_lengths": [window - ROOM], "tokenizer": tokenizer}
    tasks = TaskManager(include_path=RULER, include_defaults=False, metadata=metadata)
    sys.modules.pop(WORDS_MODULE, None)
    try:
        task = load_tasks(tasks, name, options.seed)[name]
        with quiet():
            task.build_all_requests(limit=options.samples, rank=0, world_size=1)
    except (LookupError, OSError, ValueError) as error:  # no example fits, or no network
        raise unsuitable(first_line(error)) from error
    longest = max(len(lm.tok_encode(each.args[0])) + each.args[1]["max_gen_toks"] for each in task.instances)
    if not window / 2 <= longest <= window:
        raise unsuitable(f"the longest prompt and its answer take {longest}")
    for each in task.instances:
        answers = [] if name in QUESTIONS else each.doc["outputs"]
        if not each.doc["outputs"] or not all(str(answer) in each.args[0] for answer in answers):
            raise unsuitable("a prompt lacks its answer")
    return task, longest


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what lm-eval and transformers print off the terminal, bars and warnings; our own bar has its own stream."""
    with quiet_loading(), open(os.devnull, "w") as nothing, redirect_stderr(nothing), redirect_stdout(nothing):
        yield

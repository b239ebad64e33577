"""The use of lm-eval in benchmarks and RULER: a loaded model behind lm-eval's interface, with the processes of this run
as ranks and a cache of answers, and the tasks of the installed lm-eval with their examples.
"""

import copy
import math
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
import numpy as np
import torch
import yaml
from accelerate import Accelerator
from lm_eval.api.model import CachingLM
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from pi_lora.data.chats import chat_prompt, template_tokens
from pi_lora.data.documents import suffix_of
from pi_lora.data.tokens import strip_eos
from pi_lora.distributed import all_gather_objects, rank, world_size
from pi_lora.errors import DataError, first_line
from pi_lora.evaluation.forward import check_numbers
from pi_lora.evaluation.measurement import Session
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.quiet import quiet_loading
from pi_lora.recipe.evaluation import BenchmarksOptions, PromptOptions, RulerOptions
from pi_lora.types import Json

VERSION = lm_eval.__version__
FOLDER = Path(lm_eval.tasks.__file__).parent
# The folders of the paper's tasks in lm-eval, whose last parts are the names of the tasks there. Its `race` is RACE-H,
# the only part of its data set. RACE-M is the same task on the authors' middle school part, which has a row for each
# question instead of each article.
PAPERS = {
    "boolq": "super_glue/boolq",
    "piqa": "piqa",
    "race_middle": "race",
    "race_high": "race",
    "winogrande": "winogrande",
}
RULER = FOLDER / "ruler"
RULER_TASKS: tuple[str, ...] = tuple(yaml.safe_load((RULER / "ruler.yaml").read_text(encoding="utf-8"))["task"])
# Tokens of a window that no prompt takes: lm-eval does not count the answer prefixes, or the answers of `ruler_fwe`.
RESERVED_TOKENS = 128
# Tokens by task, and of all others: 128 of them are generated. In shorter windows lm-eval (0.4.13, issue 2963) may look
# for a shorter prompt forever.
MIN_WINDOWS = {"ruler_vt": 1536, "ruler_cwe": 1536, "ruler_fwe": 768, "niah_multikey_3": 768}
MIN_WINDOW = 400
# `ruler_cwe` draws from a random generator that is seeded when lm-eval executes this module.
WORDS_MODULE = "lm_eval.tasks.ruler.cwe_utils"
# Tasks of RULER with needles in essays.
ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery", "niah_multivalue")
# Tasks of RULER whose prompts need not contain the answer.
QUESTIONS = ("ruler_qa_squad", "ruler_qa_hotpot")


class ModelCalls:
    """A model that is no torch module. lm-eval would tie the embeddings of a torch module again (`HFLM.__init__` of
    lm_eval 0.4.13), which discards embeddings that PEFT trains apart from the head.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, ids: Any) -> Any:
        """Return the model's outputs for token ids (rows, tokens)."""
        return self.model(ids)


class RankedLM(HFLM):
    """The transformers model of lm-eval around a loaded model, in every process of this run. Inputs are truncated to
    `window` tokens. Special tokens in texts are read as text, unless a chat template writes them.
    """

    def __init__(
        self, loaded: LoadedModel, window: int, batch_size: int, options: PromptOptions, session: Session
    ) -> None:
        tokenizer = copy.deepcopy(loaded.tokenizer)  # lm-eval adds a padding token where there is none
        tokenizer.model_max_length = sys.maxsize  # and truncates inputs itself
        self.chat = options.chat is True
        tokenizer.split_special_tokens = not self.chat
        calls: Any = ModelCalls(loaded.module)
        with quiet():
            super().__init__(calls, tokenizer=tokenizer, max_length=window, batch_size=batch_size)
        self.loaded = loaded
        self.session = session
        decided_by = {**options.model_dump(exclude={"batch_size", "tasks"}), "lm_eval": VERSION}
        folder = session.journal(loaded, decided_by)
        self.answers_database = str(folder / f"answers-{self.rank}.db") if folder else ":memory:"
        if self.world_size > 1:
            self.accelerator = Accelerator()

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return rank()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return world_size()

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt of `chat_prompt`. A description of the task stands in the turn of the user."""
        contents = [turn["content"] for turn in chat_history]
        beginning = "" if add_generation_prompt else contents.pop()
        return chat_prompt(self.tokenizer, "\n\n".join(contents), beginning)

    @property
    def length(self) -> int:
        """The tokens that RULER may fill, apart from the answer and the chat template."""
        template = template_tokens(self.tokenizer) if self.chat else 0
        return int(self.max_length) - RESERVED_TOKENS - template

    def tok_encode(self, *arguments: Any, **options: Any) -> list[int]:
        """Return the tokens of a text. lm-eval would let an EOS that the tokenizer adds stand before the answer."""
        ids: list[int] = strip_eos(super().tok_encode(*arguments, **options), self.tokenizer.eos_token_id)
        return ids

    def tok_batch_encode(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of prompts, padded on the left, and their mask, without an EOS that the tokenizer adds."""
        ids, mask = super().tok_batch_encode(*arguments, **options)
        end = -1 if (ids[:, -1] == self.tokenizer.eos_token_id).all() else None
        return ids[:, :end], mask[:, :end]

    def evaluate(self, name: str, task: Any, limit: int | None) -> Json:
        """Return lm-eval's scores of a task on the first `limit` examples, the `shots`, and the `samples`: all examples
        with their metrics. All processes call it. Answers are stored at once, and never computed again.

        Raise DataError if there are fewer examples than processes: lm-eval (0.4.13) would wait forever.
        """
        examples = len(task.eval_docs)
        if min(examples, limit or examples) < self.world_size:
            raise DataError(f"{name}: fewer examples than processes; start fewer processes")
        lm: Any = CachingLM(self, self.answers_database)
        self.task = task
        self.note = f"{name} at {self.max_length:,}"
        self.answered = 0
        # `CachingLM` has set the hook that stores answers; this object takes its place and passes answers on.
        self.storing_hook = self.cache_hook
        self.set_cache_hook(self)
        tasks: Any = {"tasks": {name: task}}
        with closing(lm.dbdict), quiet():
            results: Any = evaluate(lm, tasks, limit=limit, apply_chat_template=self.chat)
        scores = []
        if results:  # in the first process
            samples = sorted(results["samples"][name], key=lambda sample: int(sample["doc_id"]))
            shots = results["n-shot"][name] or 0
            scores.append({**results["results"][name], "shots": shots, "samples": samples})
        return all_gather_objects(scores)[0]

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        """Store the answer `res` to the request `req` of the method `attr`: lm-eval calls this with every answer."""
        check_numbers(self.loaded, isinstance(res, str) or math.isfinite(res[0]))
        self.answered += 1
        self.session.progress(self.answered, len(self.task.instances), self.note)
        self.storing_hook.add_partial(attr, req, res)


def load_tasks(manager: TaskManager, spec: Any, seed: int = 0) -> dict[str, Any]:
    """Return the lm-eval tasks of a name, config or group, with their examples. Seeds are set as in
    `lm_eval.simple_evaluate`, which also runs several programs for their versions.
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
    """Return the tasks of lm-eval, or of one folder there: the index of all 14,000 tasks takes ten seconds."""
    return TaskManager(include_path=FOLDER / folder, include_defaults=False)


def unknown_benchmarks(names: Iterable[str]) -> list[str]:
    """Return the names that are no task, group or tag of lm-eval."""
    return [name for name in names if _name_in_lm_eval(name) not in manager(PAPERS.get(name, "")).task_index]


def ruler_problems(tasks: Sequence[str], window: int) -> Iterator[str]:
    """Yield what keeps tasks of RULER from being measured in a window of so many tokens."""
    if unknown := ", ".join(set(tasks).difference(RULER_TASKS)):
        yield f"{unknown}: no such task of RULER; choose from {', '.join(RULER_TASKS)}"
    needed = {name: MIN_WINDOWS.get(name, MIN_WINDOW) for name in tasks}
    too_long = ", ".join(f"{name} needs {tokens}" for name, tokens in needed.items() if tokens > window)
    if too_long:
        yield f"a window of {window} tokens is too short ({too_long}); leave them out, or choose longer windows"


def check_texts(tasks: Sequence[str]) -> None:
    """Read the texts that tasks of RULER take from the network. Raise DataError for the first that cannot be read."""
    for name in tasks:
        try:
            if name in ESSAYS:
                from lm_eval.tasks.ruler.prepare_niah import get_haystack

                get_haystack("essay")
            if name in QUESTIONS:
                from lm_eval.tasks.ruler import qa_utils

                read = qa_utils.read_squad if name == QUESTIONS[0] else qa_utils.read_hotpotqa
                read()
        except (OSError, ValueError) as error:
            reason = first_line(error)
            raise DataError(f"--tasks: {name}: has no texts ({reason}); leave it out, or check the network") from error


def find_benchmarks(options: BenchmarksOptions) -> dict[str, Any]:
    """Return lm-eval tasks by name, and every task of a group, on the examples of the hub or of files. Raise DataError
    if a task, group or tag does not exist, if examples are missing or have another schema, or if lm-eval gives no
    accuracy for a task.
    """
    benchmarks: dict[str, Any] = {}
    for name in options.tasks:
        for task_name, task in _load_benchmark(name, options.files.get(name)).items():
            benchmarks[name if task_name == _name_in_lm_eval(name) else task_name] = task
    return benchmarks


def _name_in_lm_eval(name: str) -> str:
    return Path(PAPERS.get(name, name)).name


def _load_benchmark(name: str, file: str | None) -> dict[str, Any]:
    """Return the lm-eval task of a name, or every task of a group, on the examples of the hub or of a file."""
    changes: Json = {}
    if name == "race_middle":
        changes = {"dataset_path": "ehovy/race", "dataset_name": "middle", "process_docs": articles}
    if file:
        kind = suffix_of(file).removeprefix(".")
        changes |= {
            "dataset_path": "json" if "json" in kind else kind,
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": file}},
            "training_split": None,
            "validation_split": None,
            "fewshot_split": None,
            "test_split": "test",
        }
    spec: Any = _name_in_lm_eval(name)
    if changes:
        spec = {"group": name, "task": [{"task": spec, **changes}]}
    try:
        tasks = load_tasks(manager(PAPERS.get(name, "")), spec)
    except Exception as error:  # `datasets` and jinja raise a dozen kinds for mistakes that a user can correct
        problem = f"{file}: cannot be read as rows (.jsonl, .csv, .parquet) of {name}" if file else f"--tasks: {name}"
        raise DataError(
            f"{problem} ({first_line(error)}); correct the task or the file, or check the network"
        ) from error
    for task_name, task in tasks.items():
        if file:
            _check_answers(task, file, task_name)
        if "acc" not in task.aggregation() or task.config.filter_list:
            raise DataError(f"--tasks: {task_name}: lm-eval gives no accuracy for it; leave it out")
    return tasks


def _check_answers(task: Any, file: str, name: str) -> None:
    """Raise DataError if an example of a file lacks its answer, as in test splits, whose answers are not published."""
    column = task.config.doc_to_target
    for number, example in enumerate(task.eval_docs, 1):
        answer = task.doc_to_target(example)
        # Without the column, lm-eval takes its name for the answer.
        if answer == column:
            raise DataError(f"{file}: has no column {column}; convert it to the schema of {name} on the hub")
        if not isinstance(answer, str | int) or answer in ("", -1):
            raise DataError(f"{file}:{number}: has no answer ({answer}); name a file with answers")


def articles(questions: Any) -> Any:
    """Group RACE's questions as lm-eval's task reads them: a row per article, problems as a Python literal.

    >>> from datasets import Dataset
    >>> rows = [{"article": "A", "question": q, "options": list("wxyz"), "answer": "B"} for q in ("1?", "2?")]
    >>> [(row["article"], row["problems"].count("question")) for row in articles(Dataset.from_list(rows))]
    [('A', 2)]
    """
    problems: dict[str, list[Json]] = {}
    for row in questions:
        article = row.pop("article")
        problems.setdefault(article, []).append(row)
    articles_with_problems = [{"article": article, "problems": repr(rows)} for article, rows in problems.items()]
    return questions.from_list(articles_with_problems)


def save_tokenizer(tokenizer: Any, folder: str) -> None:
    """Save a tokenizer for lm-eval, without the Python code that a config may name: lm-eval would execute it."""
    plain = copy.deepcopy(tokenizer)
    plain.init_kwargs.pop("auto_map", None)
    plain.save_pretrained(folder)


def ruler_task(name: str, options: RulerOptions, lm: RankedLM, tokenizer_folder: str) -> tuple[Any, int]:
    """Return a task of RULER for the window of `lm`, and the tokens of the longest prompt and the text generated after
    it. lm-eval makes 500 prompts and counts tokens with the tokenizer in a folder.

    Raise DataError if texts are missing, or if a prompt does not fit the window or lacks the answer. The prompts are
    the same as those of `lm_eval run --seed SEED,SEED+1234,SEED --metadata '{"max_seq_lengths": [window - 128]}'`.
    """
    window = lm.max_length

    def unsuitable(reason: str) -> DataError:
        return DataError(f"--tasks: {name} in {window} tokens: {reason}; leave it out, or choose another window")

    metadata: Any = {"max_seq_lengths": [lm.length], "tokenizer": tokenizer_folder}
    tasks = TaskManager(include_path=RULER, include_defaults=False, metadata=metadata)
    sys.modules.pop(WORDS_MODULE, None)
    try:
        task = load_tasks(tasks, name, options.seed)[name]
        with quiet():
            task.build_all_requests(
                limit=options.samples,
                rank=0,
                world_size=1,
                apply_chat_template=lm.chat,
                chat_template=lm.apply_chat_template,
            )
    except (LookupError, OSError, ValueError) as error:  # no example fits, or no network
        raise unsuitable(first_line(error)) from error
    longest = 0
    for request in task.instances:
        prompt, generation = request.args
        longest = max(longest, len(lm.tok_encode(prompt)) + generation["max_gen_toks"])
        answers = request.doc["outputs"]
        contains_answers = name in QUESTIONS or all(str(answer) in prompt for answer in answers)
        if not answers or not contains_answers:
            raise unsuitable("a prompt lacks its answer")
    if not window / 2 <= longest <= window:
        raise unsuitable(f"the longest prompt and its answer take {longest}")
    return task, longest


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the output of lm-eval and transformers, bars and warnings. Our progress bar writes to another stream."""
    with quiet_loading(), open(os.devnull, "w") as devnull, redirect_stderr(devnull), redirect_stdout(devnull):
        yield

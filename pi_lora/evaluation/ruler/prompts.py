"""RULER's tasks as lm-eval makes them: 500 prompts of each for a number of tokens, counted by the model's tokenizer."""

import copy
import difflib
import importlib
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval.tasks
import lm_eval.tasks.ruler.cwe_utils as cwe
import lm_eval.tasks.ruler.fwe_utils as fwe
import lm_eval.tasks.ruler.vt_utils as vt
import numpy as np
import yaml
from lm_eval.defaults import DEFAULT_OTHER_SEED

from pi_lora.errors import DataError, first_line
from pi_lora.evaluation.benchmarks.lm import RankedLM, quiet
from pi_lora.models.location import BUILTIN_FOLDER
from pi_lora.recipe.evaluation import RulerOptions

FOLDER = Path(lm_eval.tasks.__file__).parent / "ruler"
TASKS: tuple[str, ...] = tuple(yaml.safe_load((FOLDER / "ruler.yaml").read_text(encoding="utf-8"))["task"])
# Tasks that need essays, and those that need questions with documents.
ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery", "niah_multivalue")
QUESTIONS = ("ruler_qa_squad", "ruler_qa_hotpot")
# In tokens. lm-eval leaves the beginnings of answers out of its count, chat templates, and in `ruler_fwe` the answers.
ROOM = 128
# In tokens. What is generated in `ruler_cwe` and the like, with the answers of an example.
ANSWERS = 240
# `ruler_cwe` draws from a generator of its own, which is seeded when lm-eval first executes its module, a second time.
CWE_STATE = cwe.RNG.getstate()


class Prompts(NamedTuple):
    """A task of lm-eval whose prompts are made for `length` tokens; the longest has `tokens` with what is generated."""

    task: Any
    length: int
    tokens: int


def find_texts(names: Sequence[str]) -> None:
    """Raise DataError if there is no such task, or its texts are neither in the cache nor can be downloaded."""
    for name in names:
        if name not in TASKS:
            hint = " or ".join(difflib.get_close_matches(name, TASKS)) or ", ".join(TASKS)
            raise DataError(f"--tasks: {name}: no task of RULER in lm-eval {lm_eval.__version__}; did you mean {hint}?")
        if name in (*ESSAYS, *QUESTIONS) and (reason := _why_missing(ESSAYS[0] if name in ESSAYS else name)):
            others = ",".join(task for task in TASKS if task not in (*ESSAYS, *QUESTIONS))
            raise DataError(f"--tasks: {name}: its texts cannot be read ({reason}); these need none: {others}")


@cache
def _why_missing(name: str) -> str:
    """Return why lm-eval cannot read the texts of a task, or nothing; what it downloads, it keeps."""
    with quiet():
        import nltk  # which keeps the stderr that it is imported with

        try:
            if name in ESSAYS:
                nltk.data.find("tokenizers/punkt_tab")
            _manager(4096, BUILTIN_FOLDER / "tiny").load([name])
        except LookupError:
            return "nltk lacks punkt_tab: python -m nltk.downloader punkt_tab"
        except (OSError, ValueError) as error:
            return first_line(error)
    return ""


def _manager(length: int, tokenizer: Path) -> lm_eval.tasks.TaskManager:
    metadata = {"max_seq_lengths": [length], "tokenizer": str(tokenizer)}
    return lm_eval.tasks.TaskManager(include_path=FOLDER, include_defaults=False, metadata=metadata)


@contextmanager
def saved_tokenizer(tokenizer: Any) -> Iterator[Path]:
    """Save a tokenizer in a folder from which lm-eval loads it, without the code that its config may name: lm-eval
    would execute it.
    """
    plain = copy.deepcopy(tokenizer)
    plain.init_kwargs.pop("auto_map", None)
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        yield Path(folder)


def make_task(name: str, window: int, options: RulerOptions, lm: RankedLM, tokenizer: Path) -> Prompts:
    """Return a task of lm-eval; raise DataError if one of its first prompts does not fit `window` tokens with what is
    generated after it, or lacks its answer.

    The prompts are those of `lm_eval run --seed SEED,SEED+1234,SEED --metadata '{"max_seq_lengths": [length]}'`.
    """
    length = window - ROOM
    check_terminates(name, window, lm.tokenizer)
    random.seed(options.seed)
    np.random.seed(DEFAULT_OTHER_SEED + options.seed)
    importlib.import_module(cwe.__name__).RNG.setstate(CWE_STATE)
    chats: Any = {"apply_chat_template": True, "chat_template": lm.apply_chat_template} if options.chat_template else {}
    try:
        with quiet():
            task: Any = _manager(length, tokenizer).load([name])["tasks"][name]
            task.build_all_requests(limit=options.samples, rank=0, world_size=1, **chats)
    except (ValueError, IndexError) as error:  # no example fits
        raise _does_not_fit(name, window, first_line(error)) from error
    longest = max(len(lm.tok_encode(each.args[0])) + each.args[1]["max_gen_toks"] for each in task.instances)
    if not window / 2 <= longest <= window:
        raise _does_not_fit(name, window, f"the longest prompt and its answer take {longest}")
    for each in task.instances:
        answers = [] if name in QUESTIONS else each.doc["outputs"]
        if not each.doc["outputs"] or not all(str(answer) in each.args[0] for answer in answers):
            raise _does_not_fit(name, window, "a prompt lacks its answer")
    return Prompts(task, length, longest)


def check_terminates(name: str, window: int, tokenizer: Any) -> None:
    """Raise DataError if lm-eval (0.4.13, issue 2963) would look for a shorter prompt of a task forever."""

    def tokens(*texts: str) -> int:
        return sum(len(tokenizer(text)["input_ids"]) for text in texts)

    needed = 0
    if name == "ruler_vt":
        if tokens(vt.generate_input_output(5, 1, 4)[0]) > 500 - 60:
            raise _does_not_fit(name, window, "its example does not fit 500 tokens of this tokenizer")
        needed = 500 + tokens(vt.generate_input_output(10, 1, 4)[0])
    elif name == "ruler_cwe":
        needed = tokens(*cwe.generate_input_output(10, window - ROOM)[:2])
    elif name == "ruler_fwe":
        needed = tokens(fwe.TEMPLATE)
    if needed and needed + ANSWERS + ROOM > window:
        raise _does_not_fit(name, window, f"it needs about {needed + ANSWERS + ROOM}")


def _does_not_fit(name: str, window: int, reason: str) -> DataError:
    return DataError(f"--windows: {window} tokens do not suit {name} ({reason}); choose another, or leave the task out")

"""RULER's tasks as lm-eval makes them: 500 prompts of each for a number of tokens, counted by the model's tokenizer."""

import difflib
import importlib
import json
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
from huggingface_hub import is_offline_mode
from lm_eval.defaults import DEFAULT_OTHER_SEED

from pi_lora.errors import DataError, first_line
from pi_lora.evaluation.benchmarks.lm import RankedLM, quiet
from pi_lora.models.location import BUILTIN_FOLDER
from pi_lora.recipe.evaluation import RulerOptions
from pi_lora.types import Json

FOLDER = Path(lm_eval.tasks.__file__).parent / "ruler"
TASKS: tuple[str, ...] = tuple(yaml.safe_load((FOLDER / "ruler.yaml").read_text(encoding="utf-8"))["task"])
# Tasks that need essays, and those that need questions with documents.
ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery", "niah_multivalue")
QUESTIONS = ("ruler_qa_squad", "ruler_qa_hotpot")
# In tokens. lm-eval leaves the beginnings of answers out of its count, chat templates, and in `ruler_fwe` the answers.
ROOM = 128
# Examples are drawn: another may be so many tokens longer.
SLACK = 32
# `ruler_cwe` draws from a generator of its own, which is seeded once a process.
CWE_MODULE, CWE_STATE = cwe.__name__, cwe.RNG.getstate()


class Prompts(NamedTuple):
    """A task of lm-eval whose prompts are made for `length` tokens; the longest has `tokens` with what is generated."""

    name: str
    task: Any
    length: int
    tokens: int


def unavailable(names: Sequence[str]) -> dict[str, str]:
    """Return the tasks whose texts are neither in the cache nor can be downloaded, with the reasons. Raise DataError if
    there is no such task, or none is left.
    """
    for name in names:
        if name not in TASKS:
            hint = " or ".join(difflib.get_close_matches(name, TASKS)) or ", ".join(TASKS)
            raise DataError(f"--tasks: {name}: no task of RULER in lm-eval {lm_eval.__version__}; did you mean {hint}?")
    reasons = {}
    for name in names:
        of_same_texts = ESSAYS[0] if name in ESSAYS else name
        if name in (*ESSAYS, *QUESTIONS) and (reason := _why_missing(of_same_texts)):
            reasons[name] = f"its texts cannot be had ({reason})"
    if not set(names) - set(reasons):
        raise DataError(f"--tasks: {names[0]}: {reasons[names[0]]}; choose tasks that need no texts")
    return reasons


@cache
def _why_missing(name: str) -> str:
    """Return why lm-eval cannot read the texts of a task, or nothing; what it reads, it keeps."""
    if name in QUESTIONS and is_offline_mode():
        return "HF_HUB_OFFLINE is set, and lm-eval downloads them from the web"
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
    metadata: Json = {"max_seq_lengths": [length], "tokenizer": str(tokenizer)}
    return lm_eval.tasks.TaskManager(include_path=FOLDER, include_defaults=False, metadata=metadata)


@contextmanager
def saved_tokenizer(tokenizer: Any) -> Iterator[Path]:
    """Save a tokenizer in a folder of which lm-eval loads it, without the code that its config may name: lm-eval would
    execute it.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        file = Path(folder, "tokenizer_config.json")
        config = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({key: config[key] for key in config if key != "auto_map"}), encoding="utf-8")
        yield Path(folder)


def make_prompts(name: str, window: int, options: RulerOptions, lm: RankedLM, tokenizer: Path) -> Prompts:
    """Return a task of lm-eval; raise DataError if one of its first prompts does not fit `window` tokens with what is
    generated after it, or lacks its answer.

    The prompts are those of `lm_eval run --seed SEED,SEED+1234,SEED --metadata '{"max_seq_lengths": [length]}'`.
    """
    length = window - ROOM
    check_terminates(name, length, lm.tokenizer)
    random.seed(options.seed)
    np.random.seed(DEFAULT_OTHER_SEED + options.seed)
    importlib.import_module(CWE_MODULE).RNG.setstate(CWE_STATE)
    try:
        with quiet():
            task: Any = _manager(length, tokenizer).load([name])["tasks"][name]
            chats = {"apply_chat_template": True, "chat_template": lm.apply_chat_template}
            task.build_all_requests(
                limit=options.samples, rank=0, world_size=1, **chats if options.chat_template else {}
            )
    except (ValueError, IndexError) as error:  # no example fits
        raise _too_short(name, window, first_line(error)) from error
    longest = max(len(lm.tok_encode(each.args[0])) + each.args[1]["max_gen_toks"] for each in task.instances)
    if longest > window:
        raise _too_short(name, window, f"a prompt and its answer take {longest}")
    if longest < window / 2:
        raise DataError(f"--windows: {window}: lm-eval has prompts of {name} up to {longest} tokens; leave it out")
    for each in task.instances:
        if not each.doc["outputs"] or (name not in QUESTIONS and not _holds_answers(each)):
            raise _too_short(name, window, "a prompt lacks its answer")
    return Prompts(name, task, length, longest)


def check_terminates(name: str, length: int, tokenizer: Any) -> None:
    """Raise DataError if lm-eval (0.4.13, issue 2963) would look for a shorter prompt of a task forever."""

    def tokens(*texts: str) -> int:
        return sum(len(tokenizer(text)["input_ids"]) for text in texts)

    needed = 0
    if name == "ruler_vt":
        example, prompt = (tokens(vt.generate_input_output(noises, 1, 4, noises == 5)[0]) for noises in (5, 10))
        if example + 30 + SLACK > 500:
            raise DataError(f"--tasks: {name}: its example does not fit 500 tokens of this tokenizer; leave it out")
        needed = 500 + prompt + 30
    elif name == "ruler_cwe":
        example, prompt, answers = cwe.generate_input_output(10, length)
        needed = tokens(example, prompt, *(f"10. {answer}" for answer in answers)) + 120
    elif name == "ruler_fwe":
        needed = tokens(fwe.TEMPLATE) + 200
    if needed + SLACK > length:
        raise _too_short(name, length + ROOM, f"it needs about {needed + SLACK + ROOM}")


def _holds_answers(request: Any) -> bool:
    return all(str(answer) in request.args[0] for answer in request.doc["outputs"])


def _too_short(name: str, window: int, reason: str) -> DataError:
    return DataError(f"--windows: {window} tokens do not hold {name} ({reason}); choose a longer one, or leave it out")

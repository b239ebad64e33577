"""RULER's prompts as lm-eval makes them, for any window and tokenizer, from files where there is no hub. Nothing here
reaches a network unless texts are wanted from the hub.
"""

import contextlib
import difflib
import importlib
import importlib.util
import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval.tasks
import nltk
import numpy as np
import yaml
from huggingface_hub import is_offline_mode
from lm_eval.api.task import ConfigurableTask
from lm_eval.defaults import DEFAULT_OTHER_SEED
from nltk.tokenize.punkt import PunktSentenceTokenizer

from pi_lora.errors import DataError, first_line
from pi_lora.evaluation.benchmarks.measure import quiet
from pi_lora.types import Json

PACKAGE = "lm_eval.tasks.ruler"
FOLDER = Path(lm_eval.tasks.__file__).parent / "ruler"


class _Definition(yaml.SafeLoader):
    """Of a task of lm-eval: functions of the module that makes examples stay names, which `_fresh` imports."""

    def function(self, node: yaml.ScalarNode) -> Any:
        """Return what `!function module.name` stands for."""
        module, _, name = node.value.partition(".")
        return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name) if module == SCORING else node.value


SCORING = "common_utils"
_Definition.add_constructor("!function", _Definition.function)
TASKS: tuple[str, ...] = tuple(yaml.safe_load((FOLDER / "ruler.yaml").read_text(encoding="utf-8"))["task"])
# Those whose needles lie in essays, and those whose documents and questions come from a file.
ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery", "niah_multivalue")
QUESTIONS = {"ruler_qa_squad": "read_squad", "ruler_qa_hotpot": "read_hotpotqa"}
# lm-eval makes no more of a task.
MOST_SAMPLES = 500
# Examples are drawn: another may be so many tokens longer.
SLACK = 32


class Asked(NamedTuple):
    """The tasks that are measured, the words and questions they are made of, where those are from, and the tasks that
    are left out with the reasons.
    """

    tasks: tuple[str, ...]
    words: list[str] | None
    questions: dict[str, Any]
    sources: dict[str, str]
    left_out: dict[str, str]


class Prompts(NamedTuple):
    """A task of lm-eval whose prompts fit a window: made for `length` tokens, the longest with what is written after it
    of `tokens`.
    """

    task: Any
    length: int
    tokens: int


def find_texts(names: Sequence[str], haystack: Path | None = None, data: Sequence[str] = ()) -> Asked:
    """Return what tasks are made of: `haystack`, a text that needles lie in, and `data`, `ruler_qa_squad=FILE` in the
    format of its authors, or else what the hub has. Tasks are left out whose text cannot be had; raise DataError if
    none is left, there is no such task, or a file cannot be read.
    """
    for name in names:
        if name not in TASKS:
            hint = " or ".join(difflib.get_close_matches(name, TASKS)) or ", ".join(TASKS)
            raise DataError(f"--tasks: {name}: no task of RULER in lm-eval {lm_eval.__version__}; did you mean {hint}?")
    files = dict(_file(given, names) for given in data)
    words: list[str] | None = None
    questions: dict[str, Any] = {}
    sources: dict[str, str] = {}
    left_out: dict[str, str] = {}
    if asked := [name for name in names if name in ESSAYS]:
        try:
            with quiet():
                words = _words(haystack) if haystack else list(_niah().get_haystack("essay"))
            sources["essays"] = str(haystack or "baber/paul_graham_essays")
        except DataError:
            raise
        except Exception as error:  # `datasets` raises a dozen kinds for a hub that cannot be reached
            reason = f"no essays from the hub ({first_line(error)}); give a text with --haystack FILE"
            left_out |= dict.fromkeys(asked, reason)
    for name in (name for name in names if name in QUESTIONS):
        try:
            questions[name] = _questions(name, files.get(name))
            sources[name] = str(files.get(name, "the web"))
        except OSError as error:  # requests' errors are of this kind
            left_out[name] = f"no questions from the web ({first_line(error)}); give its file with --data {name}=FILE"
    tasks = tuple(name for name in dict.fromkeys(names) if name not in left_out)
    if not tasks:
        raise DataError(f"--tasks: {next(iter(left_out))}: {next(iter(left_out.values()))}")
    return Asked(tasks, words, questions, sources, left_out)


def fitted(
    name: str,
    window: int,
    samples: int,
    seed: int,
    asked: Asked,
    tokenizer: Any,
    length_of: Callable[[str], int],
    chat: Callable[..., str] | None = None,
) -> Prompts:
    """Return a task whose prompts fit `window` tokens with all that is written after them, the longest that do. lm-eval
    leaves beginnings of answers, and of one task the answers, out of its count: it is asked for shorter ones by what is
    too much. Raise DataError if a window is too short, or less than half filled, or a prompt lacks its answer.

    The prompts are those of `lm_eval run --seed SEED,SEED+1234,SEED --metadata '{"max_seq_lengths": [length]}'`.
    """
    length = window
    while True:
        task = _task(name, length, samples, seed, asked, tokenizer)
        chatting = {"apply_chat_template": True, "chat_template": chat} if chat else {}
        with quiet():
            task.build_all_requests(limit=samples, rank=0, world_size=1, **chatting)
        written = task.config.generation_kwargs["max_gen_toks"]
        longest = max(length_of(each.args[0]) for each in task.instances) + written
        if longest <= window:
            break
        length -= longest - window
    if longest < window / 2:
        raise DataError(f"--windows: {name} has no prompts between {longest} and {window} tokens; choose a longer one")
    for each in task.instances:
        if not each.doc["outputs"] or (name not in QUESTIONS and not _answered(each)):
            raise DataError(f"--windows: {window} tokens do not hold {name} with its answers; choose a longer one")
    return Prompts(task, length, longest)


def _answered(request: Any) -> bool:
    return all(str(answer) in request.args[0] for answer in request.doc["outputs"])


def sentences(asked: Asked) -> str | None:
    """Return how essays are cut into sentences, between which needles lie; None if there are no essays."""
    if asked.words is None:
        return None
    return "nltk's punkt_tab" if _niah().sent_tokenize is nltk.sent_tokenize else "nltk's Punkt, untrained"


def check_essays(asked: Asked, tokenizer: Any, window: int) -> None:
    """Raise DataError if essays are shorter than `window` tokens: prompts would be, whatever they are said to be."""
    if asked.words is not None and len(asked.words) < window:
        found = len(tokenizer(" ".join(asked.words), verbose=False)["input_ids"])
        if found < window:
            raise DataError(f"--haystack: has {found:,} tokens, and a window {window:,}; give a longer text")


def _task(name: str, length: int, samples: int, seed: int, asked: Asked, tokenizer: Any) -> Any:
    """Return lm-eval's task on the first `samples` of its own examples, made for `length` tokens."""
    definition = _definition(f"{name.removeprefix('ruler_')}.yaml")
    file, _, function = definition["custom_dataset"].partition(".")
    module = _fresh(file)
    module.get_tokenizer = lambda name: tokenizer
    if file == "niah_utils":
        essays, make = asked.words, _niah().generate_samples
        module.get_haystack = lambda type_haystack: (
            essays if type_haystack == "essay" else _niah().get_haystack(type_haystack)
        )
        module.generate_samples = lambda haystack, **options: make(haystack, **options | {"num_samples": samples})
    else:
        # What goes through the numbers of all samples.
        module.tqdm = lambda numbers, **_: islice(numbers, samples)
    if name in QUESTIONS:
        questions, documents = asked.questions[name]
        setattr(module, QUESTIONS[name], lambda: (questions, [*documents]))  # which lm-eval shuffles
    _check_holds(name, module, tokenizer, length)
    random.seed(seed)
    np.random.seed(DEFAULT_OTHER_SEED + seed)
    with quiet():
        try:
            examples = getattr(module, function)(max_seq_lengths=[length])
        except (ValueError, IndexError) as error:  # no example fits
            raise _too_short(name, length, first_line(error)) from error
        return ConfigurableTask(config={**definition, "custom_dataset": lambda **_: examples})


def _check_holds(name: str, module: Any, tokenizer: Any, length: int) -> None:
    """Raise DataError if an example may not fit: lm-eval (0.4.13) looks for a shorter one of some tasks forever."""

    def tokens(*texts: str) -> int:
        return sum(len(tokenizer(text, verbose=False)["input_ids"]) for text in texts)

    with quiet():
        match name:
            case "ruler_vt":
                # Behind another one of at most 500 tokens.
                example, shortest = (tokens(module.generate_input_output(n, 1, 4, n == 5)[0]) for n in (5, 10))
                needed = 500 + 30 + shortest if example + 30 < 500 - SLACK else None
            case "ruler_cwe":
                own, module.RNG = module.RNG, random.Random(0)
                example, shortest, answers = module.generate_input_output(10, length)
                module.RNG = own  # which no example has drawn from yet
                needed = tokens(example, shortest, *(f"10. {answer}" for answer in answers)) + 120
            case "ruler_fwe":
                needed = 200 + tokens(module.TEMPLATE)
            case _:
                needed = 0
    if needed is None:
        raise DataError(f"--tasks: {name}: its example does not fit 500 tokens of this tokenizer; leave it out")
    if needed + SLACK > length:
        raise _too_short(name, length, f"it needs about {needed + SLACK}")


def _too_short(name: str, length: int, reason: str) -> DataError:
    return DataError(f"--windows: {length} tokens do not hold {name} ({reason}); choose a longer one, or leave it out")


def _definition(file: str) -> Json:
    """Return what a task's file says and what it includes. lm-eval's own reader imports all modules that it names."""
    own: Json = yaml.load((FOLDER / file).read_text(encoding="utf-8"), _Definition)
    return {**(_definition(own.pop("include")) if "include" in own else {}), **own}


def _fresh(file: str) -> Any:
    """Return a module of lm-eval as a new process has it: `ruler_cwe` draws from a generator that is seeded once."""
    if file == "niah_utils":
        _niah()
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{file}", FOLDER / f"{file}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _niah() -> Any:
    """Return lm-eval's module of needles, which takes 8 seconds; it downloads nothing, as it does when imported."""
    download, nltk.download = nltk.download, lambda *_: False
    try:
        with quiet():
            module: Any = importlib.import_module(f"{PACKAGE}.prepare_niah")
    finally:
        nltk.download = download
    with contextlib.suppress(LookupError):
        nltk.data.find("tokenizers/punkt_tab")
        return module
    module.sent_tokenize = PunktSentenceTokenizer().tokenize
    return module


def _file(given: str, names: Sequence[str]) -> tuple[str, Path]:
    name, equals, path = given.partition("=")
    if not equals or name not in QUESTIONS or name not in names:
        raise DataError(f"--data: {given}: is not TASK=FILE; TASK is one that is asked for of {', '.join(QUESTIONS)}")
    return name, Path(path).expanduser()


def _words(file: Path) -> list[str]:
    """Return the words of a text, as lm-eval splits its essays."""
    return re.sub(r"\s+", " ", _text(file).strip()).split(" ")


def _questions(name: str, file: Path | None) -> Any:
    module = _fresh("qa_utils")
    if file is None and is_offline_mode():
        raise OSError("HF_HUB_OFFLINE is set")
    if file is not None:
        text = _text(file)
        module.download_json = lambda url: json.loads(text)
    try:
        return getattr(module, QUESTIONS[name])()
    except (ValueError, KeyError, TypeError) as error:
        if file is None:
            raise OSError(first_line(error)) from error
        raise DataError(
            f"{file}: is not {name} as its authors publish it ({first_line(error)}); fetch it again"
        ) from error


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as UTF-8 text ({error}); correct it, or name another file") from None

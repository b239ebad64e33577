"""RULER's tasks as lm-eval makes them: 500 prompts of each for a number of tokens, counted by the model's tokenizer."""

import copy
import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval.tasks.ruler.cwe_utils as cwe
import yaml
from lm_eval.tasks import TaskManager

from pi_lora.errors import DataError, first_line
from pi_lora.evaluation.harness import RankedLM, load_tasks, quiet
from pi_lora.recipe.evaluation import RulerOptions

FOLDER = Path(cwe.__file__).parent
TASKS: tuple[str, ...] = tuple(yaml.safe_load((FOLDER / "ruler.yaml").read_text(encoding="utf-8"))["task"])
# Tasks whose prompts need not hold the answer.
QUESTIONS = ("ruler_qa_squad", "ruler_qa_hotpot")
# In tokens. lm-eval leaves the beginnings of answers out of its count, chat templates, and in `ruler_fwe` the answers.
ROOM = 128
# In tokens. In shorter windows lm-eval (0.4.13, issue 2963) may look for a shorter prompt forever.
SHORTEST = {"ruler_vt": 1536, "ruler_cwe": 1536, "ruler_fwe": 768}
# `ruler_cwe` draws from a generator of its own, which is seeded when lm-eval first executes its module, a second time.
CWE_STATE = cwe.RNG.getstate()


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


def make_task(name: str, window: int, options: RulerOptions, lm: RankedLM, tokenizer: Path) -> tuple[Any, int]:
    """Return a task of lm-eval, and the tokens of its longest prompt with what is generated after it. Raise DataError
    if its texts are missing, or one of its first prompts does not fit `window` tokens with that, or lacks its answer.

    The prompts are those of `lm_eval run --seed SEED,SEED+1234,SEED --metadata '{"max_seq_lengths": [window - ROOM]}'`.
    """

    def unsuitable(reason: str) -> DataError:
        return DataError(f"--tasks: {name} in {window} tokens: {reason}; leave it out, or choose another window")

    if window < SHORTEST.get(name, 0):
        raise unsuitable(f"needs {SHORTEST[name]}")
    importlib.import_module(cwe.__name__).RNG.setstate(CWE_STATE)
    metadata: Any = {"max_seq_lengths": [window - ROOM], "tokenizer": str(tokenizer)}
    manager = TaskManager(include_path=FOLDER, include_defaults=False, metadata=metadata)
    chats: Any = {"apply_chat_template": True, "chat_template": lm.apply_chat_template} if options.chat_template else {}
    try:
        task = load_tasks(manager, name, options.seed)[name]
        with quiet():
            task.build_all_requests(limit=options.samples, rank=0, world_size=1, **chats)
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

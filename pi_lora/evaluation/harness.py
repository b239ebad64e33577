"""lm-eval, as benchmarks and RULER use it: a loaded model as lm-eval takes one, with the processes of this run as ranks
and lm-eval's cache of answers, and lm-eval's tasks by name.
"""

import contextlib
import copy
import io
import math
import random
import sys
from collections.abc import Callable, Collection, Iterator
from typing import IO, Any, cast

import lm_eval
import numpy as np
import torch
from accelerate import Accelerator
from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from rich.console import Console
from rich.file_proxy import FileProxy

from pi_lora.distributed import from_all, number_of_processes, share_of
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import check_numbers
from pi_lora.evaluation.journal import Session
from pi_lora.models.model import Model
from pi_lora.models.weights import quiet_loading
from pi_lora.recipe.evaluation import BenchmarksOptions, RulerOptions
from pi_lora.types import Json

VERSION = lm_eval.__version__


class ModelCalls:
    """What lm-eval calls of a model. It would tie the embeddings of a torch module again (`HFLM.__init__` of lm_eval
    0.4.13), which discards embeddings that PEFT trains apart from their head.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config, self.device, self.generate = model.config, model.device, model.generate

    def __call__(self, ids: Any) -> Any:
        """Return the model's outputs for token ids (rows, tokens)."""
        return self.model(ids)


class RankedLM(HFLM):
    """lm-eval's model for transformers, given a model that is loaded, in every process of this run. Inputs are cut to
    `window` tokens. Special tokens in texts are text, unless a chat template writes them.
    """

    def __init__(
        self, loaded: Model, window: int, batch_size: int, options: BenchmarksOptions | RulerOptions, session: Session
    ) -> None:
        tokenizer = copy.deepcopy(loaded.tokenizer)  # lm-eval adds a padding token where there is none
        tokenizer.model_max_length = sys.maxsize  # and cuts inputs itself
        tokenizer.split_special_tokens = not (isinstance(options, RulerOptions) and options.chat_template)
        calls: Any = ModelCalls(loaded.model)
        with quiet():
            super().__init__(calls, tokenizer=tokenizer, max_length=window, batch_size=batch_size)
        self.loaded, self.session = loaded, session
        decided_by = {**options.model_dump(exclude={"batch_size", "tasks"}), "lm_eval": VERSION}
        folder = session.journal(loaded, decided_by).folder
        self.answers = str(folder / f"answers-{self.rank}.db") if folder else ":memory:"
        if self.world_size > 1:
            self.accelerator = Accelerator()

    @property
    def rank(self) -> int:
        """Which process this is."""
        return share_of(range(number_of_processes()))[0]

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return number_of_processes()

    def evaluate(self, name: str, task: Any, limit: int | None, note: str, **options: Any) -> tuple[Json, list[Json]]:
        """Return lm-eval's scores of a task on the first `limit` examples, and every example with its metrics; all
        processes call it. Answers are kept as soon as they are known, and not computed again. Raise DataError if there
        are fewer examples than processes: lm-eval (0.4.13) would wait forever.
        """
        examples = len(task.eval_docs)
        if min(examples, limit or examples) < self.world_size:
            raise DataError(f"{name}: fewer examples than processes; start fewer processes")

        def answered(done: int) -> None:
            self.session.progress(done, len(task.instances), note)

        torch.manual_seed(DEFAULT_OTHER_SEED)
        lm: Any = CachingLM(self, self.answers)
        self.set_cache_hook(Answers(lm, self.loaded, answered))
        tasks: Any = {"tasks": {name: task}}
        with contextlib.closing(lm.dbdict), quiet():
            results: Any = evaluate(lm, tasks, limit=limit, **options)
        found = []
        if results:  # in the first process
            samples = sorted(results["samples"][name], key=lambda sample: int(sample["doc_id"]))
            found = [({**results["results"][name], "shots": results["n-shot"][name]}, samples)]
        return from_all(found)[0]


class Answers(CacheHook):
    """Called by lm-eval with every answer: refuse what is not finite, let lm-eval keep the rest, count."""

    def __init__(self, kept: CachingLM, loaded: Model, answered: Callable[[int], None]) -> None:
        super().__init__(kept)
        self.loaded, self.answered, self.done = loaded, answered, 0

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        """Keep the answer `res` to the request `req` of the method `attr`."""
        number = res[0] if isinstance(res, tuple) else res
        finite = isinstance(number, str) or math.isfinite(number)
        check_numbers(self.loaded.name, self.loaded.model.dtype, finite)
        self.done += 1
        self.answered(self.done)
        super().add_partial(attr, req, res)


def load_tasks(manager: TaskManager, spec: Any, seed: int = 0) -> dict[str, Any]:
    """Return lm-eval's task of a name or config with its examples, or every task of a group, seeded as
    `lm_eval.simple_evaluate` does, which also asks several programs for their versions.
    """
    random.seed(seed)
    np.random.seed(DEFAULT_OTHER_SEED + seed)
    with quiet():
        tasks: dict[str, Any] = manager.load([spec])["tasks"]
    for task in tasks.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return tasks


def check_names(names: Collection[str], known: Collection[str]) -> None:
    """Raise DataError if there is no task of a name."""
    if unknown := ", ".join(set(names).difference(known)):
        raise DataError(f"--tasks: {unknown}: no such task in lm-eval {VERSION}; choose from lm-eval ls tasks")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what lm-eval and transformers print off the terminal, bars and warnings; rich finds the terminal behind the
    proxy, for our own bar.
    """
    proxy = FileProxy(Console(quiet=True), getattr(sys.stderr, "rich_proxied_file", sys.stderr))
    with quiet_loading(), contextlib.redirect_stderr(cast(IO[str], proxy)), contextlib.redirect_stdout(io.StringIO()):
        yield

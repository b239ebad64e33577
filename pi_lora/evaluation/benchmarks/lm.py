"""A loaded model as lm-eval takes one: lm-eval's class for transformers, with the processes of this run as its ranks,
its own cache of answers, and progress.
"""

import contextlib
import copy
import io
import logging
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from accelerate import Accelerator
from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from rich.file_proxy import FileProxy

from pi_lora.distributed import number_of_processes, share_of
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import check_numbers
from pi_lora.models.model import Model
from pi_lora.models.weights import quiet_loading
from pi_lora.types import Json


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

    def __init__(self, loaded: Model, window: int, batch_size: int, special_tokens: bool = False) -> None:
        tokenizer = copy.deepcopy(loaded.tokenizer)  # lm-eval adds a padding token where there is none
        tokenizer.model_max_length = sys.maxsize  # and cuts inputs itself
        tokenizer.split_special_tokens = not special_tokens
        calls: Any = ModelCalls(loaded.model)
        with quiet():
            super().__init__(calls, tokenizer=tokenizer, max_length=window, batch_size=batch_size)
        self.loaded = loaded
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

    def evaluate(
        self, tasks: Json, limit: int | None, cache: Path | None, progress: Callable[[int, int], None], **options: Any
    ) -> Json | None:
        """Return lm-eval's results on the first `limit` examples of tasks, in the first process, and None in others;
        all call it. Answers are kept in the folder `cache` as soon as they are known, and not computed again.
        `progress` is told how many answers this process has computed, and how many there are. Raise DataError if there
        are fewer examples than processes: lm-eval (0.4.13) would wait forever.
        """
        all_tasks = tasks["tasks"].values()
        fewest = min(len(task.eval_docs) for task in all_tasks)
        if min(fewest, limit or fewest) < self.world_size:
            raise DataError(f"{', '.join(tasks['tasks'])}: fewer examples than processes; start fewer processes")
        kept = CachingLM(self, str(cache / f"answers-{self.rank}.db")) if cache else None
        self.set_cache_hook(
            Answers(kept, self.loaded, lambda done: progress(done, sum(len(task.instances) for task in all_tasks)))
        )
        lm: Any = kept or self
        with contextlib.closing(kept.dbdict) if kept else contextlib.nullcontext(), quiet():
            return cast(Json | None, evaluate(lm, tasks, limit=limit, **options))


class Answers(CacheHook):
    """Called by lm-eval with every answer: refuse what is not finite, let lm-eval keep the rest, count."""

    def __init__(self, kept: CachingLM | None, loaded: Model, answered: Callable[[int], None]) -> None:
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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what lm-eval and transformers print off the terminal, bars and warnings; rich finds it behind the proxy, for
    its bar.
    """
    logger = logging.getLogger("lm_eval")
    level, terminal = logger.level, getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    logger.setLevel(logging.ERROR)
    try:
        proxy = cast(IO[str], FileProxy(Console(quiet=True), terminal))
        with quiet_loading(), contextlib.redirect_stderr(proxy), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)

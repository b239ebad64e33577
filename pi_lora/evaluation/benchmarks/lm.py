"""A loaded model as lm-eval takes one: its own class for transformers, with the processes of this run as its ranks, its
own cache of answers, and progress.
"""

import contextlib
import copy
import io
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from accelerate.utils import gather
from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from rich.file_proxy import FileProxy

from pi_lora.distributed import number_of_processes, share_of, wait_for_all
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import check_numbers
from pi_lora.models.model import Model
from pi_lora.models.weights import quiet_loading
from pi_lora.types import Json, Progress, silent


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


class Answers(CacheHook):
    """Called by lm-eval with every answer: refuse what is not finite, let lm-eval keep the rest, report progress."""

    def __init__(self, kept: CachingLM | None, answered: Callable[[Any], None]) -> None:
        super().__init__(kept)
        self.answered = answered

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        """Keep the answer `res` to the request `req` of the method `attr`."""
        self.answered(res)
        super().add_partial(attr, req, res)


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
        self.expected = 0

    @property
    def rank(self) -> int:
        """Which process this is."""
        return share_of(range(number_of_processes()))[0]

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return number_of_processes()

    def all_gather(self, tensor: Any) -> Any:
        """Return the tensors of all processes as one."""
        return gather(tensor)

    def barrier(self) -> None:
        """Wait for all processes."""
        wait_for_all()

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one."""
        self.expected = len(requests)
        return list(super().loglikelihood(list(requests), disable_tqdm))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that is generated after each context."""
        self.expected = len(requests)
        return list(super().generate_until(list(requests), disable_tqdm))

    def evaluate(
        self, tasks: Any, limit: int | None, cache: Path | None = None, progress: Progress = silent, **options: Any
    ) -> Json | None:
        """Return lm-eval's results on the first `limit` examples of tasks, in the first process, and None in others;
        all call it. Answers are kept in the folder `cache` as soon as they are known, and not computed again. Raise
        DataError if there are fewer examples than processes: lm-eval (0.4.13) would wait forever.
        """
        fewest = min(len(task.eval_docs) for task in tasks["tasks"].values())
        if min(fewest, limit or fewest) < self.world_size:
            raise DataError(f"{', '.join(tasks['tasks'])}: fewer examples than processes; start fewer processes")
        kept = CachingLM(self, str(cache / f"answers-{self.rank}.db")) if cache else None
        done = 0

        def answered(answer: Any) -> None:
            nonlocal done
            done += 1
            number = answer[0] if isinstance(answer, tuple) else answer
            check_numbers(self.loaded.name, self.loaded.model.dtype, isinstance(number, str) or math.isfinite(number))
            progress(done, max(done, self.expected))

        self.set_cache_hook(Answers(kept, answered))
        lm: Any = kept or self
        with contextlib.closing(kept.dbdict) if kept else contextlib.nullcontext(), quiet():
            return cast(Json | None, evaluate(lm, tasks, limit=limit, **options))


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

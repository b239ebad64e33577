"""A loaded model as lm-eval takes one, whose batches are divided among processes and kept in a journal."""

import contextlib
import copy
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from lm_eval.models.huggingface import HFLM

from pi_lora.distributed import from_all, share_of
from pi_lora.errors import DataError
from pi_lora.evaluation.journal import Journal

Answer = tuple[float, bool]
# As lm-eval tokenizes them: texts, token ids of the context, of the continuation.
Request = tuple[Any, list[int], list[int]]


class Job(NamedTuple):
    """How to compute a batch, and what stands for its answer while lm-eval's loop is rehearsed."""

    compute: Callable[[], Any]
    placeholder: Any


class Answering(HFLM):
    """lm-eval's own transformers model, with the same batches and numbers, each batch computed by one process only.

    A batch is known by its content: no number depends on who computes it or when, and one journal serves all tasks.
    """

    def __init__(
        self, model: Any, tokenizer: Any, window: int, batch_size: int, journal: Journal | None = None
    ) -> None:
        # A copy: lm-eval adds a padding token where there is none. It cuts inputs itself; the tokenizer need not warn.
        own_tokenizer = copy.deepcopy(tokenizer)
        own_tokenizer.model_max_length = sys.maxsize
        with _weights_left_alone(model):
            super().__init__(model, tokenizer=own_tokenizer, max_length=window, batch_size=batch_size)
        self.journal, self.stderr = journal, sys.stderr
        self.progress: Callable[[int, int], None] | None = None
        self.truncated_inputs = 0
        self.answers: dict[str, Any] = {}
        self.rehearsed: dict[str, Job] | None = None
        self.generated: list[str] = []

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        """Return what lm-eval does."""
        return self._rehearse(partial(super().loglikelihood_rolling, requests))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        """Return what lm-eval does."""
        return self._rehearse(partial(super().generate_until, requests))

    def _rehearse(self, ask: Callable[[], Any]) -> Any:
        """Run lm-eval's loop over batches twice: first to learn all of them, then with their answers."""
        self.rehearsed, self.generated = {}, []
        ask()
        jobs, self.rehearsed, self.generated = self.rehearsed, None, []
        self._answer(jobs)
        return ask()

    def _answer(self, jobs: dict[str, Job]) -> dict[str, Any]:
        """Return the answer to each batch; this process computes its share of what the journal does not hold."""
        if self.rehearsed is not None:
            self.rehearsed |= jobs
            return {key: job.placeholder for key, job in jobs.items()}
        if jobs.keys() <= self.answers.keys():
            return self.answers
        found = self.journal.found if self.journal else {}
        mine = share_of([key for key in jobs if key not in self.answers])
        for done, key in enumerate(mine, 1):
            if key not in found:
                found[key] = jobs[key].compute()
                if self.journal:
                    self.journal.add(key, found[key])
            if self.progress:
                # lm-eval is kept from writing to stderr, the progress bar is not.
                with contextlib.redirect_stderr(self.stderr):
                    self.progress(done, len(mine))
        self.answers |= from_all([(key, found[key]) for key in mine])
        return self.answers

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        """Return lm-eval's answers, computed in its own batches; raise DataError if the window does not hold one."""
        longest = max(len(answer) for _, _, answer in requests)
        if longest > self.max_length:
            raise DataError(
                f"--window: {self.max_length} tokens do not hold an answer of {longest} that is asked about; "
                "choose a longer one, or fewer examples with --limit"
            )
        self.truncated_inputs += sum(
            len(context) + len(answer) > self.max_length + 1 for _, context, answer in requests
        )
        batches, jobs = {}, {}
        for indices in batches_of(requests, self.batch_size):
            batch = [requests[index] for index in indices]
            key = _digest([ids for _, *ids in batch])
            compute = partial(super()._loglikelihood_tokens, batch, disable_tqdm=True)
            batches[key], jobs[key] = indices, Job(compute, [(0.0, False)] * len(batch))
        answers = self._answer(jobs)
        found = {i: answer for key, indices in batches.items() for i, answer in zip(indices, answers[key], strict=True)}
        return [(float(value), bool(greedy)) for value, greedy in (found[index] for index in range(len(requests)))]

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **settings: Any) -> torch.Tensor:
        """Return lm-eval's continuation of one batch of token ids [batch, tokens]; sampling is seeded by the batch."""
        asked = _digest([context, max_length, stop, settings])
        # A task may sample several answers to the same prompt.
        self.generated.append(asked)
        key = _digest([asked, self.generated.count(asked)])
        generate = partial(super()._model_generate, context, max_length, stop, **settings)

        def compute() -> list[list[int]]:
            torch.manual_seed(int(key[:8], 16))
            return list(generate().tolist())

        return torch.tensor(self._answer({key: Job(compute, context.tolist())})[key])

    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As lm-eval's; counts the prompts that are cut."""
        ids, mask = super().tok_batch_encode(strings, padding_side, **options)
        kept = left_truncate_len or ids.shape[1]
        if self.rehearsed is not None:
            self.truncated_inputs += int((mask.sum(dim=1) > kept).sum())
        return ids[:, -kept:], mask[:, -kept:]


def batches_of(requests: Sequence[Request], size: int) -> list[list[int]]:
    """Return the indices of the requests in each batch that lm-eval (0.4.13, `Collator`) makes of them.

    The longest come first. Requests that differ in one last token share a row, of which there are `size` in a batch.

    >>> batches_of([(("a", "x"), [1, 2], [3]), (("b", "x"), [1, 2, 3], [4]), (("a", "y"), [1, 2], [5])], 1)
    [[1], [0, 2]]
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for index, (_, context, answer) in enumerate(requests):
        rows.setdefault((*context, *answer[:-1]), []).append(index)

    def longest_first(row: list[int]) -> tuple[int, tuple[int, ...]]:
        _, context, answer = requests[max(row, key=lambda index: len(requests[index][2]))]
        return -len(context) - len(answer), (*context, *answer)

    ordered = sorted(rows.values(), key=longest_first)
    return [list(chain.from_iterable(ordered[start : start + size])) for start in range(0, len(rows), size)]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, default=torch.Tensor.tolist).encode()).hexdigest()


@contextlib.contextmanager
def _weights_left_alone(model: Any) -> Iterator[None]:
    """lm-eval (0.4.13) ties the embeddings of a model once more, which those that PEFT has wrapped do not survive."""
    model.tie_weights = lambda: None
    try:
        yield
    finally:
        del model.tie_weights

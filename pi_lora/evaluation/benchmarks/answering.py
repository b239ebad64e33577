"""A loaded model as lm-eval takes one, whose batches are shared out between processes and kept in a journal."""

import contextlib
import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lm_eval.models.huggingface import HFLM

from pi_lora.distributed import from_all, share_of
from pi_lora.errors import DataError
from pi_lora.evaluation.journal import Journal

Answer = tuple[float, bool]
# As lm-eval tokenizes them: texts, token ids of the context, of the continuation.
Request = tuple[tuple[str, str], list[int], list[int]]


class Answering(HFLM):
    """lm-eval's transformers model around one that is loaded; its batches are shared out, and kept in a journal."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        window: int,
        batch_size: int,
        journal: Journal | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        # A copy: lm-eval adds a padding token where there is none. It cuts inputs itself; the tokenizer need not warn.
        own_tokenizer = copy.deepcopy(tokenizer)
        own_tokenizer.model_max_length = sys.maxsize
        with _weights_left_alone(model):
            super().__init__(model, tokenizer=own_tokenizer, max_length=window, batch_size=batch_size)
        self.journal, self.progress = journal, progress
        self.stderr = sys.stderr
        self.truncated_inputs = 0

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Answer]:
        """As lm-eval's, without its bars; ours shows even where `benchmark` keeps lm-eval from writing."""
        with contextlib.redirect_stderr(self.stderr):
            return list(super().loglikelihood(requests, disable_tqdm=True))

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        """lm-eval's batches as they would be, one at a time, so that no number depends on who computes them when.

        Raises:
            DataError: an answer alone is longer than the window; lm-eval cuts off what comes before it only.
        """
        longest = max(len(answer) for _, _, answer in requests)
        if longest > self.max_length:
            raise DataError(
                f"--window: {self.max_length} tokens do not hold an answer of {longest} that is asked about; "
                "choose a longer one, or fewer examples with --limit"
            )
        batches = batches_of(requests, self.batch_size)
        self.truncated_inputs = sum(len(context) + len(answer) > self.max_length + 1 for _, context, answer in requests)
        found: dict[str, list[Answer]] = dict(self.journal.found) if self.journal else {}
        mine = share_of(range(len(batches)))
        for done, number in enumerate(mine, 1):
            if str(number) not in found:
                batch = [requests[index] for index in batches[number]]
                found[str(number)] = super()._loglikelihood_tokens(batch, disable_tqdm=True)
                if self.journal:
                    self.journal.add(str(number), found[str(number)])
            if self.progress:
                self.progress(done, len(mine))
        answers = dict(from_all([(number, found[str(number)]) for number in mine]))
        indices = itertools.chain.from_iterable(batches)
        in_order = itertools.chain.from_iterable(answers[number] for number in range(len(batches)))
        by_request = dict(zip(indices, in_order, strict=True))
        return [(float(value), bool(greedy)) for value, greedy in (by_request[i] for i in range(len(requests)))]


def batches_of(requests: Sequence[Request], size: int) -> list[list[int]]:
    """The indices of the requests in each batch that lm-eval (0.4.13, `Collator`) makes of them.

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
    return [list(itertools.chain.from_iterable(ordered[start : start + size])) for start in range(0, len(rows), size)]


@contextlib.contextmanager
def _weights_left_alone(model: Any) -> Iterator[None]:
    """lm-eval (0.4.13) ties the embeddings of a model once more, which those that PEFT has wrapped do not survive."""
    model.tie_weights = lambda: None
    try:
        yield
    finally:
        del model.tie_weights

"""A loaded model as lm-eval takes one, whose answers are divided among processes and kept in a journal."""

import copy
import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs

from pi_lora.distributed import from_all, share_of
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import check_numbers
from pi_lora.evaluation.journal import Journal
from pi_lora.types import Progress, silent

# As lm-eval tokenizes them: texts, token ids of the context, of the continuation.
Request = tuple[Any, list[int], list[int]]


class Answering(HFLM):
    """lm-eval's own transformers model, with the same batches and numbers. Each batch is computed by one process only,
    and known by its content, so that one journal serves all tasks; but text that is sampled depends on what was sampled
    before, and every process samples all.
    """

    def __init__(self, model: Any, tokenizer: Any, window: int, batch_size: int, journal: Journal) -> None:
        # A copy: lm-eval adds a padding token where there is none. It cuts inputs itself; the tokenizer need not warn.
        own_tokenizer = copy.deepcopy(tokenizer)
        own_tokenizer.model_max_length = sys.maxsize
        # lm-eval (0.4.13) ties the embeddings of a model once more, which those that PEFT has wrapped do not survive.
        model.tie_weights = lambda: None
        try:
            super().__init__(model, tokenizer=own_tokenizer, max_length=window, batch_size=batch_size)
        finally:
            del model.tie_weights
        self.journal = journal
        self.progress: Progress = silent
        # What progress says when the requests with these indices have these answers.
        self.note: Callable[[Sequence[int], Sequence[Any]], str] = lambda indices, answers: ""
        self.truncated_inputs = self.asked = 0

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return lm-eval's answers, computed in its own batches; raise DataError if the window does not hold one."""
        longest = max(len(answer) for _, _, answer in requests)
        if longest > self.max_length:
            held = f"{self.max_length} tokens do not hold an answer of {longest} that is asked about"
            raise DataError(f"--window: {held}; choose a longer one, or fewer examples with --limit")
        self.truncated_inputs += sum(len(context + answer) > self.max_length + 1 for _, context, answer in requests)
        self.asked += len(requests)

        def compute(indices: list[int]) -> list[tuple[float, bool]]:
            batch = [requests[index] for index in indices]
            answered: list[tuple[float, bool]] = super(Answering, self)._loglikelihood_tokens(batch, disable_tqdm=True)
            numbers = all(math.isfinite(likelihood) for likelihood, _ in answered)
            check_numbers(self.model.name_or_path, self.model.dtype, numbers)
            return answered

        contents = [request[1:] for request in requests]
        # Of a rolling perplexity, lm-eval asks one batch at a time, and does not say of how many.
        answers = self._answers(batches_of(requests, self.batch_size), contents, compute, counted=override_bs is None)
        return [(float(value), bool(greedy)) for value, greedy in answers]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return lm-eval's texts, written in its own batches; count the prompts that are cut."""
        lengths = [len(self.tok_encode(request.args[0])) for request in requests]
        for request, length in zip(requests, lengths, strict=True):
            written = normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"]
            self.truncated_inputs += length > self.max_length - written
        self.asked += len(requests)
        collator = Collator(
            [(index, request.args[1]) for index, request in enumerate(requests)],
            sort_fn=lambda each: (-lengths[each[0]], requests[each[0]].args[0]),
            group_by="gen_kwargs",
        )
        batches = [[index for index, _ in chunk] for chunk in collator.get_batched(n=self.batch_size)]

        def compute(indices: list[int]) -> list[str]:
            batch = [requests[index] for index in indices]
            texts: list[str] = super(Answering, self).generate_until(batch, disable_tqdm=True)
            return texts

        sampled = any(request.args[1].get("do_sample") for request in requests)
        return self._answers(batches, [request.args for request in requests], compute, shared=not sampled)

    def _answers(
        self,
        batches: Sequence[list[int]],
        contents: Sequence[Any],
        compute: Callable[[list[int]], list[Any]],
        shared: bool = True,
        counted: bool = True,
    ) -> list[Any]:
        """Return the answer to each of `contents`, of which a batch has indices, as `compute` gives them."""
        journal = self.journal if shared else Journal()
        keyed = [
            (_key([contents[index] for index in indices]) if shared else str(number), indices)
            for number, indices in enumerate(batches)
        ]
        mine = share_of(keyed) if shared else keyed
        for done, (key, indices) in enumerate(mine, 1):
            if key not in journal.found:
                journal.add(key, compute(indices))
            self.progress(*((done, len(mine)) if counted else (self.asked, 0)), self.note(indices, journal.found[key]))
        own = [(key, journal.found[key]) for key, _ in mine]
        answers = dict(from_all(own) if shared else own)
        found = {i: answer for key, indices in keyed for i, answer in zip(indices, answers[key], strict=True)}
        return [found[index] for index in range(len(contents))]


def _key(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def batches_of(requests: Sequence[Request], size: int) -> list[list[int]]:
    """Return the indices of the requests in each batch that lm-eval (0.4.13, `Collator`) makes of them, the longest
    first. Requests that differ in one last token share a row, of which there are `size` in a batch.

    >>> batches_of([(("a", "x"), [1, 2], [3]), (("b", "x"), [1, 2, 3], [4]), (("a", "y"), [1, 2], [5])], 1)
    [[1], [0, 2]]
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for index, (_, context, answer) in enumerate(requests):
        rows.setdefault((*context, *answer[:-1]), []).append(index)
    ordered = [rows[tokens] for tokens in sorted(rows, key=lambda tokens: (-len(tokens), tokens))]
    return [list(chain.from_iterable(ordered[start : start + size])) for start in range(0, len(ordered), size)]

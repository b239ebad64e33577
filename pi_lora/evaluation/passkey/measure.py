"""Passkey retrieval (Mohtashami and Jaggi 2023; paper.tex, section 3.3): five random digits are hidden in a text and
asked for at its end; the success rate by their distance from the end measures the effective context window.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from pi_lora.distributed import number_of_processes
from pi_lora.evaluation.forward import check_ids, depends_on_length, forget_lengths
from pi_lora.evaluation.journal import Journal, journaled, measure_each
from pi_lora.evaluation.passkey.prompt import Grid, Trial, make_trial, trials_at
from pi_lora.evaluation.passkey.shared_prefix import SharedPrefix, last_logits, rows_at_once
from pi_lora.evaluation.results import PasskeyDepth, PasskeyScores, described
from pi_lora.models.load import LoadedModel
from pi_lora.types import Progress, silent

REQUIRED_SUCCESS = 0.2


def k_max(depths: Sequence[PasskeyDepth]) -> int:
    """Return the largest k such that every k' <= k succeeds at least 20 % of the time; 0 if the nearest does not."""
    reached = 0
    for depth in sorted(depths, key=lambda depth: depth.k):
        if depth.success_rate < REQUIRED_SUCCESS:
            break
        reached = depth.k
    return reached


def trials_until_certain(outcomes: Sequence[bool], trials: int) -> int:
    """Return the fewest further trials that can settle whether 20 % of all `trials` succeed; 0 once it is settled.

    >>> [trials_until_certain(found, 10) for found in ([], [True, False], [True, False, True], [False] * 8)]
    [2, 1, 0, 1]
    """
    required = next(number for number in range(trials + 1) if number / trials >= REQUIRED_SUCCESS)
    bearable = trials - required
    return max(0, min(required - sum(outcomes), bearable + 1 - outcomes.count(False)))


def measure_depths(
    grid: Grid,
    ask: Callable[[int, range], list[bool]],
    distance: Callable[[int], int],
    k_max_only: bool = False,
    journal: Journal | None = None,
) -> list[PasskeyDepth]:
    """Return the results at every depth, the nearest first; `ask` takes a depth by its number and some of its trials.
    `k_max_only` asks for no more than settles whether 20 % succeed, and ends at the first depth where they do not. With
    a journal each process measures its share; all return the same.
    """

    def measure(name: str) -> PasskeyDepth:
        depth, found = int(name), list[bool]()
        while more := trials_until_certain(found, grid.trials) if k_max_only else grid.trials - len(found):
            found += ask(depth, range(len(found), len(found) + more))
        rate = sum(found) / len(found)
        return PasskeyDepth(
            k=grid.ks[depth], distance=distance(depth), success_rate=rate, trials=len(found), outcomes=found
        )

    at_once = (number_of_processes() if journal else 1) if k_max_only else grid.depths
    found: list[PasskeyDepth] = []
    for start in range(0, grid.depths, at_once):
        names = [str(depth) for depth in range(grid.depths)[start : start + at_once]]
        for depth in measure_each(PasskeyDepth, names, measure, journal).values():
            found.append(depth)
            if k_max_only and depth.success_rate < REQUIRED_SUCCESS:
                return found
    return found


class PasskeyTest:
    """Puts the trials of a grid to a model.

    A trial succeeds if greedy decoding gives the digits. One forward pass over prompt and answer decides it: each
    answer token must be the model's first choice given the true ones before it. Text ahead of the key is computed once
    for all trials and depths, unless trials go `apart`, for models whose frequencies follow the length of the input.
    """

    def __init__(self, model: Any, tokenizer: Any, grid: Grid, apart: bool = False) -> None:
        self.model, self.tokenizer, self.grid, self.apart = model, tokenizer, grid, apart

    @torch.no_grad()
    def ask(self, depth: int, which: range) -> list[bool]:
        """Return whether each of some trials at one depth succeeds."""
        trials = trials_at(self.tokenizer, self.grid, depth, which)
        size = 1 if self.apart else rows_at_once(self.model, max(trial.length for trial in trials), self._prefix)
        batches = (trials[start : start + size] for start in range(0, len(trials), size))
        return [success for batch in batches for success in self._succeed(batch)]

    @cached_property
    def _prefix(self) -> SharedPrefix | None:
        """The text ahead of the key where it stands nearest to the end: the longest. The same in every process."""
        if self.apart:
            return None
        (first,) = trials_at(self.tokenizer, self.grid, 0, range(1))
        return SharedPrefix(self.model, first.prompt[: first.length - first.distance])

    def _succeed(self, batch: Sequence[Trial]) -> Iterator[bool]:
        if self.apart:
            forget_lengths(self.model)
        # The last digit predicts nothing that is asked for.
        rows = [[*trial.prompt, *trial.answer[:-1]] for trial in batch]
        width = max(map(len, rows))
        tail = max(width - len(trial.prompt) + 1 for trial in batch)
        chosen = last_logits(self.model, rows, tail, self._prefix).argmax(-1).tolist()
        for trial, choices in zip(batch, chosen, strict=True):
            first = len(trial.prompt) - 1 - (width - tail)
            yield tuple(choices[first : first + len(trial.answer)]) == trial.answer


def passkey_retrieval(
    model: Any,
    tokenizer: Any,
    grid: Grid,
    *,
    k_max_only: bool = False,
    apart: bool = False,
    journal: Journal | None = None,
    progress: Progress = silent,
) -> list[PasskeyDepth]:
    """Measure a grid, or with `k_max_only` no more of it than decides k_max; raise DataError if the target is short."""
    test = PasskeyTest(model, tokenizer, grid, apart)

    def ask(depth: int, which: range) -> list[bool]:
        found = test.ask(depth, which)
        progress(depth * grid.trials + which.stop, grid.depths * grid.trials)
        return found

    def distance(depth: int) -> int:
        return trials_at(tokenizer, grid, depth, range(1))[0].distance

    return measure_depths(grid, ask, distance, k_max_only, journal)


def evaluate_passkey(
    loaded: LoadedModel,
    target: int,
    depths: int,
    trials: int,
    seed: int,
    progress: Progress = silent,
    *,
    k_max_only: bool = False,
    shared: bool = False,
) -> PasskeyScores:
    """Measure passkey retrieval over `target` tokens of context; `k_max_only` measures no more than decides k_max. With
    `shared` each process measures its part of the depths, with the whole model, and an interrupted evaluation continues
    when it is called again.
    """
    grid = Grid(target, depths, trials, seed)
    first = make_trial(loaded.tokenizer, target, grid.ks[0], grid.keys[0][0])
    check_ids(loaded, [*first.prompt, *first.answer])
    # The first trial tells what the tokenizer makes of the prompt.
    decided_by = {"passkey": {**asdict(grid), "k_max_only": k_max_only, "first": [first.prompt, first.answer]}}
    with journaled(loaded, decided_by, f"of {depths} depths") if shared else nullcontext() as journal:
        found = passkey_retrieval(
            loaded.model,
            loaded.tokenizer,
            grid,
            k_max_only=k_max_only,
            apart=depends_on_length(loaded.config),
            journal=journal,
            progress=progress,
        )
    left_out = {"depths": grid.ks[len(found) :], "trials": depths * trials - sum(depth.trials for depth in found)}
    return PasskeyScores(
        **described(loaded),
        seed=seed,
        decoding="greedy",
        k_max_only=k_max_only,
        target=target,
        k_max=k_max(found),
        depths=found,
        **({"left_out": left_out} if k_max_only else {}),
    )

"""Passkey retrieval (Mohtashami and Jaggi 2023; paper.tex, section 3.3): the success rate by the distance of the
digits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from pydantic import Field

from pi_lora.distributed import number_of_processes
from pi_lora.evaluation.forward import HELD_TOKENS, check_numbers, forget_lengths, pass_tokens
from pi_lora.evaluation.journal import Journal
from pi_lora.evaluation.measurement import Result
from pi_lora.evaluation.metrics import longest_passing
from pi_lora.evaluation.passkey.prompt import Grid, Trial, trials_at
from pi_lora.evaluation.passkey.shared_prefix import SharedPrefix, last_logits, shared_prefix
from pi_lora.models.weights import finite
from pi_lora.types import Progress, silent

REQUIRED_SUCCESS = 0.2


class PasskeyDepth(Result):
    """The trials at one depth: `k` as asked for, `distance` as placed, in tokens from the key to the end."""

    k: int
    distance: int | None = None
    success_rate: float = Field(ge=0, le=1)
    trials: int
    outcomes: list[bool] | None = None


def k_max(depths: Sequence[PasskeyDepth]) -> int:
    """Return the largest k such that every k' <= k succeeds at least 20 % of the time; 0 if the nearest does not."""
    return longest_passing({depth.k: depth.success_rate for depth in depths}, REQUIRED_SUCCESS)


def trials_until_certain(outcomes: Sequence[bool], trials: int) -> int:
    """Return the fewest further trials that can settle whether 20 % of all `trials` succeed; 0 once it is settled.

    >>> [trials_until_certain(found, 10) for found in ([], [True, False], [True, False, True], [False] * 8)]
    [2, 1, 0, 1]
    """
    required = next(number for number in range(trials + 1) if number / trials >= REQUIRED_SUCCESS)
    return max(0, min(required - sum(outcomes), trials - required + 1 - outcomes.count(False)))


@dataclass
class PasskeyTest:
    """Runs the trials of a grid. One forward pass over prompt and answer decides a trial: each digit must be the first
    choice given those before it, as greedy decoding gives them. Text ahead of the key is computed once where that pays
    and has room, unless trials go `apart`, where frequencies follow the length of the input.
    """

    model: Any
    tokenizer: Any
    grid: Grid
    apart: bool = False
    progress: Progress = silent

    @torch.no_grad()
    def ask(self, depth: int, which: range) -> list[bool]:
        """Return whether each of some trials at one depth succeeds."""
        trials = trials_at(self.tokenizer, self.grid, depth, which)
        size = HELD_TOKENS if self._prefix else pass_tokens(self.model)
        size = 1 if self.apart else max(1, size // self.grid.target)
        batches = (trials[start : start + size] for start in range(0, len(trials), size))
        outcomes = [success for batch in batches for success in self._succeed(batch)]
        self.progress(depth * self.grid.trials + which.stop, self.grid.depths * self.grid.trials)
        return outcomes

    def distance(self, depth: int) -> int:
        """Return how many tokens the key stands from the end at a depth."""
        return trials_at(self.tokenizer, self.grid, depth, range(1))[0].distance

    @cached_property
    def _prefix(self) -> SharedPrefix | None:
        """The text ahead of the key where it stands nearest to the end: the longest. It costs a prompt, of which each
        trial saves a half on average.
        """
        if self.apart or self.grid.depths * self.grid.trials <= 2 * number_of_processes():
            return None
        (first,) = trials_at(self.tokenizer, self.grid, 0, range(1))
        return shared_prefix(self.model, first.prompt[: first.length - first.distance], self.grid.target)

    def _succeed(self, batch: Sequence[Trial]) -> Iterator[bool]:
        if self.apart:
            forget_lengths(self.model)
        # The last digit predicts nothing that is asked for.
        rows = [[*trial.prompt, *trial.answer[:-1]] for trial in batch]
        width = max(map(len, rows))
        tail = max(width - len(trial.prompt) + 1 for trial in batch)
        logits = last_logits(self.model, rows, tail, self._prefix)
        check_numbers(self.model.name_or_path, self.model.dtype, finite(logits))
        chosen = logits.argmax(-1).tolist()
        for trial, choices in zip(batch, chosen, strict=True):
            first = len(trial.prompt) - 1 - (width - tail)
            yield tuple(choices[first : first + len(trial.answer)]) == trial.answer


def passkey_retrieval(
    test: PasskeyTest, k_max_only: bool = False, journal: Journal | None = None
) -> list[PasskeyDepth]:
    """Return the results at every depth, the nearest first; with `k_max_only` of no more trials than settle whether 20
    % succeed, up to the first depth where they do not. Raise DataError if the target is too short.
    """
    grid, journal = test.grid, journal or Journal()

    def measure(name: str) -> PasskeyDepth:
        depth, outcomes = int(name), list[bool]()
        while more := trials_until_certain(outcomes, grid.trials) if k_max_only else grid.trials - len(outcomes):
            outcomes += test.ask(depth, range(len(outcomes), len(outcomes) + more))
        return PasskeyDepth(
            k=grid.ks[depth],
            distance=test.distance(depth),
            success_rate=sum(outcomes) / len(outcomes),
            trials=len(outcomes),
            outcomes=outcomes,
        )

    at_once = number_of_processes() if k_max_only else grid.depths
    depths: list[PasskeyDepth] = []
    for start in range(0, grid.depths, at_once):
        names = [str(depth) for depth in range(grid.depths)[start : start + at_once]]
        for depth in journal.measure(PasskeyDepth, names, measure).values():
            depths.append(depth)
            if k_max_only and depth.success_rate < REQUIRED_SUCCESS:
                return depths
    return depths

"""Passkey retrieval (Mohtashami and Jaggi 2023; paper.tex, section 3.3): the success rate by the distance of the
digits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from pi_lora.distributed import number_of_processes
from pi_lora.drawing import sparkline
from pi_lora.evaluation.forward import check_ids, check_numbers, depends_on_length, described, forget_lengths
from pi_lora.evaluation.journal import Journal, journaled
from pi_lora.evaluation.passkey.prompt import Grid, Trial, trials_at
from pi_lora.evaluation.passkey.shared_prefix import SharedPrefix, last_logits, rows_at_once, shared_prefix
from pi_lora.evaluation.results import PasskeyDepth, PasskeyMap, PasskeyScores
from pi_lora.models.finite import finite
from pi_lora.models.model import Model
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
    return max(0, min(required - sum(outcomes), trials - required + 1 - outcomes.count(False)))


class PasskeyTest:
    """Puts the trials of a grid to a model. One forward pass over prompt and answer decides a trial: each digit must be
    the first choice given those before it, as greedy decoding gives them. Text ahead of the key is computed once where
    that pays and has room, unless trials go `apart`, where frequencies follow the length of the input.
    """

    def __init__(
        self, model: Any, tokenizer: Any, grid: Grid, apart: bool = False, progress: Progress = silent
    ) -> None:
        self.model, self.tokenizer, self.grid, self.apart, self.progress = model, tokenizer, grid, apart, progress
        self.found: dict[int, list[bool]] = {}

    @torch.no_grad()
    def ask(self, depth: int, which: range) -> list[bool]:
        """Return whether each of some trials at one depth succeeds."""
        trials = trials_at(self.tokenizer, self.grid, depth, which)
        size = 1 if self.apart else rows_at_once(self.model, max(trial.length for trial in trials), self._prefix)
        batches = (trials[start : start + size] for start in range(0, len(trials), size))
        found = [success for batch in batches for success in self._succeed(batch)]
        self.found.setdefault(depth, []).extend(found)
        rates = [sum(each) / len(each) for each in self.found.values()]
        note = f"{rates[-1]:.0%} at {self.grid.ks[depth]:,} tokens {sparkline(rates, 0, 1, len(rates))}"
        self.progress(depth * self.grid.trials + which.stop, self.grid.depths * self.grid.trials, note)
        return found

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
        depth, found = int(name), list[bool]()
        while more := trials_until_certain(found, grid.trials) if k_max_only else grid.trials - len(found):
            found += test.ask(depth, range(len(found), len(found) + more))
        rate = sum(found) / len(found)
        return PasskeyDepth(
            k=grid.ks[depth], distance=test.distance(depth), success_rate=rate, trials=len(found), outcomes=found
        )

    at_once = number_of_processes() if k_max_only else grid.depths
    found: list[PasskeyDepth] = []
    for start in range(0, grid.depths, at_once):
        names = [str(depth) for depth in range(grid.depths)[start : start + at_once]]
        for depth in journal.measure(PasskeyDepth, names, measure).values():
            found.append(depth)
            if k_max_only and depth.success_rate < REQUIRED_SUCCESS:
                return found
    return found


def evaluate_passkey(
    loaded: Model, grid: Grid, progress: Progress = silent, *, k_max_only: bool = False, shared: bool = False
) -> PasskeyScores:
    """Measure passkey retrieval; `k_max_only` measures no more than decides k_max. With `shared` each process measures
    its part of the depths, and an interrupted evaluation continues when it is called again.
    """
    [first] = trials_at(loaded.tokenizer, grid, 0, range(1))
    check_ids(loaded, [*first.prompt, *first.answer])
    # The first trial tells what the tokenizer makes of the prompt.
    decided_by = {"passkey": {**asdict(grid), "k_max_only": k_max_only, "first": [first.prompt, first.answer]}}
    test = PasskeyTest(loaded.model, loaded.tokenizer, grid, depends_on_length(loaded.config), progress)
    with journaled(loaded, decided_by, f"of {grid.depths} depths", shared) as journal:
        found = passkey_retrieval(test, k_max_only, journal)
    made = sum(depth.trials for depth in found)
    left_out = {"depths": grid.ks[len(found) :], "trials": grid.depths * grid.trials - made}
    return PasskeyScores(
        **described(loaded),
        seed=grid.seed,
        decoding="greedy",
        k_max_only=k_max_only,
        target=grid.target,
        k_max=k_max(found),
        depths=found,
        **({"left_out": left_out} if k_max_only else {}),
    )


def evaluate_passkey_map(
    loaded: Model, grids: Sequence[Grid], progress: Progress = silent, *, shared: bool = False
) -> PasskeyMap:
    """Measure passkey retrieval on several grids, which differ in their targets; otherwise as `evaluate_passkey`."""

    def measure(number: int, grid: Grid) -> PasskeyScores:
        def moved(done: int, total: int, note: str = "") -> None:
            progress(number * total + done, len(grids) * total, f"within {grid.target:,}: {note}")

        return evaluate_passkey(loaded, grid, moved, shared=shared)

    lengths = [measure(*each) for each in enumerate(grids)]
    return PasskeyMap(**described(loaded), seed=grids[0].seed, lengths=lengths)

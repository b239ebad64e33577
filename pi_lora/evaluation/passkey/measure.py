"""Passkey retrieval (Mohtashami and Jaggi 2023; paper.tex, section 3.3): model and tokenizer in, numbers out.

Five random digits are hidden in a text of `target` tokens and asked for at its end. The success rate over how far back
they stand measures the effective context window.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pi_lora.data.cache import cache_folder
from pi_lora.distributed import from_all, is_leader, number_of_processes, share_of
from pi_lora.errors import Interrupted, ModelError
from pi_lora.evaluation.journal import Journal, depends_on_length, identity_of
from pi_lora.evaluation.passkey.prompt import Grid, Trial, make_trial, trials_at
from pi_lora.evaluation.passkey.shared_prefix import SharedPrefix, last_logits, rows_at_once
from pi_lora.evaluation.results import described
from pi_lora.models.load import LoadedModel
from pi_lora.types import Json, Progress, silent

REQUIRED_SUCCESS = 0.2


@dataclass(frozen=True)
class DepthScore:
    """What came of the trials at one depth: `k` as asked for, `distance` as it was, in tokens from key to end."""

    k: int
    distance: int
    outcomes: tuple[bool, ...]

    @property
    def trials(self) -> int:
        """How many were made."""
        return len(self.outcomes)

    @property
    def success_rate(self) -> float:
        """The share of them that succeeded."""
        return sum(self.outcomes) / self.trials


@dataclass(frozen=True)
class PasskeyScore:
    """`k_max` in tokens, and what was found at every depth that was measured, the nearest first."""

    k_max: int
    depths: tuple[DepthScore, ...]


def k_max(scores: Sequence[DepthScore]) -> int:
    """The largest k such that every k' <= k succeeds at least 20 % of the time; 0 if the nearest does not."""
    reached = 0
    for score in sorted(scores, key=lambda score: score.k):
        if score.success_rate < REQUIRED_SUCCESS:
            break
        reached = score.k
    return reached


def trials_until_certain(outcomes: Sequence[bool], trials: int) -> int:
    """The fewest further trials that can settle whether 20 % of all `trials` succeed; 0 once it is settled.

    >>> [trials_until_certain(found, 10) for found in ([], [True, False], [True, False, True], [False] * 8)]
    [2, 1, 0, 1]
    """
    required = next(number for number in range(trials + 1) if number / trials >= REQUIRED_SUCCESS)
    bearable = trials - required
    return max(0, min(required - sum(outcomes), bearable + 1 - outcomes.count(False)))


def outcomes_of(ask: Callable[[range], list[bool]], trials: int, until_certain: bool) -> list[bool]:
    """What `ask` finds of the trials at one depth: of all, or of as many as settle whether 20 % of all succeed."""
    found: list[bool] = []
    while more := trials_until_certain(found, trials) if until_certain else trials - len(found):
        found += ask(range(len(found), len(found) + more))
    return found


def measure_depths(
    grid: Grid, measure: Callable[[int], DepthScore], k_max_only: bool = False, shared: bool = False
) -> list[DepthScore]:
    """What `measure` finds at every depth of the grid, by its number, the nearest first.

    With `k_max_only` nothing is measured beyond the first failure. `shared` gives each process its part of the depths;
    all get the same result, which does not depend on how many they are.
    """
    processes = number_of_processes() if shared else 1
    together = processes if k_max_only else grid.depths
    found: list[DepthScore] = []
    for start in range(0, grid.depths, together):
        numbers = range(grid.depths)[start : start + together]
        mine = [(number, measure(number)) for number in (share_of(numbers) if shared else numbers)]
        for _, score in sorted(from_all(mine) if shared else mine, key=lambda each: each[0]):
            found.append(score)
            if k_max_only and score.success_rate < REQUIRED_SUCCESS:
                return found
    return found


class PasskeyTest:
    """Puts the trials of a grid to a model.

    A trial succeeds if greedy decoding gives the digits. One forward pass over prompt and answer decides it: each
    answer token must be the model's first choice given the true ones before it. Text ahead of the key is computed once
    for all trials and depths. `apart` gives each trial a pass of its own, for models that compute the same tokens
    otherwise in a longer input.
    """

    def __init__(self, model: Any, tokenizer: Any, grid: Grid, apart: bool = False) -> None:
        self.model, self.tokenizer, self.grid, self.apart = model, tokenizer, grid, apart

    @torch.no_grad()
    def ask(self, depth: int, which: range) -> list[bool]:
        """Whether some of the trials at one depth succeed.

        Raises:
            DataError: the prompt does not fit into the target.
        """
        trials = trials_at(self.tokenizer, self.grid, depth, which)
        return [success for batch in self._batches(trials) for success in self._succeed(batch)]

    def distance(self, depth: int) -> int:
        """Tokens from the key to the end in the first trial at one depth."""
        return trials_at(self.tokenizer, self.grid, depth, range(1))[0].distance

    @cached_property
    def _prefix(self) -> SharedPrefix | None:
        """The text ahead of the key where it stands nearest to the end: the longest. The same in every process."""
        if self.apart:
            return None
        nearest = trials_at(self.tokenizer, self.grid, 0, range(1))[0]
        return SharedPrefix(self.model, nearest.before_key)

    def _batches(self, trials: Sequence[Trial]) -> Iterator[Sequence[Trial]]:
        width = max(trial.length for trial in trials)
        size = 1 if self.apart else rows_at_once(self.model, width, self._prefix)
        for start in range(0, len(trials), size):
            yield trials[start : start + size]

    def _succeed(self, batch: Sequence[Trial]) -> Iterator[bool]:
        if self.apart:
            forget_lengths(self.model)
        # Nothing is asked of what comes after the last digit.
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
    shared: bool = False,
    journal: Journal | None = None,
    progress: Progress = silent,
) -> PasskeyScore:
    """Measure a grid, or with `k_max_only` no more of it than decides k_max; depths in the `journal` are not repeated.

    Raises:
        DataError: the prompt does not fit into the target.
    """
    test = PasskeyTest(model, tokenizer, grid, apart)

    def ask(depth: int, which: range) -> list[bool]:
        found = test.ask(depth, which)
        progress(depth * grid.trials + which.stop, grid.depths * grid.trials)
        return found

    def measure(depth: int) -> DepthScore:
        known = journal.found.get(str(depth)) if journal else None
        if known is None:
            outcomes = outcomes_of(lambda which: ask(depth, which), grid.trials, k_max_only)
            known = {"distance": test.distance(depth), "outcomes": outcomes}
            if journal:
                journal.add(str(depth), known)
        return DepthScore(grid.ks[depth], known["distance"], tuple(known["outcomes"]))

    scores = measure_depths(grid, measure, k_max_only, shared)
    return PasskeyScore(k_max(scores), tuple(scores))


@torch.no_grad()
def forget_lengths(model: Any) -> None:
    """transformers keeps the `dynamic` frequencies of the longest input until one comes that is shorter than L."""
    model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)


def evaluate_passkey(
    loaded: LoadedModel,
    target: int,
    depths: int,
    trials: int,
    seed: int,
    progress: Progress | None = None,
    *,
    k_max_only: bool = False,
    shared: bool = False,
) -> Json:
    """Passkey retrieval over a context of `target` tokens; `k_max_only` measures no more than decides k_max.

    `shared` is for a command of its own: every process has the whole model and measures its part of the depths, and
    what is found is kept until all of it is.

    Raises:
        DataError: the prompt does not fit into `target` tokens.
        ModelError: the tokenizer does not fit the model.
        Interrupted: by Ctrl-C, when `shared`; the depths that were done are kept.
    """
    grid = Grid(target, depths, trials, seed)
    first = make_trial(loaded.tokenizer, target, grid.ks[0], grid.keys[0][0])
    _check_ids(loaded, first)
    journal = _journal(loaded, grid, first, k_max_only) if shared else None
    try:
        score = passkey_retrieval(
            loaded.model,
            loaded.tokenizer,
            grid,
            k_max_only=k_max_only,
            apart=depends_on_length(loaded.config),
            shared=shared,
            journal=journal,
            progress=progress or (silent),
        )
    except KeyboardInterrupt:
        if journal is None:
            raise
        raise Interrupted(
            f"{loaded.name}: interrupted; the depths that were done are kept: give the same command to go on"
        ) from None
    if journal and is_leader():
        # All have gathered what all have found, and none reads the journal any more.
        journal.finish()
    scores = {
        **described(loaded),
        "window": loaded.window,
        "seed": seed,
        "decoding": "greedy",
        "k_max_only": k_max_only,
        "target": target,
        "k_max": score.k_max,
        "depths": [_row(depth) for depth in score.depths],
    }
    if k_max_only:
        made = sum(depth.trials for depth in score.depths)
        scores["left_out"] = {"depths": grid.ks[len(score.depths) :], "trials": depths * trials - made}
    return scores


def _journal(loaded: LoadedModel, grid: Grid, first: Trial, k_max_only: bool) -> Journal:
    """What was found before of the same; the first trial tells what the tokenizer does to the prompt."""
    decided_by = {
        "passkey": {**dataclasses.asdict(grid), "k_max_only": k_max_only, "first": [first.prompt, first.answer]},
        "model": identity_of(loaded),
    }
    return Journal(cache_folder(), decided_by)


def _row(depth: DepthScore) -> dict[str, Any]:
    return {
        "k": depth.k,
        "distance": depth.distance,
        "success_rate": depth.success_rate,
        "trials": depth.trials,
        "outcomes": list(depth.outcomes),
    }


def _check_ids(loaded: LoadedModel, trial: Trial) -> None:
    known: Any = loaded.model.config.get_text_config().vocab_size
    largest = max(*trial.prompt, *trial.answer)
    if largest >= known:
        raise ModelError(
            f"{loaded.name}: its tokenizer gives the id {largest}, and the model knows {known} tokens; "
            "put the tokenizer beside it that it was trained with"
        )

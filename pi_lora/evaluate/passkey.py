"""Passkey retrieval over a context as long as a user names."""

import dataclasses
from typing import Any

from pi_lora.data.cache import cache_folder
from pi_lora.errors import Interrupted, ModelError
from pi_lora.evals.journal import Journal
from pi_lora.evals.passkey import DepthScore, passkey_retrieval
from pi_lora.evals.passkey_prompt import Grid, Trial, make_trial
from pi_lora.evaluate.models import depends_on_length, identity_of
from pi_lora.evaluate.scores import Progress, Scores, described
from pi_lora.processes import is_leader
from pi_lora.run import LoadedModel


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
) -> Scores:
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
            progress=progress or (lambda done, total: None),
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

"""Passkey retrieval over a context as long as a user names."""

import dataclasses

from pi_lora.evals.passkey import passkey_retrieval
from pi_lora.evaluate.scores import Progress, Scores, described
from pi_lora.run import LoadedModel


def evaluate_passkey(
    loaded: LoadedModel, target: int, depths: int, trials: int, seed: int, progress: Progress | None = None
) -> Scores:
    """Passkey retrieval over a context of `target` tokens.

    Raises:
        DataError: the prompt does not fit into `target` tokens.
    """
    score = passkey_retrieval(loaded.model, loaded.tokenizer, target, depths, trials, seed, progress=progress)
    return {**described(loaded), "seed": seed, "decoding": "greedy", **dataclasses.asdict(score)}

"""Passkey retrieval as plainly as it can be written: `generate` decodes greedily, one trial at a time."""

import random
from typing import Any

import torch

from pi_lora.evaluation.passkey import Trial, distances, make_trial


def generated(model: Any, tokenizer: Any, trial: Trial, use_cache: bool = True) -> str:
    """What greedy decoding answers."""
    answer = model.generate(
        torch.tensor([trial.prompt], device=model.device),
        max_new_tokens=len(trial.answer),
        do_sample=False,
        use_cache=use_cache,
        eos_token_id=None,
        pad_token_id=1,
    )
    text: str = tokenizer.decode(answer[0, len(trial.prompt) :])
    return text.strip()


def outcomes(model: Any, tokenizer: Any, target: int, number: int, trials: int, seed: int) -> list[list[bool]]:
    """Whether each trial succeeds, by depth, the nearest first."""
    rng = random.Random(seed)
    found: list[list[bool]] = []
    for k in distances(target, number):
        found.append([])
        for _ in range(trials):
            key = "".join(rng.choices("0123456789", k=5))
            found[-1].append(generated(model, tokenizer, make_trial(tokenizer, target, k, key)) == key)
    return found


def k_max(target: int, found: list[list[bool]]) -> int:
    """The largest k such that each k' up to it succeeds at least once in five."""
    reached = [sum(each) * 5 >= len(each) for each in found]
    ks = distances(target, len(found))
    return max((k for index, k in enumerate(ks) if all(reached[: index + 1])), default=0)

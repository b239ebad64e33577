"""Passkey retrieval (Mohtashami and Jaggi 2023; paper.tex, section 3.3): model and tokenizer in, numbers out.

Five random digits are hidden in a text of `target` tokens and asked for at its end. The success rate over how far back
they stand measures the effective context window.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pi_lora.errors import DataError

HEADER = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
STATEMENT = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
DIGITS = 5
REQUIRED_SUCCESS = 0.2


@dataclass(frozen=True)
class DepthScore:
    """Success at one depth: `k` as asked for, `distance` as it was, in tokens from the key to the end of the input."""

    k: int
    distance: int
    success_rate: float
    trials: int


@dataclass(frozen=True)
class PasskeyScore:
    """`k_max` in tokens, and the success rate at every depth, the nearest first."""

    target: int
    k_max: int
    depths: tuple[DepthScore, ...]


@dataclass(frozen=True)
class Trial:
    """Token ids of a prompt and its answer; `distance` in tokens from the first digit of the key to the end of both."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    distance: int

    @property
    def length(self) -> int:
        """Tokens of prompt and answer together."""
        return len(self.prompt) + len(self.answer)


def prompt(key: str, before: int, after: int) -> str:
    """The paper's prompt (figure 3) with the filler said `before` and `after` times around the key."""
    fillers = (" ".join([FILLER] * before), " ".join([FILLER] * after))
    parts = (HEADER, fillers[0], STATEMENT.format(key=key), fillers[1], QUESTION)
    return "\n".join(part for part in parts if part)


def depths(target: int, number: int) -> list[int]:
    """`number` distances uniformly spaced to `target` tokens.

    >>> depths(8192, 32)[:3], depths(8192, 32)[-1]
    ([256, 512, 768], 8192)
    """
    return [round(target * (index + 1) / number) for index in range(number)]


def k_max(scores: Sequence[DepthScore]) -> int:
    """The largest k such that every k' <= k succeeds at least 20 % of the time; 0 if the nearest does not."""
    reached = 0
    for score in sorted(scores, key=lambda score: score.k):
        if score.success_rate < REQUIRED_SUCCESS:
            break
        reached = score.k
    return reached


def make_trial(tokenizer: Any, target: int, k: int, key: str) -> Trial:
    """A prompt and answer that fill `target` tokens to within one filler, the key as near to `k` tokens from the end as
    whole fillers allow.

    Raises:
        DataError: not even the prompt without filler fits.
    """

    def trial(before: int, after: int) -> Trial:
        text = prompt(key, before, after)
        prompt_ids = _without_eos(tokenizer, tokenizer(text, verbose=False)["input_ids"])
        # Encoded together and then split: a tokenizer may treat the blank before the digits as it likes.
        both = tokenizer(f"{text} {key}", verbose=False)
        ids = _without_eos(tokenizer, both["input_ids"])
        return Trial(tuple(prompt_ids), tuple(ids[len(prompt_ids) :]), len(ids) - both.char_to_token(text.index(key)))

    bare, filler = trial(0, 0), trial(1, 2).length - trial(1, 1).length
    fillers = (target - bare.length) // filler
    if fillers < 0:
        raise DataError(
            f"--target: {target} tokens do not hold the passkey prompt, which needs {bare.length}; choose a longer one"
        )
    while fillers > 0 and trial(fillers // 2, fillers - fillers // 2).length > target:
        fillers -= 1
    after = min(fillers, max(0, round((k - bare.distance) / filler)))
    return trial(fillers - after, after)


@torch.no_grad()
def passkey_retrieval(
    model: Any,
    tokenizer: Any,
    target: int,
    number_of_depths: int = 32,
    trials: int = 10,
    seed: int = 0,
    batch_tokens: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> PasskeyScore:
    """Success rate at `number_of_depths` distances up to `target` tokens, `trials` random keys each.

    A trial succeeds if greedy decoding gives the digits. One forward pass over prompt and answer decides it: each
    answer token must be the model's first choice given the true ones before it.
    """
    rng = random.Random(seed)
    ks = depths(target, number_of_depths)
    all_trials = [
        [make_trial(tokenizer, target, k, "".join(rng.choices("0123456789", k=DIGITS))) for _ in range(trials)]
        for k in ks
    ]
    flat = [trial for each in all_trials for trial in each]
    batch_size = max(1, batch_tokens // target)
    successes: list[bool] = []
    for start in range(0, len(flat), batch_size):
        successes += _succeeds(model, flat[start : start + batch_size])
        if progress:
            progress(len(successes), len(flat))
    scores = tuple(
        DepthScore(
            k, max(trial.distance for trial in each), sum(successes[i * trials : (i + 1) * trials]) / trials, trials
        )
        for i, (k, each) in enumerate(zip(ks, all_trials, strict=True))
    )
    return PasskeyScore(target, k_max(scores), scores)


def _succeeds(model: Any, batch: Sequence[Trial]) -> Iterator[bool]:
    rows = [[*trial.prompt, *trial.answer] for trial in batch]
    width = max(map(len, rows))
    # Causal attention: what is padded on the right changes nothing before it.
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=model.device)
    tail = max(width - len(trial.prompt) + 1 for trial in batch)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=tail).logits
    for row, trial in enumerate(batch):
        first = len(trial.prompt) - 1 - (width - tail)
        chosen = logits[row, first : first + len(trial.answer)].argmax(-1)
        yield tuple(chosen.tolist()) == trial.answer


def _without_eos(tokenizer: Any, ids: list[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids

"""The passkey prompt (Mohtashami and Jaggi 2023; paper.tex, figure 3) and the trials made from it: tokenizer in, token
ids out.
"""

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pi_lora.errors import DataError

HEADER = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
STATEMENT = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
DIGITS = 5


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

    @property
    def before_key(self) -> tuple[int, ...]:
        """The prompt as far as the key."""
        return self.prompt[: self.length - self.distance]


@dataclass(frozen=True)
class Grid:
    """What is asked of a model: `trials` random keys at each of `depths` distances, spaced evenly to `target` tokens.

    The same seed gives the same keys, whichever of them are asked for.
    """

    target: int
    depths: int = 32
    trials: int = 10
    seed: int = 0

    @property
    def ks(self) -> list[int]:
        """The distances in tokens, the nearest first."""
        return depths(self.target, self.depths)

    @cached_property
    def keys(self) -> list[list[str]]:
        """The keys of all trials, by depth."""
        rng = random.Random(self.seed)
        return [["".join(rng.choices("0123456789", k=DIGITS)) for _ in range(self.trials)] for _ in range(self.depths)]


def depths(target: int, number: int) -> list[int]:
    """`number` distances uniformly spaced to `target` tokens.

    >>> depths(8192, 32)[:3], depths(8192, 32)[-1]
    ([256, 512, 768], 8192)
    """
    return [round(target * (index + 1) / number) for index in range(number)]


def prompt(key: str, before: int, after: int) -> str:
    """The paper's prompt (figure 3) with the filler said `before` and `after` times around the key."""
    fillers = (" ".join([FILLER] * before), " ".join([FILLER] * after))
    parts = (HEADER, fillers[0], STATEMENT.format(key=key), fillers[1], QUESTION)
    return "\n".join(part for part in parts if part)


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

    def placed(fillers: int) -> Trial:
        after = min(fillers, max(0, round((k - bare.distance) / filler)))
        return trial(fillers - after, after)

    found = placed(fillers)
    # Where a line begins, a filler may take more tokens than where a line goes on.
    while found.length > target and fillers > 0:
        fillers -= 1
        found = placed(fillers)
    return found


def trials_at(tokenizer: Any, grid: Grid, depth: int, which: range) -> list[Trial]:
    """Some of the trials at one depth, by their numbers.

    Raises:
        DataError: the prompt does not fit into the target.
    """
    return [make_trial(tokenizer, grid.target, grid.ks[depth], grid.keys[depth][number]) for number in which]


def _without_eos(tokenizer: Any, ids: list[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids

"""The passkey prompt (Mohtashami and Jaggi 2023; paper.tex, figure 3) and its trials: tokenizer in, token ids out."""

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


@dataclass(frozen=True)
class Grid:
    """`trials` random keys at each of `depths` distances, spaced evenly to `target` tokens; the seed gives the keys."""

    target: int
    depths: int = 32
    trials: int = 10
    seed: int = 0

    @property
    def ks(self) -> list[int]:
        """The distances in tokens, the nearest first.

        >>> Grid(8192, 32).ks[:3], Grid(8192, 32).ks[-1]
        ([256, 512, 768], 8192)
        """
        return [round(self.target * (index + 1) / self.depths) for index in range(self.depths)]

    @cached_property
    def keys(self) -> list[list[str]]:
        """The keys of all trials, by depth."""
        rng = random.Random(self.seed)
        return [["".join(rng.choices("0123456789", k=DIGITS)) for _ in range(self.trials)] for _ in range(self.depths)]


def prompt(key: str, before: int, after: int) -> str:
    """Return the paper's prompt (figure 3) with the filler `before` and `after` times around the key."""
    parts = (HEADER, " ".join([FILLER] * before), STATEMENT.format(key=key), " ".join([FILLER] * after), QUESTION)
    return "\n".join(part for part in parts if part)


def make_trial(tokenizer: Any, target: int, k: int, key: str) -> Trial:
    """Return a trial of `target` tokens to within one filler, the key about `k` tokens from the end."""
    bare = _trial(tokenizer, key, 0, 0)
    filler = _trial(tokenizer, key, 1, 2).length - _trial(tokenizer, key, 1, 1).length
    fillers = (target - bare.length) // filler
    if fillers < 0:
        needed = f"{target} tokens do not hold the passkey prompt, which needs {bare.length}"
        raise DataError(f"--target: {needed}; choose a longer one")
    wanted = max(0, round((k - bare.distance) / filler))
    # Where a line begins, a filler may take more tokens than inside it: one filler fewer may be needed.
    while True:
        after = min(fillers, wanted)
        found = _trial(tokenizer, key, fillers - after, after)
        if found.length <= target or fillers == 0:
            return found
        fillers -= 1


def trials_at(tokenizer: Any, grid: Grid, depth: int, which: range) -> list[Trial]:
    """Return some of the trials at one depth, by their numbers; raise DataError if the prompt does not fit."""
    return [make_trial(tokenizer, grid.target, grid.ks[depth], grid.keys[depth][number]) for number in which]


def _trial(tokenizer: Any, key: str, before: int, after: int) -> Trial:
    text = prompt(key, before, after)
    at, prompt_ids = text.index(key), _ids(tokenizer, text)
    # Encoded together and then split: a tokenizer may treat the blank before the digits as it likes.
    both = tokenizer(f"{text} {key}", verbose=False)
    ids = _without_eos(tokenizer, both["input_ids"])
    # Slow tokenizers do not say where their tokens are.
    digits = both.char_to_token(at) if tokenizer.is_fast else len(_ids(tokenizer, text[:at].rstrip()))
    return Trial(tuple(prompt_ids), tuple(ids[len(prompt_ids) :]), len(ids) - digits)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return _without_eos(tokenizer, tokenizer(text, verbose=False)["input_ids"])


def _without_eos(tokenizer: Any, ids: list[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids

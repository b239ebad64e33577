"""Passkey retrieval as plainly as it can be written, without a line of the package: the key is placed by trying every
place, and `generate` decodes greedily, one trial at a time.
"""

import random
from typing import Any, NamedTuple

import torch

HEADER = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Placed(NamedTuple):
    """The ids of prompt and answer, and the tokens from the first digit of the key to the end."""

    ids: list[int]
    distance: int


def text_of(key: str, before: int, after: int) -> str:
    """The prompt of the paper's figure 3, and the answer."""
    lines = [HEADER, " ".join([FILLER] * before), f"The pass key is {key}. Remember it. {key} is the pass key."]
    lines += [" ".join([FILLER] * after), "What is the pass key? The pass key is"]
    return "\n".join(line for line in lines if line) + f" {key}"


def placed(tokenizer: Any, target: int, k: int, key: str) -> Placed:
    """As many fillers as the target holds, and of their places around the key the one nearest to `k`."""
    fillers: list[list[Placed]] = []
    while not fillers or fillers[-1]:
        number = len(fillers)
        fitting = []
        for after in range(number + 1):
            text = text_of(key, number - after, after)
            encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
            first = next(i for i, (_, end) in enumerate(encoded["offset_mapping"]) if end > text.index(key))
            if len(encoded["input_ids"]) <= target:
                fitting.append(Placed(encoded["input_ids"], len(encoded["input_ids"]) - first))
        fillers.append(fitting)
    return min(fillers[-2], key=lambda each: abs(each.distance - k))


def generated(model: Any, tokenizer: Any, ids: list[int], tokens: int) -> str:
    """What greedy decoding writes in place of the last tokens."""
    answer = model.generate(
        torch.tensor([ids[:-tokens]], device=model.device),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=1,
    )
    text: str = tokenizer.decode(answer[0, -tokens:])
    return text.strip()


def distances(target: int, number: int) -> list[int]:
    """Evenly spaced up to the target."""
    return [round(target / number * index) for index in range(1, number + 1)]


def outcomes(model: Any, tokenizer: Any, target: int, number: int, trials: int, seed: int) -> list[list[bool]]:
    """Whether each trial succeeds, by depth, the nearest first."""
    rng = random.Random(seed)
    found: list[list[bool]] = []
    for k in distances(target, number):
        found.append([])
        for _ in range(trials):
            key = "".join(rng.choices("0123456789", k=5))
            answer = tokenizer(f" {key}", add_special_tokens=False)["input_ids"]
            ids = placed(tokenizer, target, k, key).ids
            found[-1].append(generated(model, tokenizer, ids, len(answer)) == key)
    return found


def k_max(target: int, found: list[list[bool]]) -> int:
    """The largest k such that each k' up to it succeeds at least once in five."""
    reached = [sum(each) * 5 >= len(each) for each in found]
    ks = distances(target, len(found))
    return max((k for index, k in enumerate(ks) if all(reached[: index + 1])), default=0)

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pi_lora.errors import DataError
from pi_lora.evals.passkey import (
    DepthScore,
    depths,
    k_max,
    make_trial,
    passkey_retrieval,
    prompt,
)
from pi_lora.run import load

PAPER_PROMPT = """\
There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. \
I will quiz you about the important information there.
The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
The pass key is 12345. Remember it. 12345 is the pass key.
The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. \
The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
What is the pass key? The pass key is"""


def score(k: int, rate: float) -> DepthScore:
    return DepthScore(k, k, rate, 10)


def test_the_prompt_is_the_papers() -> None:
    assert prompt("12345", 1, 2) == PAPER_PROMPT


def test_k_max_ends_before_the_first_failure() -> None:
    assert k_max([score(256, 1.0), score(512, 0.2), score(768, 0.1), score(1024, 1.0)]) == 512
    assert k_max([score(256, 0.1), score(512, 1.0)]) == 0
    assert k_max([score(512, 0.3), score(256, 1.0)]) == 512


@given(st.integers(1, 64), st.integers(64, 32768))
def test_depths_are_uniform_and_reach_the_target(number: int, target: int) -> None:
    found = depths(target, number)
    assert len(found) == number
    assert found[-1] == target
    assert all(abs(k - target * (i + 1) / number) <= 0.5 for i, k in enumerate(found))


def test_trials_fill_the_window_and_put_the_key_where_asked() -> None:
    tokenizer = load("builtin:tiny").tokenizer
    filler = len(tokenizer(prompt("12345", 1, 2))["input_ids"]) - len(tokenizer(prompt("12345", 1, 1))["input_ids"])
    for target in (256, 1024):
        distances = []
        for k in depths(target, 8):
            trial = make_trial(tokenizer, target, k, "90817")
            ids = [*trial.prompt, *trial.answer]
            assert target - filler < len(ids) <= target
            assert tokenizer.decode(trial.answer).strip() == "90817"
            first_digit = tokenizer.convert_tokens_to_ids("9")
            assert len(ids) - ids.index(first_digit) == trial.distance
            distances.append(trial.distance)
            if 64 <= k <= target - 100:
                assert abs(trial.distance - k) <= filler / 2 + 1
        assert distances == sorted(distances)
        assert distances[-1] > target - 100


def test_a_target_too_short_for_the_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="--target: 50 tokens do not hold the passkey prompt"):
        make_trial(load("builtin:tiny").tokenizer, 50, 10, "12345")


def generated(model: Any, tokenizer: Any, ids: tuple[int, ...], number: int) -> str:
    answer = model.generate(
        torch.tensor([ids]), max_new_tokens=number, do_sample=False, eos_token_id=None, pad_token_id=1
    )
    text: str = tokenizer.decode(answer[0, len(ids) :])
    return text


@pytest.mark.parametrize("target", [256, 512])
def test_one_pass_agrees_with_generate(target: int) -> None:
    """At 256 the built-in model succeeds, at 512 it fails: both verdicts must be those of greedy decoding."""
    loaded = load("builtin:tiny")
    grid = passkey_retrieval(loaded.model, loaded.tokenizer, target, number_of_depths=3, trials=2, seed=7)
    import random

    rng = random.Random(7)
    for depth in grid.depths:
        successes = 0
        for _ in range(2):
            key = "".join(rng.choices("0123456789", k=5))
            trial = make_trial(loaded.tokenizer, target, depth.k, key)
            successes += generated(loaded.model, loaded.tokenizer, trial.prompt, len(trial.answer)).strip() == key
        assert depth.success_rate == successes / 2
    assert (grid.k_max == target) == (target == 256)


def test_the_seed_decides_the_keys(small_model: Path) -> None:
    tokenizer = load(str(small_model)).tokenizer
    assert make_trial(tokenizer, 256, 128, "11111") == make_trial(tokenizer, 256, 128, "11111")
    assert make_trial(tokenizer, 256, 128, "11111") != make_trial(tokenizer, 256, 128, "22222")

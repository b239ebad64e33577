"""What the built-in model's card says of it, measured."""

import pytest

from pi_lora.evaluation.passkey.measurement import evaluate_passkey
from pi_lora.evaluation.perplexity.measurement import evaluate_perplexity
from pi_lora.models.model import Model, load
from pi_lora.recipe.evaluation import PasskeyOptions, PerplexityOptions

SOME = PerplexityOptions(windows=(256, 1024), stride=128, documents=2, truncate=2048)


@pytest.fixture(scope="module")
def base() -> Model:
    return load("builtin:tiny")


def test_digits_are_single_tokens(base: Model) -> None:
    ids = base.tokenizer("is 90817.", add_special_tokens=False)["input_ids"]
    assert base.tokenizer.convert_ids_to_tokens(ids)[-6:] == ["9", "0", "8", "1", "7", "."]


def test_it_retrieves_every_passkey_inside_its_window(base: Model) -> None:
    scores = evaluate_passkey(base, PasskeyOptions(target=256, depths=16, trials=4, seed=1))
    assert scores.k_max == 256
    assert all(depth.success_rate == 1 for depth in scores.depths)


def test_beyond_its_window_it_fails_as_the_paper_says(base: Model) -> None:
    windows = evaluate_perplexity(base, SOME).windows
    assert windows[1].perplexity > 5 * windows[0].perplexity
    assert evaluate_passkey(base, PasskeyOptions(target=1024, depths=8, trials=2, seed=1)).k_max <= 256

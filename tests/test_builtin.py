"""What the built-in model's card says of it, measured."""

import pytest

from pi_lora.evaluation.passkey.measurement import evaluate_passkey
from pi_lora.models.model import Model, load
from pi_lora.recipe.evaluation import PasskeyOptions


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

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle_passkey import k_max as plain_k_max
from oracle_passkey import outcomes

from pi_lora.errors import DataError
from pi_lora.evaluation.passkey import Grid, PasskeyDepth, PasskeyTest, k_max, make_trial, prompt
from pi_lora.models.model import Extension, Model, load

PAPER_PROMPT = """\
There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. \
I will quiz you about the important information there.
The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
The pass key is 12345. Remember it. 12345 is the pass key.
The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. \
The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
What is the pass key? The pass key is"""

OUTCOMES = st.integers(1, 12).flatmap(
    lambda trials: st.lists(st.lists(st.booleans(), min_size=trials, max_size=trials), min_size=1, max_size=10)
)


def test_the_prompt_is_the_papers() -> None:
    assert prompt("12345", 1, 2) == PAPER_PROMPT


@given(OUTCOMES)
def test_k_max_is_the_papers(table: list[list[bool]]) -> None:
    ks = Grid(10_000, len(table), len(table[0])).ks
    depths = [
        PasskeyDepth(k=k, success_rate=sum(row) / len(row), trials=len(row)) for k, row in zip(ks, table, strict=True)
    ]
    assert k_max(depths) == plain_k_max(10_000, table)


def test_trials_fill_the_window_and_put_the_key_where_asked() -> None:
    tokenizer = load("builtin:tiny").tokenizer
    filler = len(tokenizer(prompt("12345", 1, 2))["input_ids"]) - len(tokenizer(prompt("12345", 1, 1))["input_ids"])
    for target in (256, 1024):
        distances = []
        for k in Grid(target, 8).ks:
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


def test_a_slow_tokenizer_places_the_key_as_a_fast_one_does() -> None:
    """It does not say where its tokens are."""
    fast = load("builtin:tiny").tokenizer

    class Slow:
        is_fast, eos_token_id = False, fast.eos_token_id

        def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
            return {"input_ids": fast(text, **options)["input_ids"]}

    for k in Grid(512, 4).ks:
        slow, expected = (make_trial(each, 512, k, "90817") for each in (Slow(), fast))
        assert (slow.prompt, slow.answer) == (expected.prompt, expected.answer)
        assert abs(slow.distance - expected.distance) <= 1


def test_a_target_too_short_for_the_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="--target: 50 tokens do not hold the passkey prompt"):
        make_trial(load("builtin:tiny").tokenizer, 50, 10, "12345")


def test_the_seed_decides_the_keys() -> None:
    keys = Grid(256, 4, 3, seed=1).keys
    assert keys == Grid(1024, 4, 3, seed=1).keys != Grid(256, 4, 3, seed=2).keys
    assert len({key for each in keys for key in each}) == 12
    tokenizer = load("builtin:tiny").tokenizer
    assert Grid(256, 4, 3, seed=1).trial(tokenizer, 2, 1) == make_trial(tokenizer, 256, 192, keys[2][1])


@pytest.fixture(scope="module")
def stretched() -> Model:
    """The built-in model interpolated to 320 tokens: not tuned for them, it retrieves about every other key."""
    return load("builtin:tiny", Extension(320, 256))


def test_every_trial_of_a_grid_ends_as_generate_does(stretched: Model) -> None:
    expected = outcomes(stretched.model, stretched.tokenizer, 320, 8, 5, seed=0)
    successes = sum(map(sum, expected))
    assert 10 <= successes <= 30
    test = PasskeyTest(stretched, Grid(320, 8, 5))
    found = [test.measure(depth) for depth in range(8)]
    assert [depth.outcomes for depth in found] == expected
    assert k_max(found) == plain_k_max(320, expected)


def test_text_ahead_of_the_key_goes_through_the_model_once(stretched: Model) -> None:
    tokens = []
    hook = stretched.model.register_forward_pre_hook(
        lambda module, arguments, named: tokens.append(named["input_ids"].numel()), with_kwargs=True
    )
    grid = Grid(1024, 4, 2)
    try:
        test = PasskeyTest(stretched, grid)
        for depth in range(4):
            test.measure(depth)
    finally:
        hook.remove()
    behind = sum(grid.trial(stretched.tokenizer, depth, number).distance for depth in range(4) for number in range(2))
    # What precedes the key, and up to a token a trial that is not the same in all of a batch.
    ahead = test.first.length - test.first.distance
    assert sum(tokens) == pytest.approx(ahead + behind, abs=4 * 8)


def test_a_dynamic_model_gives_the_same_whatever_was_asked_before() -> None:
    loaded = load("builtin:tiny", Extension(512, 256, "dynamic"))
    test = PasskeyTest(loaded, Grid(320, 4, 4, seed=1))
    alone = test.measure(1)
    loaded.model(input_ids=torch.full((1, 700), 5))
    assert test.measure(1) == alone

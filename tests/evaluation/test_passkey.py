"""Passkeys: the paper's prompt at the asked depths, trials as greedy generation decides them, and the command."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle_passkey import generated, outcomes, placed
from oracle_passkey import k_max as plain_k_max

from conftest import refused, run_captured
from pi_lora.api import load
from pi_lora.errors import DataError
from pi_lora.evaluation import forward
from pi_lora.evaluation.measurement import Session
from pi_lora.evaluation.passkey import (
    Passkey,
    PasskeyDepth,
    PasskeyScores,
    PasskeyTest,
    distances,
    k_max,
    make_trial,
    prompt,
)
from pi_lora.model_ref import ModelRef
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.evaluation import PasskeyOptions
from pi_lora.scaling.extension import Extension

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
    ks = distances(10_000, len(table))
    depths = [
        PasskeyDepth(k=k, success_rate=sum(row) / len(row), trials=len(row)) for k, row in zip(ks, table, strict=True)
    ]
    assert k_max(depths) == plain_k_max(10_000, table)


@pytest.mark.parametrize(("target", "depths"), [(256, 8), (320, 4)])
def test_the_key_is_placed_as_by_trying_every_place(target: int, depths: int) -> None:
    tokenizer = load("builtin:tiny").tokenizer
    for k in distances(target, depths):
        trial = make_trial(tokenizer, target, k, "90817")
        assert placed(tokenizer, target, k, "90817") == ([*trial.prompt, *trial.answer], trial.distance)


def test_trials_fill_the_window_and_place_the_key_at_its_depth() -> None:
    tokenizer = load("builtin:tiny").tokenizer
    filler = len(tokenizer(prompt("12345", 1, 2))["input_ids"]) - len(tokenizer(prompt("12345", 1, 1))["input_ids"])
    for target in (256, 512):
        found = []
        for k in distances(target, 8):
            trial = make_trial(tokenizer, target, k, "90817")
            ids = [*trial.prompt, *trial.answer]
            assert target - filler < len(ids) <= target
            assert tokenizer.decode(trial.answer).strip() == "90817"
            first_digit = tokenizer.convert_tokens_to_ids("9")
            assert len(ids) - ids.index(first_digit) == trial.distance
            found.append(trial.distance)
            if 64 <= k <= target - 100:
                assert abs(trial.distance - k) <= filler / 2 + 1
        assert found == sorted(found)
        assert found[-1] > target - 100


def test_slow_and_fast_tokenizers_place_the_key_alike() -> None:
    """It does not say where its tokens are."""
    fast = load("builtin:tiny").tokenizer

    class Slow:
        is_fast, bos_token_id, eos_token_id = False, fast.bos_token_id, fast.eos_token_id

        def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
            return {"input_ids": fast(text, **options)["input_ids"]}

    for k in distances(512, 4):
        slow, expected = (make_trial(each, 512, k, "90817") for each in (Slow(), fast))
        assert (slow.prompt, slow.answer) == (expected.prompt, expected.answer)
        assert abs(slow.distance - expected.distance) <= 1


def test_a_target_too_short_for_the_prompt_is_refused() -> None:
    tokenizer = load("builtin:tiny").tokenizer
    needed = len(tokenizer(f"{prompt('12345', 0, 0)} 12345")["input_ids"])
    with refused(DataError, f"--target: {needed - 1} ", needed):
        make_trial(tokenizer, needed - 1, 10, "12345")
    assert make_trial(tokenizer, needed, 10, "12345").length == needed


def grid(model: LoadedModel, target: int, depths: int, trials: int, seed: int = 0) -> PasskeyTest:
    return PasskeyTest(model, target, PasskeyOptions(depths=depths, trials=trials, seed=seed))


def test_the_seed_decides_the_keys(stretched: LoadedModel) -> None:
    keys = grid(stretched, 256, 4, 3, seed=1).keys
    assert keys == grid(stretched, 1024, 4, 3, seed=1).keys != grid(stretched, 256, 4, 3, seed=2).keys
    assert len({key for each in keys for key in each}) == 12


def test_every_trial_agrees_with_greedy_generation(stretched: LoadedModel, scores: PasskeyScores) -> None:
    expected = outcomes(stretched.module, stretched.tokenizer, 320, 4, 3, seed=0)
    assert 3 <= sum(map(sum, expected)) <= 9
    assert [depth.outcomes for depth in scores.depths] == expected
    assert scores.k_max == plain_k_max(320, expected)


@pytest.mark.slow
def test_a_grid_is_faster_than_greedy_generation(stretched: LoadedModel) -> None:
    """Two cores of an AMD EPYC took twice as long with a cache. `generate` is timed on one trial in five."""
    started = time.perf_counter()
    test = grid(stretched, 1024, 16, 5)
    found = [test.measure(depth) for depth in range(16)]
    ours = time.perf_counter() - started
    started = time.perf_counter()
    for depth, row in enumerate(found):
        trial = test.trials(depth)[0]
        ids = [*trial.prompt, *trial.answer]
        answer = generated(stretched.module, stretched.tokenizer, ids, len(trial.answer))
        assert (answer == test.keys[depth][0]) == row["outcomes"][0]
    assert ours < 5 * (time.perf_counter() - started)


def test_the_text_before_the_key_is_computed_once(stretched: LoadedModel) -> None:
    tokens = []
    hook = stretched.module.register_forward_pre_hook(
        lambda module, arguments, named: tokens.append(named["input_ids"].numel()), with_kwargs=True
    )
    test = grid(stretched, 512, 4, 2)
    try:
        behind = sum(2 * test.measure(depth)["distance"] for depth in range(4))
    finally:
        hook.remove()
    # What precedes the key, and up to a token a trial that is not the same as in the first.
    ahead = test.first.length - test.first.distance
    assert sum(tokens) == pytest.approx(ahead + behind, abs=4 * 8)


def test_trials_of_a_dynamic_model_do_not_depend_on_earlier_trials() -> None:
    loaded = load(ModelRef("builtin:tiny", extension=Extension(512, 256, "dynamic")))
    test = grid(loaded, 320, 4, 4, seed=1)
    alone = test.measure(1)
    loaded.module(input_ids=torch.full((1, 700), 5))
    assert test.measure(1) == alone


ASKED = PasskeyOptions(target=320, depths=4, trials=3)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where interrupted evaluations are kept."""
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "evaluations"


@pytest.fixture(scope="module")
def stretched() -> LoadedModel:
    return load(ModelRef("builtin:tiny", extension=Extension(320, 256)))


@pytest.fixture(scope="module")
def scores(stretched: LoadedModel) -> PasskeyScores:
    return Passkey().run(stretched, ASKED, Session())


def test_passkey_scores_hold_their_options(scores: PasskeyScores) -> None:
    assert (scores.model, scores.scale, scores.target, scores.seed) == ("builtin:tiny", 1.25, 320, 0)
    assert (scores.kernel, scores.dtype, scores.decoding) == ("blockwise", "float32", "greedy")
    assert [row.k for row in scores.depths] == [80, 160, 240, 320]
    for row in scores.depths:
        assert row.outcomes is not None
        assert row.trials == len(row.outcomes) == 3
        assert row.success_rate == sum(row.outcomes) / 3


def test_prompts_are_computed_whole_if_no_prefix_can_be_shared(
    stretched: LoadedModel, scores: PasskeyScores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of keys and values alone every layer keeps those of 320 tokens and more."""
    monkeypatch.setattr(forward, "deepcopy", lambda *_: pytest.fail("was shared"))
    monkeypatch.setattr(forward, "free_memory", lambda _device: 2**20)
    assert Passkey().run(stretched, ASKED, Session()) == scores


def test_two_processes_write_the_same_passkey_scores_as_one(python: str, kept: Path, tmp_path: Path) -> None:
    options = ["builtin:tiny", "--original", "256", "--target", "336", "--depths", "5", "--trials", "4"]
    launchers = {"one": [], "two": ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]}
    said = {}
    for name, launcher in launchers.items():
        command = [python, "-m", *launcher, "pi_lora", "eval", "passkey", *options, "--json", f"{name}.json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        said[name] = done.stdout
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text()
    assert said["one"] == said["two"]
    assert len({row["success_rate"] for row in json.loads((tmp_path / "one.json").read_text())["depths"]}) > 1
    assert list(kept.iterdir()) == []


def test_the_longest_window_is_measured_unless_another_is_named(small_model: Path) -> None:
    models = [resolve_model(str(small_model)), resolve_model("builtin:tiny")]
    assert Passkey().prepare(PasskeyOptions(), models).target == 256
    assert Passkey().prepare(PasskeyOptions(target=320), models).target == 320
    assert Passkey().prepare(PasskeyOptions(targets=(64, 128)), models).target is None


def test_each_of_several_lengths_is_measured_as_if_alone(stretched: LoadedModel, scores: PasskeyScores) -> None:
    both = Passkey().run(stretched, PasskeyOptions(targets=(320, 120), depths=4, trials=3), Session())
    shorter = Passkey().run(stretched, ASKED.changed(target=120), Session())
    assert [(each.target, each.depths) for each in both.by_length] == [(120, shorter.depths), (320, scores.depths)]
    assert (both.target, both.k_max) == (320, scores.k_max)


def test_the_command_measures_models_at_several_lengths(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small_model: Path, tmp_path: Path
) -> None:
    words = f"eval passkey builtin:tiny {small_model} --targets 200,120 --depths 2 --trials 1".split()
    file = tmp_path / "scores.json"
    status, out, errors = run_captured(capsys, monkeypatch, *words, "--json", str(file))
    assert (status, errors) == (0, "")
    assert "k_max at 120 " in out
    assert [(each["model"], each["target"]) for each in json.loads(file.read_text())] == [
        ("builtin:tiny", 200),
        (str(small_model), 200),
    ]
    status, _, errors = run_captured(capsys, monkeypatch, *words, "--targets", "no")
    assert (status, errors.count("\n"), errors.startswith("--targets: ")) == (2, 1, True)


def test_a_prompt_is_never_longer_than_the_target() -> None:
    """Of a tokenizer that splits the beginning of a line into more tokens, as some do."""

    class Words:
        is_fast, bos_token_id, eos_token_id = False, None, None

        def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
            return {"input_ids": list(range(len(text.split()) + 5 * text.count("\n")))}

    for target in range(90, 180):
        for k in distances(target, 3):
            trial = make_trial(Words(), target, k, "90817")
            assert target - 2 * 19 < trial.length == len(trial.prompt) + len(trial.answer) <= target

"""Measurements end: defaults come from a budget, and the duration is said before a measurement starts."""

import re
from pathlib import Path

import pytest

from conftest import run_captured
from pi_lora.evaluation.passkey import distances
from pi_lora.evaluation.perplexity import Sweep
from pi_lora.planning import training_plan
from pi_lora.recipe.budget import CPU_TOKENS, GPU_TOKENS
from pi_lora.recipe.evaluation import ContextOptions, PasskeyOptions, PerplexityOptions
from pi_lora.recipe.files import load_recipe

WINDOWS = [(256, 1024), (2048, 2048), (8192, 16384), (8192, 131072), (40960, 131072), (262144, 1010000)]


@pytest.mark.parametrize("budget", [CPU_TOKENS, GPU_TOKENS])
@pytest.mark.parametrize(("original", "target"), WINDOWS)
def test_what_is_read_by_default_does_not_grow_with_the_window(original: int, target: int, budget: int) -> None:
    """All documents at a stride of 256 in windows down to 256 tokens took thousands of passes of 128k tokens."""
    sizes = PerplexityOptions(data="x").sizes(target, [original], budget)
    pieces = Sweep(sizes["windows"], sizes["stride"]).pieces(sizes["truncate"])
    read = sizes["documents"] * sum(piece.stop - piece.start for piece in pieces)
    assert {original, target} <= {*sizes["windows"]}
    assert read <= 1.1 * budget or (sizes["documents"], sizes["truncate"]) == (1, target)
    passkeys = PasskeyOptions(target=target).amount(budget)
    anew = passkeys["trials"] * sum(distances(target, passkeys["depths"]))
    assert anew <= 1.3 * budget or (passkeys["depths"], passkeys["trials"]) == (4, 1)
    context = ContextOptions(data="x").amount(target, budget)
    assert context["documents"] * context["truncate"] <= budget or context["documents"] == 1


def test_what_is_given_counts_exactly() -> None:
    given = {"documents": 100, "truncate": 10**6, "stride": 256, "windows": (2048, 8192)}
    assert PerplexityOptions(**given).sizes(8192, [2048], CPU_TOKENS) == given
    whole = PerplexityOptions(documents="all", truncate="all").sizes(8192, [2048], CPU_TOKENS)
    assert (whole["documents"], whole["truncate"]) == ("all", "all")
    assert PasskeyOptions(target=131072, depths=32, trials=10).amount(CPU_TOKENS) == {"depths": 32, "trials": 10}


def test_the_recipes_of_the_paper_measure_as_the_paper() -> None:
    evaluation = load_recipe(Path("paper/7b_8k")).recipe.evaluation
    assert evaluation.perplexity
    assert evaluation.passkey
    sizes = evaluation.perplexity.sizes(8192, [2048], GPU_TOKENS)
    assert sizes == {"windows": (2048, 4096, 8192), "stride": 256, "truncate": "all", "documents": "all"}
    assert evaluation.passkey.amount(GPU_TOKENS) == {"depths": 32, "trials": 10}


@pytest.mark.parametrize(
    "words", ["passkey --trials 4 --target 256 --depths 2", "perplexity --documents 4", "context --documents 4"]
)
def test_the_duration_and_the_remedy_are_said_before_a_long_measurement(
    small_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
) -> None:
    """The option that is named shortens it, and a short measurement says nothing."""
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"The road {number} is long and the door is open. " * 40)
    name, option, value, *others = words.split()
    if name != "passkey":
        others += ["--data", str(tmp_path)]
    status, _, errors = run_captured(capsys, monkeypatch, "eval", name, str(small_model), *others, option, value)
    assert (status, errors) == (0, "")
    monkeypatch.setitem(training_plan.CPU_UTILIZATION, "float32", 1e-9)
    hours = []
    for _ in range(2):
        status, _, errors = run_captured(capsys, monkeypatch, "eval", name, str(small_model), *others, option, value)
        assert status == 0
        [line] = errors.splitlines()
        assert line.startswith(f"{name}: ")
        found = re.search(r"about ([\d.]+) (hours|days)", line)
        assert found
        hours.append(float(found[1]) * (24 if found[2] == "days" else 1))
        remedy = re.search(rf"{option} (\d+)", line)
        value = remedy[1] if remedy else value
    assert hours[1] < hours[0]

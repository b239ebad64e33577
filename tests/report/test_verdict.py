"""The verdict with which a card begins."""

from pathlib import Path
from typing import Any

import pytest

from conftest import small_recipe
from pi_lora.evaluation.changes import Row
from pi_lora.evaluation.perplexity import Perplexity
from pi_lora.evaluation.ruler import Ruler
from pi_lora.model_ref import ModelRef
from pi_lora.models.files import save_config
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.evaluation import PerplexityOptions, RulerOptions
from pi_lora.report.card import card_of
from pi_lora.report.scores import MeasuredRun
from pi_lora.report.verdict import verdict_of
from pi_lora.scaling.extension import Extension
from reported import SCORES, benchmarks, make_run, passkey, perplexity, ruler


def outcomes(k_max: int) -> dict[str, Any]:
    scores = passkey(k_max)
    for depth in scores["depths"]:
        depth["outcomes"] = [depth["success_rate"] == 1] * depth["trials"]
    return scores


def verdict(model: Path, folder: Path, scores: dict[str, Any]) -> dict[str, str]:
    run = MeasuredRun(make_run(model, folder / "run", scores))
    base, untuned = (
        {name: stages[stage] for name, stages in run.scores.items() if stage in stages} for stage in ("base", "step 0")
    )
    return verdict_of(base, untuned, run.last_scores, run.metadata.original)


def test_the_verdict_says_how_far_it_reads_what_it_finds_and_what_it_cost(small_model: Path, tmp_path: Path) -> None:
    scores = {
        **SCORES,
        "passkey-base": outcomes(32),
        "passkey": outcomes(128),
        "ruler": ruler({128: {"a": [1.0, 0.5, 1.0, 0.5]}}),
        "benchmarks-base": benchmarks(0.75, 0.04),
        "benchmarks": benchmarks(0.75, 0.04),
    }
    lines = verdict(small_model, tmp_path, scores)
    assert list(lines) == ["Reads", "Finds", "Compared with no tuning", "Short inputs"]
    assert lines["Reads"] == "128 tokens with a perplexity of 7.125; the base reads 64 tokens with 8.500"
    assert lines["Finds"] == (
        "16 of 16 passkeys (81 to 100 %) in 128 tokens, the base 4 of 16 passkeys (10 to 49 %); "
        "RULER 75 % (30 to 95) in 128 tokens"
    )
    assert lines["Short inputs"] == (
        "perplexity at 64: 5.9 % worse, no interval; boolq (0-shot): within noise (-11.9 to +11.9 points)"
    )


def test_a_gain_that_tuning_alone_may_give_is_not_claimed_for_the_longer_window(
    small_model: Path, tmp_path: Path
) -> None:
    """A control, tuned without a longer window, was better than a run whose card claimed 10.3 % over the base."""
    scores = {"perplexity-base": perplexity(8.5, 60.0), "perplexity": perplexity(8.0, 9.0)}
    lines = verdict(small_model, tmp_path, scores)
    assert lines["Reads"].endswith("the base reads 64 tokens with 8.500: 5.9 % worse, no interval")
    gained, remark = lines["Short inputs"].split("; ")
    assert gained == "perplexity at 64: 5.9 % better, no interval"
    assert "without a longer window" in remark


def test_the_verdict_says_what_the_tuning_added_to_the_scaling(small_model: Path, tmp_path: Path) -> None:
    """A short tuning lost passkeys that the untuned scaling finds, and the table showed a gain over the base."""
    scores = {
        "perplexity-base": perplexity(8.5, 60.0),
        "perplexity-step-0": perplexity(9.5, 7.5),
        "perplexity": perplexity(9.0, 7.125),
        "passkey-base": outcomes(32),
        "passkey-step-0": outcomes(128),
        "passkey": outcomes(64),
    }
    lines = verdict(small_model, tmp_path, scores)
    assert lines["Compared with no tuning"] == (
        "passkeys retrieved at 128: 50.0 points worse (-72.1 to -16.8 points); "
        "perplexity at 128: 5.0 % better, no interval"
    )
    scores["perplexity-step-0"] = perplexity(9.5, 7.5, "other")
    scores["passkey"] = scores["passkey-step-0"]
    lines = verdict(small_model, tmp_path / "other", scores)
    assert lines["Compared with no tuning"] == "passkeys retrieved at 128: within noise (-15.4 to +15.4 points)"


NO_BASE = "the base was not measured in the same way"


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({}, {}),
        (
            {"perplexity": perplexity(9.0, 7.125)},
            {"Reads": "128 tokens with a perplexity of 7.125", "Short inputs": NO_BASE},
        ),
        (
            {"perplexity-base": perplexity(8.5, 60.0, "other"), "perplexity": perplexity(9.0, 7.125)},
            {"Reads": "128 tokens with a perplexity of 7.125", "Short inputs": NO_BASE},
        ),
        (
            {"perplexity-step-0": perplexity(9.5, 7.5)},
            {"Reads": "128 tokens with a perplexity of 7.500", "Short inputs": NO_BASE},
        ),
        ({"passkey": passkey(96)}, {"Finds": "passkeys up to 96 tokens in 128 tokens", "Short inputs": "not measured"}),
        ({"benchmarks": benchmarks(0.75, 0.04)}, {"Short inputs": NO_BASE}),
        ({"perplexity": {**perplexity(9.0, 7.125), "tuned_on": True}}, {"Short inputs": "not measured"}),
    ],
)
def test_the_verdict_claims_nothing_that_was_not_measured(
    small_model: Path, tmp_path: Path, scores: dict[str, Any], expected: dict[str, str]
) -> None:
    assert verdict(small_model, tmp_path, scores) == expected


def test_the_original_window_is_measured_by_default_or_named_as_not_measured(small_model: Path, tmp_path: Path) -> None:
    """Where L'/L is no power of two, no window was L, and the card said that the base was measured in another way."""
    run = make_run(small_model, tmp_path / "run", {}, small_recipe(small_model, context={"target": 160}))
    models = [resolve_model(str(run)), resolve_model(str(small_model))]
    for options in (PerplexityOptions(data="x"), PerplexityOptions(data="x", stride=40)):
        assert Perplexity().prepare(options, models).windows == (64, 80, 160)
        assert Perplexity().prepare(options, models[:1]).windows == (64, 80, 160)
    assert Ruler().prepare(RulerOptions(tasks=("ruler_vt",)), models).windows == (64, 80, 160)
    scores = {**perplexity(8.5, 9.0), "windows": [{"window": 160, "perplexity": 9.0, "tokens": 9}]}
    without = {"perplexity-base": scores, "perplexity": scores}
    lines = verdict(small_model, tmp_path / "other", without)
    assert lines["Short inputs"] == "not measured"


def test_a_base_alone_has_no_verdict(small_model: Path, tmp_path: Path) -> None:
    card = card_of(MeasuredRun(make_run(small_model, tmp_path / "run", {"perplexity-base": perplexity(8.5, 60.0)})))
    assert "**Reads**" not in card
    assert "Not measured" not in card


def test_the_card_begins_with_the_verdict(small_model: Path, tmp_path: Path) -> None:
    card = card_of(MeasuredRun(make_run(small_model, tmp_path / "run", SCORES)))
    assert (
        card.index("**Reads**") < card.index("| metric |") < card.index("## How it was made") < card.index("## Load it")
    )


def test_the_card_says_that_frequencies_have_divisors_of_their_own(small_model: Path, tmp_path: Path) -> None:
    run = make_run(small_model, tmp_path / "run", SCORES)
    extension = Extension(128, scaling="factors", factors=(1.0,) * 7 + (4.0,))
    save_config(resolve_model(ModelRef(str(small_model), extension=extension)).config, run)
    assert "every rotary frequency is divided by a number of its own" in card_of(MeasuredRun(run))


def test_a_change_without_a_unit_ends_with_the_interval() -> None:
    row = Row(measurement="chat KL", base=0.1, run=0.3, unit="", change=0.2, interval=(0.1, 0.3), verdict="0.200 worse")
    assert row.text == "0.200 worse (+0.100 to +0.300)"

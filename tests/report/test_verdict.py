"""The verdict with which a card begins."""

from pathlib import Path
from typing import Any

import pytest

from pi_lora.models.files import save_config
from pi_lora.models.resolve import resolve_model
from pi_lora.report.card import card_of
from pi_lora.report.scores import MeasuredRun
from pi_lora.report.verdict import verdict_lines
from pi_lora.scaling.config import Extension
from reported import SCORES, benchmarks, make_run, passkey, perplexity


def outcomes(k_max: int) -> dict[str, Any]:
    scores = passkey(k_max)
    for depth in scores["depths"]:
        depth["outcomes"] = [depth["success_rate"] == 1] * depth["trials"]
    return scores


def lines(model: Path, folder: Path, scores: dict[str, Any]) -> list[str]:
    return list(verdict_lines(MeasuredRun(make_run(model, folder / "run", scores))))


def test_the_verdict_says_how_far_it_reads_what_it_finds_and_what_it_cost(small_model: Path, tmp_path: Path) -> None:
    scores = {
        **SCORES,
        "passkey-base": outcomes(32),
        "passkey": outcomes(128),
        "benchmarks-base": benchmarks(0.75, 0.04),
        "benchmarks": benchmarks(0.75, 0.04),
    }
    reads, finds, costs = lines(small_model, tmp_path, scores)
    assert reads == (
        "**Reads** 128 tokens with a perplexity of 7.125; the base in its own 64 tokens has 8.500: "
        "16.2 % better, no interval."
    )
    assert finds.startswith("**Finds** 16 of 16 passkeys (")
    assert "in 128 tokens; the base 4 of 16 passkeys (" in finds
    assert costs == (
        "**Short inputs**, beside the base: perplexity at 64: 5.9 % worse, no interval; boolq (0-shot): within noise."
    )


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({}, []),
        (
            {"perplexity": perplexity(9.0, 7.125)},
            [
                "**Reads** 128 tokens with a perplexity of 7.125.",
                "**Short inputs**: the base was not measured in the same way.",
            ],
        ),
        (
            {"perplexity-base": perplexity(8.5, 60.0, "other"), "perplexity": perplexity(9.0, 7.125)},
            [
                "**Reads** 128 tokens with a perplexity of 7.125.",
                "**Short inputs**: the base was not measured in the same way.",
            ],
        ),
        (
            {"passkey": passkey(96)},
            [
                "**Finds** passkeys up to 96 tokens in 128 tokens.",
                "**Short inputs**: the base was not measured in the same way.",
            ],
        ),
    ],
)
def test_the_verdict_claims_nothing_that_was_not_measured(
    small_model: Path, tmp_path: Path, scores: dict[str, Any], expected: list[str]
) -> None:
    assert lines(small_model, tmp_path, scores) == expected


def test_the_card_begins_with_the_verdict(small_model: Path, tmp_path: Path) -> None:
    card = card_of(MeasuredRun(make_run(small_model, tmp_path / "run", SCORES)))
    assert (
        card.index("**Reads**") < card.index("| metric |") < card.index("## How it was made") < card.index("## Load it")
    )


def test_the_card_says_that_frequencies_have_divisors_of_their_own(small_model: Path, tmp_path: Path) -> None:
    run = make_run(small_model, tmp_path / "run", SCORES)
    save_config(resolve_model(str(small_model), Extension(128, scaling="cope")).config, run)
    assert "every rotary frequency is divided by a number of its own" in card_of(MeasuredRun(run))

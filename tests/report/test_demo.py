"""The table and the picture of scripts/demo.py."""

import sys
from pathlib import Path

import pytest
from reported import passkey, perplexity

from pi_lora.evaluation.passkey import PasskeyScores
from pi_lora.evaluation.perplexity import PerplexityScores

sys.path[:0] = [str(Path(__file__).parents[2] / "scripts")]


def test_the_demo_shows_a_row_and_a_curve_per_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import demo

    monkeypatch.setattr(demo, "DEMO", tmp_path / "demo")
    monkeypatch.setattr(demo, "WINDOWS", [64, 128])
    models = {
        name: [(PerplexityScores.model_validate(swept), PasskeyScores.model_validate(passkey(k_max)))]
        for name, swept, k_max in (("base", perplexity(9.25, 60.5), 64), ("PI", perplexity(9.5, 8.125), 128))
    }
    models["PI"] *= 2
    models["PI"][1] = models["base"][0]
    demo.show(models)
    rows = (tmp_path / "demo" / "table.md").read_text().splitlines()
    assert rows[0] == "| model | perplexity at 64 | perplexity at 128 | k_max |"
    assert rows[2:] == [
        "| base | 9.25 | 60.50 | 64 |",
        "| PI | 9.38 (9.25 to 9.50) | 34.31 (8.12 to 60.50) | 96 (64 to 128) |",
    ]
    printed = capsys.readouterr().out
    assert all(number in printed for number in ("9.25", "60.50", "9.38", "34.31", "96"))
    assert (tmp_path / "demo" / "demo.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 10_000

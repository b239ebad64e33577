from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pi_lora.evaluation.passkey.table import passkey_table
from pi_lora.evaluation.perplexity.table import perplexity_table
from pi_lora.evaluation.results import PasskeyScores, PerplexityScores
from pi_lora.report.pictures import comparison_picture
from pi_lora.report.tables import comparison_table, markdown_table


def scores(perplexities: list[float], rates: list[float], k_max: int) -> tuple[dict[str, Any], dict[str, Any]]:
    common = {"model": "m", "scale": 4.0, "dtype": "float32"}
    windows = [
        {"window": window, "perplexity": perplexity, "tokens": 1000}
        for window, perplexity in zip((256, 512), perplexities, strict=True)
    ]
    depths = [{"k": 256 * (i + 1), "success_rate": rate, "trials": 10} for i, rate in enumerate(rates)]
    return (
        {**common, "data": "builtin:stdlib", "documents": 3, "stride": 128, "windows": windows},
        {**common, "target": 512, "k_max": k_max, "seed": 0, "depths": depths},
    )


ROWS = {"base": scores([9.25, 60.5], [1.0, 0.0], 256), "PI": scores([9.5, 8.125], [1.0, 0.9], 512)}


def printed(table: Any) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_tables_hold_the_scores() -> None:
    assert "60.500" in printed(perplexity_table(PerplexityScores.model_validate(ROWS["base"][0])))
    assert "90%" in printed(passkey_table(PasskeyScores.model_validate(ROWS["PI"][1])))
    side_by_side = printed(comparison_table(ROWS))
    assert all(number in side_by_side for number in ("9.25", "60.50", "9.50", "8.12", "256", "512"))


def test_markdown_has_a_row_a_model() -> None:
    assert markdown_table(ROWS).splitlines()[2:] == ["| base | 9.25 | 60.50 | 256 |", "| PI | 9.50 | 8.12 | 512 |"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "folder" / "picture.png"
    comparison_picture(ROWS, 256, file)
    assert file.read_bytes()[:4] == b"\x89PNG"
    assert file.stat().st_size > 10_000

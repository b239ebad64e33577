"""The tables of the measurements that a report is made from."""

from typing import Any

from reported import passkey, perplexity
from rich.console import Console

from pi_lora.evaluation.passkey.table import passkey_table
from pi_lora.evaluation.perplexity.table import perplexity_table
from pi_lora.evaluation.results import PasskeyScores, PerplexityScores


def printed(table: Any) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_tables_hold_the_scores() -> None:
    windows = PerplexityScores.model_validate({**perplexity(9.25, 60.5), "dtype": "float32"})
    depths = PasskeyScores.model_validate({**passkey(64), "depths": [{"k": 64, "success_rate": 0.75, "trials": 4}]})
    assert "60.500" in printed(perplexity_table(windows))
    assert "75%" in printed(passkey_table(depths))

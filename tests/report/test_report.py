"""The tables of the measurements that a report is made from."""

from typing import Any

from reported import passkey, perplexity
from rich.console import Console

from pi_lora.evaluation.passkey.scores import PasskeyScores
from pi_lora.evaluation.perplexity.scores import PerplexityScores
from pi_lora.evaluation.table import scores_table


def printed(table: Any) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_tables_hold_the_scores() -> None:
    windows = PerplexityScores.model_validate({**perplexity(9.25, 60.5), "dtype": "float32"})
    depths = PasskeyScores.model_validate({**passkey(64), "depths": [{"k": 64, "success_rate": 0.75, "trials": 4}]})
    assert "60.500" in printed(scores_table([windows]))
    assert "75 %" in printed(scores_table([depths]))

"""benchmarks/loading.py knows the checks by name: each is there, and runs when a run is loaded."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import loading


def test_every_check_is_made(lora_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for check in loading.CHECKS:
        monkeypatch.setattr(loading, "CHECKS", (check,))
        assert loading.loaded(lora_run, checked=True)["checks"] > 0, check
    assert loading.loaded(lora_run, checked=False)["checks"] == 0

"""`pi-lora theory`: the numbers that it prints, and the figures that it draws."""

import json
from pathlib import Path

import pytest

from conftest import run_captured


def test_theory_prints_its_numbers_and_draws_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = tmp_path / "figures", tmp_path / "theory.json"
    status, printed, errors = run_captured(capsys, monkeypatch, "theory", "--output", str(folder), "--json", str(file))
    assert status == 0, errors
    numbers = ("294.73", "589.5", "657.8", "256.11", "512.2", "571.6", "1.116")
    assert all(number in printed for number in numbers)
    assert {file.name for file in folder.iterdir()} == {"positions.png", "fit.png", "bound.png"}
    assert json.loads(file.read_text())["bounds"]["lowest_at"] == 3643
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in folder.iterdir())
    words = "--head-dim 64 --theta 100000 --original 8k --target 16k".split()
    status, printed, errors = run_captured(
        capsys, monkeypatch, "theory", *words, "--output", str(folder), "--json", str(file)
    )
    assert status == 0, errors
    setting = json.loads(file.read_text())["setting"]
    assert setting == {"head_dim": 64, "theta": 100000.0, "original": 8192, "target": 16384}


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (["--target", "2048"], "--target: 2048 "),
        (["--output", "README.md/figures"], "README.md/figures: "),
    ],
)
def test_mistakes_in_theory_are_one_line(
    options: list[str],
    where: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text("text")
    status, _, errors = run_captured(capsys, monkeypatch, "theory", *options)
    assert (status, len(errors.splitlines())) == (2, 1), errors
    assert errors.startswith(where)

"""What was measured is kept until its result is on the disk, and a cache that is full or damaged stops nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import BUILTIN, run_command
from pi_lora.evaluation.measurement import append_journal, read_journal
from pi_lora.evaluation.passkey import PasskeyTest

PASSKEY = ["eval", "passkey", BUILTIN, "--target", "256", "--depths", "2", "--trials", "1"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The depths that are measured."""
    done, measure = [], PasskeyTest.measure

    def count(self: PasskeyTest, depth: int) -> dict[str, Any]:
        done.append(depth)
        return measure(self, depth)

    monkeypatch.setattr(PasskeyTest, "measure", count)
    return done


@pytest.mark.parametrize("command", ["passkey", "perplexity --data builtin:stdlib", "summarization --data rows.jsonl"])
@pytest.mark.parametrize("place", ["folder", "file/below.json", "x" * 300])
def test_an_unwritable_output_is_refused_before_a_model_is_loaded(
    command: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr("pi_lora.evaluation.suite.load_model", lambda *_: pytest.fail("was read"))
    assert run_command("eval", *command.split(), "builtin:tiny", "--json", place) == 2
    said = capsys.readouterr().err
    assert (said.startswith(f"{place.partition('/')[0]}: "), said.count("\n")) == (True, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_measurement_survives_a_failed_write_of_its_result(
    cache: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the result is there."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        assert run_command(*PASSKEY, "--json", "result.json") == 2
    assert len(measured) == 2
    assert len(list(cache.glob("evaluations/*/*.jsonl"))) == 1
    assert run_command(*PASSKEY, "--json", "result.json") == 0
    assert len(measured) == 2
    assert len(json.loads(Path("result.json").read_text())["depths"]) == 2
    assert not list(cache.glob("evaluations/*"))


def test_measurements_continue_without_a_usable_cache(cache: Path, measured: list[int]) -> None:
    cache.write_text("a file")
    assert run_command(*PASSKEY) == 0
    assert len(measured) == 2


LINES = {
    "of zeros": lambda line: bytes(len(line)),
    "cut off": lambda line: line[: len(line) // 2],
    "no text": lambda line: b"\xff\xfe" + line,
}


@pytest.mark.parametrize("damage", LINES)
def test_damaged_lines_of_a_journal_are_skipped(damage: str, tmp_path: Path) -> None:
    results = {name: {"k": k, "success_rate": 1.0} for k, name in enumerate("abc")}
    folder = tmp_path / "journal"
    for name, result in results.items():
        append_journal(name, result, folder)
    assert dict(read_journal(folder)) == results
    [file] = folder.iterdir()
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([lines[0], LINES[damage](lines[1]), lines[2]]) + b"\n")
    assert dict(read_journal(folder)) == {name: results[name] for name in "ac"}

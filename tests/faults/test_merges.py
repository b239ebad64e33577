"""A merge that is killed, and two at once."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from random_runs import save_run

from pi_lora.errors import RunExistsError
from pi_lora.merging.merging import merge
from pi_lora.models.model import load


@pytest.fixture(scope="module")
def run(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(small_model, tmp_path_factory.mktemp("merges") / "run", r=4, target_modules="all-linear")


KILLED = """
import os, sys
from pathlib import Path
from pi_lora.merging import check, merging

vars({module})["{function}"] = lambda *_: os.kill(os.getpid(), int(sys.argv[3]))
merging.merge(Path(sys.argv[1]), Path(sys.argv[2]), check="logits")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_while_tensors_are_checked(python: str, number: int, run: Path, tmp_path: Path) -> None:
    script = KILLED.format(module="merging", function="check_tensors")
    subprocess.run([python, "-c", script, str(run), str(tmp_path / "merged"), str(int(number))], capture_output=True)
    assert not (tmp_path / "merged").exists()
    merge(run, tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_while_logits_are_compared(python: str, number: int, run: Path, tmp_path: Path) -> None:
    """As the kernel does when memory runs out: the merge is whole, and its tensors are checked."""
    script = KILLED.format(module="check", function="_logits")
    subprocess.run([python, "-c", script, str(run), str(tmp_path / "merged"), str(int(number))], capture_output=True)
    kept = json.loads((tmp_path / "merged" / "merge.json").read_text())
    assert [line[:8] for line in kept["checks"]] == ["checked:"]
    load(str(tmp_path / "merged"))
    with pytest.raises(RunExistsError, match="already exists and is not overwritten"):
        merge(run, tmp_path / "merged")


def test_an_error_in_the_card_shows_before_weights_are_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("no card")

    monkeypatch.setattr("pi_lora.merging.merging.merged_card", fail)
    monkeypatch.setattr("pi_lora.merging.merging.write_shards", lambda *_: pytest.fail("began to write"))
    with pytest.raises(TypeError, match="no card"):
        merge(run, tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []

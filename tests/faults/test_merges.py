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

check._logits = lambda *_: os.kill(os.getpid(), int(sys.argv[3]))
merging.merge(Path(sys.argv[1]), Path(sys.argv[2]), check="logits")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_while_logits_are_compared(python: str, number: int, run: Path, tmp_path: Path) -> None:
    """As the kernel does when memory runs out: the merge is whole, and its tensors are checked."""
    subprocess.run([python, "-c", KILLED, str(run), str(tmp_path / "merged"), str(int(number))], capture_output=True)
    kept = json.loads((tmp_path / "merged" / "merge.json").read_text())
    assert [line[:8] for line in kept["checks"]] == ["checked:"]
    load(str(tmp_path / "merged"))
    with pytest.raises(RunExistsError, match="already exists and is not overwritten"):
        merge(run, tmp_path / "merged")

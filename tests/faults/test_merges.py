"""A merge that is written stays, whatever happens to its check and its card."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from adapters import save_run

from pi_lora.errors import Interrupted, RunExistsError
from pi_lora.merging import check
from pi_lora.merging.facts import read_merge
from pi_lora.merging.merging import merge
from pi_lora.models.model import load
from pi_lora.run import staged


@pytest.fixture(scope="module")
def run(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(small_model, tmp_path_factory.mktemp("merges") / "run", r=4, target_modules="all-linear")


def assert_kept(merged: Path, line: str) -> None:
    assert read_merge(merged).lines() == [line]
    assert (merged / "model.safetensors").is_file()
    assert not list(merged.parent.glob(".*"))
    load(str(merged))


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), MemoryError(), TypeError("a bug\nin a library")])
def test_an_error_in_the_check(error: Exception, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(check, "_logits", fail)
    merged = merge(run, tmp_path / "merged")
    why = (str(error).splitlines() or ["MemoryError"])[0]
    line = f"not checked: the check ended with an error ({type(error).__name__}: {why})"
    assert_kept(merged, line)
    assert line in (merged / "README.md").read_text()


@pytest.mark.parametrize("where", ["_tuned", "_logits", "_merged", "agreement"])
def test_ctrl_c_in_the_check(where: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, where, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted, match=r"merged: merged, and kept without a check, which was interrupted$"):
        merge(run, tmp_path / "merged")
    assert_kept(tmp_path / "merged", "not checked")
    assert "Not compared." in (tmp_path / "merged" / "README.md").read_text()


MERGE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from pi_lora.merging import check
from pi_lora.merging.merging import merge

check._logits = lambda *_: os.kill(os.getpid(), int(sys.argv[3]))
merge(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_in_the_check(python: str, number: int, run: Path, tmp_path: Path) -> None:
    """As the kernel does when memory runs out."""
    merged = tmp_path / "merged"
    done = subprocess.run([python, "-c", MERGE_AND_DIE, str(run), str(merged), str(number)], capture_output=True)
    assert done.returncode == -number
    assert_kept(merged, "not checked")
    with pytest.raises(RunExistsError, match="already exists and is not overwritten"):
        merge(run, merged)


def test_where_memory_runs_out_it_is_checked_layer_by_layer(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan said that it fits."""
    logits = check._logits

    def whole_does_not_fit(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        if not hasattr(next(each for each in model.modules() if isinstance(each, torch.nn.Linear)), "parametrizations"):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        return logits(model, ids)

    monkeypatch.setattr(check, "_logits", whole_does_not_fit)
    found = read_merge(merge(run, tmp_path / "merged")).check
    assert found
    assert (found.how, found.skipped, len(found.agreements)) == ("layer by layer", None, 3)


def test_the_check_plans_logits_and_activations(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for the weights alone is not enough."""
    weights = sum(tensor.numel() for tensor in load(str(run), dtype="float32").model.base_model.parameters()) * 4
    for free, how in ((weights * 2, "layer by layer"), (10**9, "whole")):
        monkeypatch.setattr(check, "free_memory", lambda place, free=free: free)
        found = read_merge(merge(run, tmp_path / how)).check
        assert found
        assert found.how == how


def test_an_error_in_the_card(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TypeError("no card")

    monkeypatch.setattr("pi_lora.merging.merging.merged_card", fail)
    with pytest.raises(TypeError, match="no card"):
        merge(run, tmp_path / "merged")
    facts = read_merge(tmp_path / "merged")
    assert facts.check
    assert len(facts.check.agreements) == 3
    load(str(tmp_path / "merged"))


def test_two_merges_into_one_output(run: Path, tmp_path: Path) -> None:
    with (
        staged(tmp_path / "merged"),
        pytest.raises(RunExistsError, match=r"is being made by process \d+ on .*; wait for it"),
    ):
        merge(run, tmp_path / "merged")


# As `pi-lora eval` writes them: the data of a summarization are a section of a recipe, and the standard error of one
# example is null.
MEASURED = {
    "benchmarks": {"tasks": {"boolq": {"acc": 1.0, "stderr": None, "examples": 1}}},
    "summarization": {
        "data": {"name": "reports.jsonl", "weight": 1.0, "split": "test"},
        "metric": "F1 in percent",
        "examples": 1,
        **dict.fromkeys(("rouge1", "rouge2", "rougeL", "geometric_mean"), 25.0),
        "intervals": {"rouge1": [24.0, 26.0]},
    },
}


def test_the_card_of_a_measured_run(run: Path, tmp_path: Path) -> None:
    measured = tmp_path / "run"
    shutil.copytree(run, measured)
    (measured / "scores").mkdir()
    for name, scores in MEASURED.items():
        (measured / "scores" / f"{name}.json").write_text(json.dumps({"model": "m", "scale": 2.0, **scores}))
    card = (merge(measured, tmp_path / "merged", verify=False) / "README.md").read_text()
    assert "**benchmarks**: boolq 1.000\n" in card
    assert "**summarization**: rouge1 25.00" in card

"""Signals at awkward moments: a connection that drops (SIGHUP, and a terminal that takes no more writes), a
measurement, and the saving of the finished run.
"""

import contextlib
import os
import pty
import signal
import subprocess
import time
from pathlib import Path
from types import ModuleType

import pytest

import conftest
from conftest import small_recipe, train
from pi_lora.errors import Interrupted
from pi_lora.models import saving
from pi_lora.recipe.files import dump_recipe
from pi_lora.run import Run
from pi_lora.staging import staging_path
from pi_lora.training.callbacks import ScheduledMeasurements

# What these tests start inherits it.
heard = pytest.mark.skipif(
    signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="SIGHUP is ignored here, as nohup does it"
)


@heard
@pytest.mark.parametrize("output", ["terminal", "pipe"])
def test_a_dropped_connection_ends_training_after_a_checkpoint(
    output: str, python: str, small_model: Path, tmp_path: Path
) -> None:
    """A progress bar on a terminal that is gone, or lines for a program that ended: every write fails."""
    (tmp_path / "recipe.yaml").write_text(dump_recipe(small_recipe(small_model)))
    command = [python, "-m", "pi_lora", "train", "recipe.yaml", "training.steps=1000", "--output", "run"]
    ours, theirs = pty.openpty() if output == "terminal" else os.pipe()
    with subprocess.Popen(command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        os.set_blocking(ours, False)
        said = b""
        while not Run(staging_path(tmp_path / "run")).log:
            with contextlib.suppress(BlockingIOError):
                said += os.read(ours, 65536)
            assert process.poll() is None, said
            time.sleep(0.05)
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        assert process.wait() == 130
    kept = Run(staging_path(tmp_path / "run")).last_checkpoint
    assert kept, said
    step = int(kept.name.rpartition("-")[2])
    assert [line["step"] for line in Run(kept).log] == list(range(1, step + 1))


@heard
def test_training_continues_under_nohup(small_model: Path, tmp_path: Path) -> None:
    def hang_up(done: int, total: int, note: str = "") -> None:
        os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train(small_recipe(small_model), tmp_path / "run", progress=hang_up).is_dir()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@heard
def test_a_signal_during_a_measurement_ends_training_after_a_checkpoint(small_model: Path, tmp_path: Path) -> None:
    """The checkpoint is written first, and the resumed run measures what was left out."""
    recipe = small_recipe(small_model, evaluation={"every": 2, "passkey": {"depths": 2, "trials": 2}})
    measured: list[int] = []

    def hang_up(self: ScheduledMeasurements, step: int) -> None:
        measured.append(step)
        if measured == [0, 2]:
            os.kill(os.getpid(), signal.SIGHUP)
        measure(self, step)

    measure = ScheduledMeasurements.measure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScheduledMeasurements, "measure", hang_up)
        with pytest.raises(Interrupted, match="interrupted while step 2 was measured; continue with --resume"):
            train(recipe, tmp_path / "run")
        staging = staging_path(tmp_path / "run")
        assert [path.name for path in Run(staging).checkpoints] == ["checkpoint-2"]
        assert Run(staging).last_checkpoint
        train(recipe, tmp_path / "run", resume=True)
    assert measured == [0, 2, 2, 4]
    assert (tmp_path / "run" / "scores" / "passkey-step-2.json").is_file()
    assert (tmp_path / "run" / "scores" / "passkey-step-4.json").is_file()


@heard
@pytest.mark.parametrize(
    ("step", "remedy", "kept"),
    [
        (0, "no step was done, and nothing is kept; start it again", False),
        (2, "continue with --resume", True),
        (4, "the run is finished; measure it with pi-lora eval all .*run", True),
    ],
)
def test_the_message_of_an_interrupted_measurement_says_what_is_kept(
    step: int, remedy: str, kept: bool, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(small_model, evaluation={"every": 2, "passkey": {"depths": 2, "trials": 2}})
    measure = ScheduledMeasurements.measure

    def hang_up(self: ScheduledMeasurements, at: int) -> None:
        if at == step:
            os.kill(os.getpid(), signal.SIGHUP)
        measure(self, at)

    monkeypatch.setattr(ScheduledMeasurements, "measure", hang_up)
    output = tmp_path / "run"
    with pytest.raises(Interrupted, match=f"interrupted while step {step} was measured; {remedy}$"):
        train(recipe, output)
    assert (output.is_dir() or staging_path(output).is_dir()) is kept


LATE = (
    (saving, "save_config", signal.SIGINT),
    (saving, "save_tokenizer", signal.SIGTERM),
    (conftest, "write_card", signal.SIGHUP),
)


@pytest.mark.parametrize(("module", "where", "number"), LATE)
def test_a_signal_during_the_final_save_keeps_the_run(
    module: ModuleType, where: str, number: int, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step is done, and no checkpoint was written."""
    save = getattr(module, where)
    asked = []

    def interrupted(*arguments: object) -> None:
        asked.append(arguments)
        os.kill(os.getpid(), number)
        save(*arguments)

    monkeypatch.setattr(module, where, interrupted)
    run = train(small_recipe(small_model), tmp_path / "run")
    assert asked
    assert {"adapter_model.safetensors", "run.json", "README.md"} <= {path.name for path in run.iterdir()}

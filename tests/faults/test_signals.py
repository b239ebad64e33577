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

import pytest

from conftest import refused, small_recipe, train
from operations import before_each
from pi_lora.errors import Interrupted
from pi_lora.recipe.files import dump_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.run import Run
from pi_lora.staging import staging_path
from pi_lora.training.callbacks import ScheduledMeasurements

ONE_STEP = {"steps": 1, "global_batch_size": 2, "activation_checkpointing": False}
MEASURED = {"every": 2, "passkey": {"depths": 2, "trials": 2}}
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


def hang_up_before_measuring(step: int, recipe: Recipe, output: Path, *, resume: bool = False) -> list[int]:
    """Train, with a signal before a step is measured; return the steps that were to be measured."""
    measure = ScheduledMeasurements.measure_at
    asked: list[int] = []

    def hang_up(self: ScheduledMeasurements, at: int) -> None:
        asked.append(at)
        if at == step:
            os.kill(os.getpid(), signal.SIGHUP)
        measure(self, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScheduledMeasurements, "measure_at", hang_up)
        train(recipe, output, resume)
    return asked


@heard
def test_a_signal_during_a_measurement_ends_training_after_a_checkpoint(small_model: Path, tmp_path: Path) -> None:
    """The checkpoint is written first, and the resumed run measures what was left out."""
    recipe, output = small_recipe(small_model, evaluation=MEASURED), tmp_path / "run"
    with refused(Interrupted, f"{output}: ", "step 2", "--resume"):
        hang_up_before_measuring(2, recipe, output)
    staging = staging_path(output)
    assert [path.name for path in Run(staging).checkpoints] == ["checkpoint-2"]
    assert Run(staging).last_checkpoint
    assert hang_up_before_measuring(-1, recipe, output, resume=True) == [2, 4]
    assert {path.name for path in (output / "scores").iterdir()} == {f"passkey-step-{step}.json" for step in (0, 2, 4)}


@heard
@pytest.mark.parametrize(
    ("step", "remedy", "kept"), [(0, "start it again", False), (4, "pi-lora eval all {output}", True)]
)
def test_the_message_of_an_interrupted_measurement_says_what_is_kept(
    step: int, remedy: str, kept: bool, small_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with refused(Interrupted, f"{output}: ", f"step {step}", remedy.format(output=output)):
        hang_up_before_measuring(step, small_recipe(small_model, evaluation=MEASURED), output)
    assert (output.is_dir() or staging_path(output).is_dir()) is kept


@pytest.mark.parametrize(
    ("file", "number"),
    [("config.json", signal.SIGINT), ("tokenizer.json", signal.SIGTERM), ("README.md", signal.SIGHUP)],
)
def test_a_signal_during_the_final_save_keeps_the_run(
    file: str, number: int, small_model: Path, tmp_path: Path
) -> None:
    """The last step is done, and no checkpoint was written."""
    asked = []

    def interrupt(_number: int, _event: str, path: str) -> None:
        if file in path and not asked:
            asked.append(path)
            os.kill(os.getpid(), number)

    with before_each(tmp_path, interrupt):
        run = train(small_recipe(small_model, training=ONE_STEP), tmp_path / "run")
    assert asked
    assert {"adapter_model.safetensors", "run.json", "README.md"} <= {path.name for path in run.iterdir()}

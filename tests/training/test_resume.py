"""A run that ends early goes on to the weights that it would have had."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import small_recipe, train
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState

from pi_lora.errors import Diverged, Interrupted, RecipeError, RunExistsError
from pi_lora.recipe.files import dump_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.run import Run, staging_path
from pi_lora.training.callbacks import TrainingLog

STEPS = 12


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next(run.glob("*.safetensors")))


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "training.jsonl").read_text().splitlines()]


def recipe_for(model: Path, **changes: object) -> Recipe:
    """Twelve steps with dropout, so that the random state matters too."""
    training = {**small_recipe(model).training.model_dump(), "steps": STEPS, "save_every": 3, **changes}
    return small_recipe(model, training=training, tuning={"rank": 4, "dropout": 0.1})


@pytest.fixture(scope="module")
def whole(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing disturbed."""
    return weights(train(recipe_for(small_model), tmp_path_factory.mktemp("whole") / "run"))


# Trains to argv[2] as the recipe argv[1] says, and is killed as soon as step argv[3] is done.
TRAIN_AND_DIE = """
import os, signal, sys
from collections.abc import Iterator
from pathlib import Path
from pi_lora.preflight import check
from pi_lora.recipe.files import load_recipe
from pi_lora.training.training import prepare_data, train

recipe, output, step = load_recipe(Path(sys.argv[1])).recipe, Path(sys.argv[2]), int(sys.argv[3])

def die(done, total, note=""):
    if done == step and total == recipe.training.steps:
        os.kill(os.getpid(), signal.SIGKILL)

model = check(recipe, output)
train(recipe, model, prepare_data(recipe, model), output, progress=die)
"""


@pytest.mark.parametrize("step", [1, 2, 3, 5, 6, 10, 12])
def test_killed_at_any_step_it_resumes_to_the_same_weights(
    python: str, small_model: Path, tmp_path: Path, whole: dict[str, torch.Tensor], step: int
) -> None:
    """Before the first checkpoint, which is of step 3, beside each, and after the last step."""
    recipe, output = recipe_for(small_model), tmp_path / "run"
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    command = [python, "-c", TRAIN_AND_DIE, str(tmp_path / "recipe.yaml"), str(output), str(step)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    assert not output.exists()
    train(recipe, output, resume=True)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(output).items())
    assert steps_of(output) == list(range(1, STEPS + 1))


def test_a_half_written_checkpoint_is_not_taken(
    small_model: Path, tmp_path: Path, whole: dict[str, torch.Tensor]
) -> None:
    output = tmp_path / "run"
    interrupt_at(8, recipe_for(small_model), output)
    checkpoints = staging_path(output) / "checkpoints"
    last = Run(staging_path(output)).last_checkpoint
    assert last
    (last / "complete").unlink()
    (last / "optimizer.pt").write_bytes(b"half")
    assert Run(staging_path(output)).last_checkpoint == checkpoints / "checkpoint-6"
    train(recipe_for(small_model), output, resume=True)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(output).items())


def interrupt_at(step: int, recipe: Recipe, output: Path, number: signal.Signals = signal.SIGINT) -> None:
    def interrupt(done: int, total: int, note: str) -> None:
        if done == step and total == recipe.training.steps:
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match=r"interrupted after step \d+, a checkpoint is kept; continue with --resume"):
        train(recipe, output, progress=interrupt)
    assert not output.exists()


def test_auto_precision_is_decided_once(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumption goes on in the precision that the run began in, on a machine that would choose another one, too."""
    output, fast = tmp_path / "run", "pi_lora.models.machine.has_fast_bfloat16"
    monkeypatch.setattr(fast, lambda: True)
    interrupt_at(4, recipe_for(small_model, precision="auto"), output)
    assert Run(staging_path(output)).provenance.precision == "bfloat16"
    monkeypatch.setattr(fast, lambda: False)
    train(recipe_for(small_model, precision="auto"), output, resume=True)
    assert Run(output).provenance.precision == "bfloat16"
    undisturbed = weights(train(recipe_for(small_model, precision="bfloat16"), tmp_path / "whole"))
    assert all(torch.equal(tensor, undisturbed[name]) for name, tensor in weights(output).items())


@pytest.fixture
def heard() -> Iterator[None]:
    """A connection that drops is heard, also where the tests run under nohup, which trainings go on under."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_behind_a_checkpoint(
    small_model: Path, tmp_path: Path, whole: dict[str, torch.Tensor], number: signal.Signals
) -> None:
    recipe, output = recipe_for(small_model), tmp_path / "run"
    interrupt_at(5, recipe, output, number)
    with pytest.raises(RunExistsError, match="continue with --resume"):
        train(recipe, output)
    train(recipe, output, resume=True)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(output).items())
    assert steps_of(output) == list(range(1, STEPS + 1))
    assert not (output / "checkpoints").exists()


def test_a_run_is_not_resumed_under_another_recipe(small_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    interrupt_at(5, recipe_for(small_model), output)
    with pytest.raises(RecipeError, match=r"training.learning_rate: 0.5 given, but the .* run began with 0.01"):
        train(recipe_for(small_model, learning_rate=0.5), output, resume=True)
    # How often it is saved and logged may change.
    train(recipe_for(small_model, save_every=4, log_every=2), output, resume=True)


def test_resume_needs_an_interrupted_run(small_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RunExistsError, match="no interrupted run to resume"):
        train(recipe_for(small_model), tmp_path / "run", resume=True)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(
    small_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    recipe = recipe_for(small_model, learning_rate=1e12, save_every=1, warmup_steps=0, precision="float32")
    with pytest.raises(Diverged, match=r"of step \d+ became infinite or NaN at a rate of 1e\+12") as raised:
        train(recipe, output)
    kept = Run(staging_path(output)).last_checkpoint
    assert kept
    assert str(kept) in str(raised.value)
    assert all(torch.isfinite(tensor).all() for tensor in weights(kept).values())
    assert not output.exists()


def test_ctrl_c_ends_with_130_and_one_line(python: str, small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe_for(small_model)))
    command = [python, "-m", "pi_lora", "train", "recipe.yaml", "training.steps=400", "--output", "run"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / ".run.partial" / "training.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") > 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    *progress, said = errors.splitlines()
    assert all(line.startswith("training: ") for line in progress), errors
    assert said.endswith("a checkpoint is kept; continue with --resume")
    assert not (tmp_path / "run").exists()


def test_progress_shows_the_curve_of_the_loss_from_before_the_interruption_on(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": loss, "seconds": 1.0} for step, loss in ((1, 9.0), (2, 5.0), (3, 1.0))]
    (tmp_path / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = TrainingLog(10)
    log.run = Run(tmp_path)
    state = TrainerState(global_step=2, max_steps=4)
    log.on_train_begin(None, state, TrainerControl())
    log.on_log(None, state, TrainerControl(), {"loss": 3.0, "learning_rate": 1.0, "grad_norm": 1.0})
    assert re.fullmatch(r"loss 3\.000 █▃▁ [\d,]+ tokens/s \d+\.\d GiB", log.line)

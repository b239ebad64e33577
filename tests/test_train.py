import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import small_recipe
from safetensors.torch import load_file

from pi_lora.errors import DataError, Interrupted, RunExistsError, ScalingError
from pi_lora.recipe.files import dump_recipe, load_recipe
from pi_lora.recipe.schema import Training
from pi_lora.rope import scale_of, window_of
from pi_lora.run import load
from pi_lora.train import check, rate_share, train


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next(run.glob("*.safetensors")))


def log_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "training.jsonl").read_text().splitlines()]


def test_a_lora_run_folder_is_complete(lora_run: Path, small_model: Path) -> None:
    names = {path.name for path in lora_run.iterdir()}
    assert names == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "recipe.yaml",
        "run.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.jsonl",
    }
    config = json.loads((lora_run / "config.json").read_text())
    assert (scale_of(config), window_of(config)) == (2, 128)
    assert json.loads((lora_run / "tokenizer_config.json").read_text())["model_max_length"] == 128
    assert load_recipe(lora_run / "recipe.yaml").recipe == small_recipe(small_model)
    made_with = json.loads((lora_run / "run.json").read_text())
    assert made_with["versions"]["torch"] == torch.__version__
    assert made_with["trainable_parameters"] > 0
    assert not list(lora_run.parent.glob(".*"))


@pytest.mark.parametrize("run", ["lora_run", "full_run"])
def test_files_have_ordinary_permissions(run: str, request: pytest.FixtureRequest) -> None:
    for path in request.getfixturevalue(run).iterdir():
        assert path.stat().st_mode & 0o777 == 0o644, path


def test_the_log_has_a_line_a_step(lora_run: Path) -> None:
    log = log_of(lora_run)
    assert [line["step"] for line in log] == [1, 2, 3, 4]
    assert [line["tokens"] for line in log] == [256, 512, 768, 1024]
    assert [line["learning_rate"] for line in log] == pytest.approx([1e-3, 5.5e-3, 1e-2, 1e-2])
    assert all(line["loss"] > 0 and line["tokens_per_second"] > 0 and line["peak_memory"] > 1e8 for line in log)


def test_training_changes_the_model_and_lowers_the_loss(small_model: Path, tmp_path: Path) -> None:
    training = small_recipe(small_model).training.model_copy(update={"steps": 60})
    run = train(small_recipe(small_model, training=training.model_dump()), tmp_path / "run")
    losses = [line["loss"] for line in log_of(run)]
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0]


def test_a_full_run_is_a_model(full_run: Path, small_model: Path) -> None:
    loaded = load(str(full_run))
    assert (loaded.scale, loaded.window) == (2, 128)
    base = load(str(small_model)).model.state_dict()
    moved = [name for name, weight in loaded.model.state_dict().items() if not torch.equal(weight, base[name])]
    assert set(moved) == set(base)


def test_direct_tuning_rescales_nothing(small_model: Path, tmp_path: Path) -> None:
    loaded = load(str(train(small_recipe(small_model, scaling="direct"), tmp_path / "direct")))
    assert (loaded.scale, loaded.window) == (1, 128)


def test_the_same_seed_gives_the_same_weights(lora_run: Path, small_model: Path, tmp_path: Path) -> None:
    again = weights(train(small_recipe(small_model), tmp_path / "again"))
    for name, tensor in weights(lora_run).items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize(("schedule", "end"), [("constant", 1.0), ("linear", 0.0125), ("cosine", 0.0004)])
def test_schedules_warm_up_from_a_tenth(schedule: str, end: float) -> None:
    share = rate_share(Training(steps=100, schedule=schedule, warmup_steps=20, warmup_start=0.1))
    assert share(0) == pytest.approx(0.1)
    assert share(10) == pytest.approx(0.55)
    assert share(20) == pytest.approx(1.0)
    assert share(99) == pytest.approx(end, abs=1e-4)


def test_a_folder_that_holds_something_is_not_overwritten(lora_run: Path, small_model: Path) -> None:
    before = weights(lora_run)
    with pytest.raises(RunExistsError, match="is there already and is not overwritten"):
        train(small_recipe(small_model), lora_run)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(lora_run).items())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"context": {"target": 64}}, ScalingError, "64 is not longer than the model's own window of 64"),
        ({"data": {"source": "nowhere.txt"}}, DataError, "nowhere.txt: no such file or folder"),
    ],
)
def test_mistakes_leave_nothing_behind(
    small_model: Path, tmp_path: Path, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train(small_recipe(small_model, **changes), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_check_reads_no_weights(small_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((small_model / "config.json").read_bytes())
    said = check(small_recipe(folder), tmp_path / "run")
    assert "64 to 128 tokens, pi, lora" in said
    assert not (tmp_path / "run").exists()


def interruptible(small_model: Path, tmp_path: Path) -> Path:
    training = small_recipe(small_model).training.model_copy(update={"steps": 12, "save_every": 100})
    recipe = small_recipe(small_model, training=training.model_dump())
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    return path


def test_an_interrupted_run_resumes_to_the_same_weights(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(interruptible(small_model, tmp_path)).recipe
    whole = weights(train(recipe, tmp_path / "whole"))

    def interrupt(step: int, steps: int, note: str) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    output = tmp_path / "run"
    with pytest.raises(Interrupted, match=r"interrupted after step [56], a checkpoint is kept; go on with --resume"):
        train(recipe, output, progress=interrupt)
    assert not output.exists()
    with pytest.raises(RunExistsError, match="go on with --resume"):
        train(recipe, output)
    resumed = weights(train(recipe, output, resume=True))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    assert [line["step"] for line in log_of(output)] == list(range(1, 13))


def test_resume_needs_a_checkpoint(small_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RunExistsError, match="no interrupted run with a checkpoint to resume"):
        train(small_recipe(small_model), tmp_path / "run", resume=True)


def test_ctrl_c_ends_with_130_and_one_line(small_model: Path, tmp_path: Path) -> None:
    recipe = interruptible(small_model, tmp_path)
    command = [sys.executable, "-m", "pi_lora", "train", str(recipe), "training.steps=5000", "--output", "run"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / ".run.partial" / "training.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") > 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.count("\n") == 1, errors
    assert "a checkpoint is kept; go on with --resume" in errors
    assert not (tmp_path / "run").exists()

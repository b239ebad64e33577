"""A disk that is full after the last step of a training: no step is done again, and none is lost."""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import equal
from transformers.integrations import TensorBoardCallback

from conftest import small_recipe, train
from pi_lora.errors import ModelError, RunExistsError
from pi_lora.recipe.schema import Recipe
from pi_lora.run import Run
from pi_lora.staging import check_finished, staging_path
from pi_lora.training.callbacks import TrainingLog

STEPS = 2


def never(number: int) -> bool:
    return False


class Disk:
    """Fails writes below a folder: `writes` counts them since it was watched, and `is_full` says of which."""

    def __init__(self) -> None:
        self.folder = "\0"
        self.writes = 0
        self.is_full = never
        sys.addaudithook(self.audit)

    def watch(self, folder: Path, is_full: Callable[[int], bool] = never) -> None:
        self.folder, self.writes, self.is_full = str(folder), 0, is_full

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.mkdir") or not str(arguments[0]).startswith(self.folder):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        self.writes += 1
        if self.is_full(self.writes):
            raise OSError(ENOSPC, os.strerror(ENOSPC), str(arguments[0]))


@pytest.fixture(scope="module")
def only_disk() -> Disk:
    """Audit hooks stay until the process ends."""
    return Disk()


@pytest.fixture
def disk(only_disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """It fails the writes of weights as well, which safetensors does outside of Python."""
    import safetensors.torch

    serialize = safetensors.torch.serialize_file

    def watched(tensors: Any, file: Any, **options: Any) -> None:
        try:
            only_disk.audit("open", (file, "w", os.O_WRONLY))
        except OSError as error:
            raise SafetensorError(f"Error while serializing: I/O error: {error.strerror} (os error 28)") from None
        serialize(tensors, file, **options)

    monkeypatch.setattr(safetensors.torch, "serialize_file", watched)
    yield only_disk
    only_disk.folder = "\0"


def recipe_for(model: Path, method: str) -> Recipe:
    """No checkpoint is written before the last step."""
    training = {**small_recipe(model).training.model_dump(), "steps": STEPS, "log_every": 10}
    evaluation = {"every": STEPS, "passkey": {"depths": 1, "trials": 1}}
    return small_recipe(model, training=training, tuning={"method": method, "rank": 2}, evaluation=evaluation)


def content(run: Path) -> dict[str, Any]:
    files = {file.relative_to(run).as_posix() for file in run.rglob("*")}
    tensors = load_file(next(run.glob("*.safetensors")))
    steps = [line["step"] for line in Run(run).log]
    scores = (run / "scores" / f"passkey-step-{STEPS}.json").read_text()
    return {"files": files, "steps": steps, "tensors": tensors, "scores": scores.replace(str(run), "run")}


def check_same(run: Path, undisturbed: dict[str, Any]) -> None:
    found = content(run)
    assert found["tensors"].keys() == undisturbed["tensors"].keys()
    assert all(equal(tensor, undisturbed["tensors"][name]) for name, tensor in found.pop("tensors").items())
    assert found == {key: value for key, value in undisturbed.items() if key != "tensors"}
    assert Run(run).metadata.model_dump()["step"] == STEPS


@pytest.fixture(params=["lora", "full"])
def recipe(request: pytest.FixtureRequest, small_model: Path) -> Recipe:
    return recipe_for(small_model, request.param)


@pytest.fixture
def undisturbed(recipe: Recipe, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the training makes, with the number of `writes` until its weights are kept."""
    save_last = Run.save_last

    def counted(self: Run, *arguments: Any) -> None:
        save_last(self, *arguments)
        writes.append(disk.writes)

    writes: list[int] = []
    output = tmp_path / "undisturbed"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "save_last", counted)
        train(recipe, output, progress=lambda done, *_: disk.watch(tmp_path) if done == STEPS else None)
    undisturbed = content(output)
    shutil.rmtree(output)
    [disk.writes] = writes
    return undisturbed


def test_a_write_of_the_weights_that_fails_is_done_again(
    recipe: Recipe, undisturbed: dict[str, Any], disk: Disk, tmp_path: Path
) -> None:
    """The line of the last step, the folder, the log, the weights, and what libraries write with them."""
    number = disk.writes
    assert number > 3
    for failing in range(1, number + 1):

        def fill(done: int, total: int, note: str = "", failing: int = failing) -> None:
            if done == STEPS:
                disk.watch(tmp_path, lambda write: write == failing)

        run = train(recipe, tmp_path / f"run-{failing}", progress=fill)
        disk.folder = "\0"
        check_same(run, undisturbed)


def test_resume_completes_a_trained_run_without_a_step_whatever_write_failed(
    recipe: Recipe, undisturbed: dict[str, Any], disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, before = tmp_path / "run", disk.writes

    def fill(done: int, total: int, note: str = "") -> None:
        if done == STEPS:
            disk.watch(tmp_path, lambda write: write > before)

    resume = f"make room, then pi-lora train {output} --resume$"
    with pytest.raises(ModelError, match=rf"run: a disk is full \(.*No space left.*\); {resume}"):
        train(recipe, output, progress=fill)
    disk.folder = "\0"
    with pytest.raises(
        ModelError, match=f"run: interrupted at step 2 of 2; resume it with pi-lora train {output} --resume"
    ):
        check_finished(output)
    with pytest.raises(RunExistsError, match=f"; resume it with pi-lora train {output} --resume"):
        train(recipe, output)
    monkeypatch.setattr(TrainingLog, "on_step_end", lambda *_, **__: pytest.fail("a step is done again"))
    failures = 0
    while not output.exists():
        assert Run(staging_path(output)).is_trained
        allowed = failures
        disk.watch(tmp_path, lambda write, allowed=allowed: write > allowed)
        # Of the last writes some are not needed.
        with contextlib.suppress(OSError, ModelError):
            train(recipe, output, resume=True)
        disk.folder = "\0"
        failures += 1
        if failures % 4 == 0 and not output.exists():
            # A disk that has room after this failure.
            copy = tmp_path / f"copy-{failures}"
            shutil.copytree(staging_path(output), staging_path(copy))
            train(recipe, copy, resume=True)
            check_same(copy, undisturbed)
    assert failures > 8


def test_a_tracker_that_fails_in_the_last_step_loses_nothing(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_for(small_model, "lora")
    recipe = recipe.model_copy(update={"training": recipe.training.changed(tracking=["tensorboard"])})

    def full(*_: object, **__: object) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(TensorBoardCallback, "on_log", full)
        with pytest.raises(ModelError, match="No space left"):
            train(recipe, output)
    assert Run(staging_path(output)).is_trained
    monkeypatch.setattr(TrainingLog, "on_step_end", lambda *_, **__: pytest.fail("a step is done again"))
    assert Run(train(recipe, output, resume=True)).metadata.model_dump()["step"] == STEPS

"""A disk that is full after the last step of a training: no step is done again, and none is lost."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import equal
from transformers.integrations import TensorBoardCallback

from conftest import refused, small_recipe, train
from operations import audit, before_each
from pi_lora.errors import ModelError, RunExistsError
from pi_lora.recipe.schema import Recipe
from pi_lora.run import Run
from pi_lora.staging import check_finished, staging_path

STEPS = 2


def never(number: int) -> bool:
    return False


class Disk:
    """Fails writes: `written` has those since it was filled, and `is_full` says which fail."""

    def __init__(self) -> None:
        self.fill(never)

    def fill(self, is_full: Callable[[int], bool]) -> None:
        self.written, self.is_full = list[str](), is_full

    @contextlib.contextmanager
    def of(self, folder: Path, is_full: Callable[[int], bool] = never) -> Iterator[None]:
        """It holds a folder, and nothing else."""
        self.fill(is_full)
        with before_each(folder, self.write):
            yield

    def write(self, _number: int, event: str, file: str) -> None:
        if event in ("open", "os.mkdir"):
            self.written.append(file)
            if self.is_full(len(self.written)):
                raise OSError(ENOSPC, os.strerror(ENOSPC), file)


@pytest.fixture(scope="module")
def disk() -> Iterator[Disk]:
    """It fails the writes of weights as well, which safetensors does outside of Python."""
    import safetensors.torch

    serialize = safetensors.torch.serialize_file

    def watched(tensors: Any, file: Any, **options: Any) -> None:
        try:
            audit("open", (file, "w", os.O_WRONLY))
        except OSError as error:
            raise SafetensorError(f"Error while serializing: I/O error: {error.strerror} (os error 28)") from None
        serialize(tensors, file, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors.torch, "serialize_file", watched)
        yield Disk()


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


@dataclass
class Trained:
    """A recipe, what its training makes, and the number of writes after the last step until the weights are kept."""

    recipe: Recipe
    content: dict[str, Any]
    writes: int


@pytest.fixture(scope="module", params=["lora", "full"])
def trained(
    request: pytest.FixtureRequest, small_model: Path, disk: Disk, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    recipe = recipe_for(small_model, request.param)
    folder = tmp_path_factory.mktemp("undisturbed")
    with disk.of(folder):
        train(recipe, folder / "run", progress=lambda done, *_: disk.fill(never) if done == STEPS else None)
    files = [Path(file) for file in disk.written]
    [marked] = [file for file in files if file.parent.name == f"checkpoint-{STEPS}" and "complete" in file.name]
    return Trained(recipe, content(folder / "run"), files.index(marked) + 1)


def no_step(done: int, total: int, note: str = "") -> None:
    pytest.fail("a step is done again")


def test_a_write_of_the_weights_that_fails_is_done_again(
    trained: Trained, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder, the log, the weights, and what libraries write with them: each fails once, in one training."""
    save_last = Run.save_last
    failed = []

    def saved_over_failures(self: Run, *arguments: Any) -> None:
        for failing in range(1, trained.writes + 1):
            shutil.rmtree(self.final_checkpoint, ignore_errors=True)
            with disk.of(tmp_path, lambda write, failing=failing: write == failing):
                save_last(self, *arguments)
            failed.append(disk.written[failing - 1])
            assert self.is_trained
            found, expected = load_file(next(self.final_checkpoint.glob("*.safetensors"))), trained.content["tensors"]
            assert found.keys() == expected.keys()
            assert all(equal(found[name], tensor) for name, tensor in expected.items())

    monkeypatch.setattr(Run, "save_last", saved_over_failures)
    check_same(train(trained.recipe, tmp_path / "run"), trained.content)
    assert len(failed) > 3


@pytest.mark.parametrize("every", [1, 5])
def test_resume_completes_a_trained_run_without_a_step_whatever_write_failed(
    trained: Trained, every: int, disk: Disk, tmp_path: Path
) -> None:
    """Each resumption writes more files than the one before, by `every`, until the disk is full again."""
    recipe, output, before = trained.recipe, tmp_path / "run", trained.writes
    resume = f"pi-lora train {output} --resume"

    def fill(done: int, total: int, note: str = "") -> None:
        if done == STEPS:
            disk.fill(lambda write: write > before)

    with refused(ModelError, f"{output}: ", "No space left", resume), disk.of(tmp_path):
        train(recipe, output, progress=fill)
    with refused(ModelError, f"{output}: ", f"step {STEPS} of {STEPS}", resume):
        check_finished(output)
    with refused(RunExistsError, f"{output}: ", staging_path(output), resume):
        train(recipe, output)
    failures = 0
    while not output.exists():
        assert Run(staging_path(output)).is_trained
        allowed = failures * every
        # Of the last writes some are not needed.
        with contextlib.suppress(OSError, ModelError), disk.of(tmp_path, lambda write, most=allowed: write > most):
            train(recipe, output, resume=True, progress=no_step)
        failures += 1
        if failures % 4 == 2 and not output.exists():
            # A disk that has room after this failure.
            copy = tmp_path / f"copy-{failures}"
            shutil.copytree(staging_path(output), staging_path(copy))
            check_same(train(recipe, copy, resume=True, progress=no_step), trained.content)
    assert failures * every > 8
    assert not staging_path(output).exists()


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
        with refused(ModelError, f"{output}: ", "No space left"):
            train(recipe, output)
    assert Run(staging_path(output)).is_trained
    assert Run(train(recipe, output, resume=True, progress=no_step)).metadata.model_dump()["step"] == STEPS

"""A damaged checkpoint or log is found on resume, and the one before is taken."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import small_recipe, train
from safetensors.torch import load_file

from pi_lora.errors import Interrupted, ModelError
from pi_lora.recipe.schema import Recipe
from pi_lora.run import Run, staging_path
from pi_lora.writing import write_whole

STEPS = 6


def zero(file: Path) -> None:
    """As a machine that loses power leaves a file whose size reached the disk before its content."""
    file.write_bytes(bytes(file.stat().st_size))


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def interrupted(staging: Path) -> list[Path]:
    """Checkpoints of steps 2 and 4, of a run that never was."""
    for step in (2, 4):
        with (staging / "training.jsonl").open("a") as log:
            log.writelines(json.dumps({"step": each, "loss": 1.0}) + "\n" for each in (step - 1, step))
        checkpoint = staging / "checkpoints" / f"checkpoint-{step}"
        (checkpoint / "shards").mkdir(parents=True)
        (checkpoint / "optimizer.pt").write_bytes(os.urandom(100))
        (checkpoint / "shards" / "0").write_bytes(os.urandom(100))
        Run(staging).mark_complete(checkpoint)
    return [staging / "checkpoints" / f"checkpoint-{step}" for step in (4, 2)]


@pytest.mark.parametrize("damage", [half, Path.unlink])
@pytest.mark.parametrize("name", ["optimizer.pt", "shards/0", "training.jsonl", "complete"])
def test_the_one_before_is_taken(name: str, damage: Callable[[Path], None], tmp_path: Path) -> None:
    newest, before = interrupted(tmp_path)
    assert Run(tmp_path).checkpoint_to_resume() == (newest, [])
    damage(newest / name)
    found, said = Run(tmp_path).checkpoint_to_resume()
    assert found == before
    # Without its mark a checkpoint is one that was never finished.
    assert len(said) == (0 if (name, damage) == ("complete", Path.unlink) else 1)
    assert all(line.startswith(f"{newest}: ") and line.endswith("; resuming from checkpoint-2") for line in said)
    assert not newest.exists()
    assert [line["step"] for line in Run(tmp_path).log] == [1, 2]


def test_if_all_are_damaged_nothing_is_resumed_or_removed(tmp_path: Path) -> None:
    both = interrupted(tmp_path)
    for each in both:
        half(each / "optimizer.pt")
    with pytest.raises(
        ModelError, match=r"optimizer\.pt changed since .*; no checkpoint before is left: remove "
    ) as raised:
        Run(tmp_path).checkpoint_to_resume()
    assert "\n" not in str(raised.value)
    assert all(each.is_dir() for each in both)


def test_without_a_checkpoint_it_begins_again(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    assert Run(tmp_path).checkpoint_to_resume() == (None, [])


def test_a_damaged_log_is_read_without_its_damaged_lines(tmp_path: Path) -> None:
    log = tmp_path / "training.jsonl"
    first, second, fourth = (b'{"step": %d, "loss": 1.0}\n' % step for step in (1, 2, 4))
    damaged = b'[]\n{"step": "3", "loss": 1.0}\n{"step": 3}\n\xff\xfe\n'
    log.write_bytes(first + bytes(40) + b"\n" + second + damaged + fourth + b'{"st')
    assert [line["step"] for line in Run(tmp_path).log] == [1, 2, 4]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state.json"
    write_whole(file, "before")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, "after")
    assert file.read_text() == "before"


def recipe_for(model: Path) -> Recipe:
    training = {**small_recipe(model).training.model_dump(), "steps": STEPS, "save_every": 2}
    return small_recipe(model, training=training, tuning={"rank": 4, "dropout": 0.1})


def interrupt_at(step: int, recipe: Recipe, output: Path) -> Path:
    def interrupt(done: int, total: int, note: str = "") -> None:
        if done == step and total == STEPS:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(recipe, output, progress=interrupt)
    found = Run(staging_path(output)).last_checkpoint
    assert found
    return found


def test_a_damaged_checkpoint_does_not_change_what_is_trained(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_for(small_model)
    whole = load_file(train(recipe, tmp_path / "whole") / "adapter_model.safetensors")
    for name in ("adapter_model.safetensors", "optimizer.pt", "rng_state.pth"):
        output = tmp_path / name
        newest = interrupt_at(4, recipe, output)
        half(newest / name)
        zero(staging_path(output) / "training.jsonl")
        train(recipe, output, resume=True)
        assert capsys.readouterr().err == (
            f"{newest}: {name} changed since they were written; resuming from checkpoint-4\n"
        )
        trained = load_file(output / "adapter_model.safetensors")
        assert all(torch.equal(trained[each], whole[each]) for each in whole)
        steps = [line["step"] for line in Run(output).log]
        assert steps == list(range(1, STEPS + 1))
        assert not (output / "checkpoints").exists()

"""A damaged checkpoint or log is found on resume, and the one before is taken."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pi_lora.errors import ModelError
from pi_lora.run import Run


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
def test_the_one_before_is_taken(
    name: str, damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, before = interrupted(tmp_path)
    assert Run(tmp_path).checkpoint_to_resume() == newest
    damage(newest / name)
    assert Run(tmp_path).checkpoint_to_resume() == before
    said = capsys.readouterr().err.splitlines()
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


def test_a_damaged_log_is_read_without_its_damaged_lines(tmp_path: Path) -> None:
    log = tmp_path / "training.jsonl"
    first, second, fourth = (b'{"step": %d, "loss": 1.0}\n' % step for step in (1, 2, 4))
    damaged = b"\xff\xfe\n"
    log.write_bytes(first + bytes(40) + b"\n" + second + damaged + fourth + b'{"st')
    assert [line["step"] for line in Run(tmp_path).log] == [1, 2, 4]

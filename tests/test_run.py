"""Where a run is made: places that cannot become one are refused before it, one process makes it, and what is finished
is never left where a later run removes it. A damaged checkpoint is noticed on resume, and the one before is used.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from conftest import refused, small_recipe
from pi_lora.errors import ModelError, PiLoraError, RunExistsError
from pi_lora.preflight import check
from pi_lora.recipe.files import dump_recipe
from pi_lora.run import Run
from pi_lora.staging import check_output, resolve_run, staged, staging_path
from pi_lora.storage import cache_folder, write_whole


def test_a_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".file.json.part").symlink_to(victim)
    write_whole(tmp_path / "file.json", "new")
    assert (victim.read_text(), (tmp_path / "file.json").read_text()) == ("precious", "new")
    assert not (tmp_path / "file.json").is_symlink()


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PI_LORA_CACHE")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user who is not in the password database
    with refused(PiLoraError, "", "HOME", "PI_LORA_CACHE"):
        cache_folder()


def test_an_output_that_is_a_link_is_made_at_its_target(tmp_path: Path) -> None:
    (tmp_path / "disk" / "empty").mkdir(parents=True)
    for link, target in (("to-empty", "disk/empty"), ("dangling", "disk/new")):
        output = tmp_path / link
        output.symlink_to(target)
        with staged(output) as staging:
            assert staging.parent == tmp_path / "disk"
            (staging / "weights").write_text("w")
        assert output.is_symlink()
        assert [path.name for path in (tmp_path / target).iterdir()] == ["weights"]
        with refused(RunExistsError, f"{output}: already exists"), staged(output):
            pass
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["empty", "new"]


@pytest.mark.parametrize("output", [".", "..", "/", "file/run"])
def test_an_impossible_output_is_refused_in_one_line(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "file").touch()
    path = Path(output) if output != "file/run" else tmp_path / output
    with refused(RunExistsError, f"{path}: ", "--output"), staged(path):
        pass


def test_a_finished_run_stays_in_staging_if_its_name_was_taken_meanwhile(tmp_path: Path) -> None:
    output = tmp_path / "run"

    def another_takes_its_name() -> None:
        with staged(output) as staging:
            (staging / "weights").write_text("mine")
            output.mkdir()
            (output / "weights").write_text("another's")

    with refused(RunExistsError, f"{output}: ", staging_path(output)):
        another_takes_its_name()
    assert (output / "weights").read_text() == "another's"
    assert (staging_path(output) / "weights").read_text() == "mine"
    with refused(RunExistsError, f"{output}: already exists"), staged(output):
        pass
    assert (staging_path(output) / "weights").exists()


def test_an_output_is_locked_to_one_process(tmp_path: Path, small_model: Path) -> None:
    output = tmp_path / "run"
    with staged(output) as staging:
        (staging / "weights").touch()
        for resume in (False, True):
            with refused(RunExistsError, f"{output}: is being made", "--output"), staged(output, resume=resume):
                pass
            with refused(RunExistsError, f"{output}: is being made", "--output"):
                check(small_recipe(small_model), output, resume=resume)
        assert (staging / "weights").exists()
    assert [path.name for path in output.iterdir()] == ["weights"]
    with refused(RunExistsError, f"{output}: already exists"), staged(output):
        pass


# Begins to make argv[1] and says so.
BEGIN = """
import sys, time
from pathlib import Path
from pi_lora.staging import staged

with staged(Path(sys.argv[1])) as staging:
    (staging / "half").touch()
    print("begun", flush=True)
    time.sleep(60)
"""


def test_a_lock_is_released_when_its_process_is_killed(python: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with subprocess.Popen([python, "-c", BEGIN, str(output)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        with refused(RunExistsError, f"{output}: is being made"):
            check_output(output)
        process.kill()
        assert process.stdout.read() == ""  # the pipe closes when the process itself has ended
    assert staging_path(output).with_suffix(".lock").exists()
    check_output(output)


def test_what_a_killed_process_leaves_locks_nothing_and_is_not_in_the_next_run(tmp_path: Path) -> None:
    output = tmp_path / "run"
    staging_path(output).mkdir()
    (staging_path(output) / "half").touch()
    staging_path(output).with_suffix(".lock").touch()
    check_output(output)
    with staged(output) as staging:
        assert not list(staging.iterdir())
        (staging / "whole").touch()
    assert [path.name for path in output.iterdir()] == ["whole"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_files_of_a_run_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    """safetensors writes files for their owner alone, whatever the umask."""
    before = os.umask(0o027)
    try:
        with staged(tmp_path / "run") as staging:
            save_file({"weight": torch.zeros(1)}, staging / "model.safetensors")
            (staging / "config.json").touch()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir()} == {0o640}


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


def test_copies_of_checkpoints_are_no_checkpoints(tmp_path: Path) -> None:
    found = interrupted(tmp_path)
    shutil.copytree(found[0], tmp_path / "checkpoints" / "checkpoint-4-backup")
    assert Run(tmp_path).checkpoints == found
    assert Run(tmp_path).checkpoint_to_resume() == found[0]


@pytest.mark.parametrize("damage", [half, Path.unlink])
@pytest.mark.parametrize("name", ["optimizer.pt", "shards/0", "training.jsonl", "complete"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
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


def test_if_all_checkpoints_are_damaged_none_is_resumed_or_removed(tmp_path: Path) -> None:
    both = interrupted(tmp_path)
    for each in both:
        half(each / "optimizer.pt")
    with refused(ModelError, str(both[0]), "optimizer.pt changed", both[1], f"remove {tmp_path} "):
        Run(tmp_path).checkpoint_to_resume()
    assert all(each.is_dir() for each in both)


FULL_DISK = [
    OSError(28, "No space left on device"),
    OSError(122, "Disk quota exceeded"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 136512 vs 136400"),
    Exception("No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL_DISK, ids=str)
def test_a_full_disk_is_one_line_and_half_a_checkpoint_makes_room(tmp_path: Path, error: Exception) -> None:
    output = tmp_path / "run"

    def write() -> None:
        with staged(output) as staging:
            interrupted(staging)
            (staging / "checkpoints" / "checkpoint-6").mkdir()
            raise error

    with refused(ModelError, f"{output}: a disk is full", f"pi-lora train {output} --resume"):
        write()
    assert [path.name for path in Run(staging_path(output)).checkpoints] == ["checkpoint-4", "checkpoint-2"]


@pytest.mark.parametrize(
    "message", ["shape", "[enforce fail at inline_container.cc:672] . open file failed with strerror: No such file"]
)
def test_other_errors_keep_their_name(tmp_path: Path, message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)), staged(tmp_path / "run"):
        raise RuntimeError(message)


def test_the_run_that_was_interrupted_is_resumed_although_a_recipe_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun = small_recipe("m", training={"steps": 6})
    for name in ("mine", "adapters/mine", "demo"):
        staging = staging_path(Path(name))
        staging.mkdir(parents=True)
        (staging / "recipe.yaml").write_text(dump_recipe(begun))
    assert resolve_run(Path("demo"), [], output=None, resume=True)[1] == Path("adapters/demo")
    for name in ("mine", "demo"):
        interrupted(staging_path(Path(name)))
    Path("mine.yaml").write_text(dump_recipe(small_recipe("m", training={"steps": 8})))
    for name in ("mine", "demo"):
        assert resolve_run(Path(name), [], output=None, resume=True) == (begun, Path(name))
    recipe, output = resolve_run(Path("mine.yaml"), [], output=None, resume=True)
    assert (recipe.training.steps, output) == (8, Path("adapters/mine"))
    assert resolve_run(Path("mine"), [], output=Path("adapters/mine"), resume=True) == (recipe, output)


def test_older_checkpoints_make_room_for_the_weights_after_the_last_step(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(dump_recipe(small_recipe("m", training={"steps": 6})))
    newest, before = interrupted(tmp_path)

    def save(folder: Path) -> None:
        (folder / "weights").write_text("w")
        if before.exists():
            raise OSError(28, "No space left on device")

    run = Run(tmp_path)
    assert not run.is_trained
    run.save_last([{"step": 6}], save)
    assert run.is_trained
    last = tmp_path / "checkpoints" / "checkpoint-6"
    assert run.checkpoints == [last, newest]
    assert run.last_checkpoint == last
    assert (last / "weights").read_text() == "w"
    assert (last / "training.jsonl").read_text() == (tmp_path / "training.jsonl").read_text() == '{"step": 6}\n'


def test_no_checkpoint_is_lost_if_the_weights_cannot_be_saved(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(dump_recipe(small_recipe("m", training={"steps": 6})))
    newest, _ = interrupted(tmp_path)

    def save(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    run = Run(tmp_path)
    with pytest.raises(OSError, match="No space"):
        run.save_last([{"step": 6}], save)
    assert not run.is_trained
    assert run.checkpoint_to_resume() == newest


def test_damaged_lines_of_a_log_are_skipped(tmp_path: Path) -> None:
    log = tmp_path / "training.jsonl"
    first, second, fourth = (b'{"step": %d, "loss": 1.0}\n' % step for step in (1, 2, 4))
    damaged = b"\xff\xfe\n"
    log.write_bytes(first + bytes(40) + b"\n" + second + damaged + fourth + b'{"st')
    assert [line["step"] for line in Run(tmp_path).log] == [1, 2, 4]

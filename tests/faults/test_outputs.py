"""Where a run is made: places that cannot become one are refused before it, one process makes it, and what is finished
is never left where a later run removes it.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import small_recipe, train
from safetensors.torch import save_file

from pi_lora.errors import RunExistsError
from pi_lora.preflight import check
from pi_lora.run import check_output, staged, staging_path
from pi_lora.training import training


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk" / "empty").mkdir(parents=True)
    for link, target in (("to-empty", "disk/empty"), ("dangling", "disk/new")):
        output = tmp_path / link
        output.symlink_to(target)
        with staged(output) as staging:
            assert staging.parent == tmp_path / "disk"
            (staging / "weights").write_text("w")
        assert output.is_symlink()
        assert [path.name for path in (tmp_path / target).iterdir()] == ["weights"]
        with pytest.raises(RunExistsError, match="already exists"), staged(output):
            pass
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["empty", "new"]


@pytest.mark.parametrize("output", [".", "..", "/", "file/run"])
def test_what_is_no_place_for_a_run_is_refused_in_one_line(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "file").touch()
    path = Path(output) if output != "file/run" else tmp_path / output
    with pytest.raises(RunExistsError, match="; choose another --output") as refused, staged(path):
        pass
    assert "\n" not in str(refused.value)


def test_what_is_finished_stays_when_its_name_was_taken_meanwhile(tmp_path: Path) -> None:
    output = tmp_path / "run"

    def another_takes_its_name() -> None:
        with staged(output) as staging:
            (staging / "weights").write_text("mine")
            output.mkdir()
            (output / "weights").write_text("another's")

    with pytest.raises(RunExistsError, match=rf"is not overwritten; move the result from {staging_path(output)}$"):
        another_takes_its_name()
    assert (output / "weights").read_text() == "another's"
    assert (staging_path(output) / "weights").read_text() == "mine"
    with pytest.raises(RunExistsError, match="already exists"), staged(output):
        pass
    assert (staging_path(output) / "weights").exists()


def test_one_process_makes_it(tmp_path: Path, small_model: Path) -> None:
    output = tmp_path / "run"
    owner = "is being made by another process; wait for it, or choose another --output"
    with staged(output) as staging:
        (staging / "weights").touch()
        for resume in (False, True):
            with pytest.raises(RunExistsError, match=owner), staged(output, resume):
                pass
            with pytest.raises(RunExistsError, match=owner):
                check(small_recipe(small_model), output, resume)
        assert (staging / "weights").exists()
    assert [path.name for path in output.iterdir()] == ["weights"]
    with pytest.raises(RunExistsError, match="already exists"), staged(output):
        pass


# Begins to make argv[1] and says so.
BEGIN = """
import sys, time
from pathlib import Path
from pi_lora.run import staged

with staged(Path(sys.argv[1])) as staging:
    (staging / "half").touch()
    print("begun", flush=True)
    time.sleep(60)
"""


def test_a_lock_ends_with_its_process(python: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with subprocess.Popen([python, "-c", BEGIN, str(output)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        with pytest.raises(RunExistsError, match="is being made by another process"):
            check_output(output)
        process.kill()
        assert process.stdout.read() == ""  # the pipe closes when the process itself has ended
    assert staging_path(output).with_suffix(".lock").exists()
    check_output(output)
    with staged(output) as staging:
        assert not list(staging.iterdir())
        (staging / "whole").touch()
    assert [path.name for path in output.iterdir()] == ["whole"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


LATE = (("save_config", signal.SIGINT), ("save_tokenizer", signal.SIGTERM), ("write_card", signal.SIGHUP))


@pytest.mark.parametrize(("where", "number"), LATE)
def test_a_signal_does_not_lose_a_run_that_is_being_saved(
    where: str, number: int, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step is done, and no checkpoint was written."""
    save = getattr(training, where)

    def interrupted(*arguments: object) -> None:
        os.kill(os.getpid(), number)
        save(*arguments)

    monkeypatch.setattr(training, where, interrupted)
    run = train(small_recipe(small_model), tmp_path / "run")
    assert {"adapter_model.safetensors", "run.json", "README.md"} <= {path.name for path in run.iterdir()}


def test_the_umask_decides_who_may_read_a_run(tmp_path: Path) -> None:
    """safetensors writes files for their owner alone, whatever the umask."""
    before = os.umask(0o027)
    try:
        with staged(tmp_path / "run") as staging:
            save_file({"weight": torch.zeros(1)}, staging / "model.safetensors")
            (staging / "config.json").touch()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir()} == {0o640}

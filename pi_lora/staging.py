"""Where the folder of a run is made: beside its place, locked for other processes, and renamed when it is whole."""

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pi_lora.errors import ModelError, RecipeError, RunExistsError, first_line
from pi_lora.recipe.files import RECIPE_FILE, find_recipe, load_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.run import Run, is_complete, step_of
from pi_lora.storage import check_can_make, is_disk_full
from pi_lora.types import WRITTEN

# The names of folders in which runs are made, with the names of the runs.
BEGUN = re.compile(r"\.(.+)\.partial")


def resolve_run(
    name: Path | Mapping[str, Any], overrides: Iterable[str], output: Path | None, resume: bool
) -> tuple[Recipe, Path]:
    """Return the resolved recipe and the folder of a run.

    The recipe is that of the name, or with `resume` that of the interrupted run of the name. Raise RecipeError if the
    recipe is no file and no output is named.
    """
    if not isinstance(name, Path):
        if output is None:
            raise RecipeError(["--output: name the folder of the run; a recipe that is no file has no name"])
        return load_recipe(name, overrides).recipe, output
    file = find_recipe(name)
    begun_file = staging_path(name) / RECIPE_FILE
    is_begun = begun_file.is_file()
    if file.is_file():
        # `resume_command` names the run, which may have the name of a recipe.
        is_begun = is_begun and output is None and Run(begun_file.parent).last_checkpoint is not None
    if resume:
        check_not_inside(name)
    if resume and is_begun:
        return load_recipe(begun_file, overrides).recipe, output or name
    if resume and not file.is_file():
        if Run(name).has_recipe:
            raise RunExistsError(f"{name}: is finished; nothing is left to resume")
        raise RunExistsError(f"{name}: no interrupted run of this name, and no such recipe; correct the name")
    recipe = load_recipe(file, overrides).recipe
    parent = "models" if recipe.tuning.method == "full" else "adapters"
    return recipe, output or Path(parent, file.stem)


def resume_command(output: Path) -> str:
    """Return the command that continues an interrupted run."""
    return f"pi-lora train {shlex.quote(str(output))} --resume"


def check_not_inside(path: Path) -> None:
    """Raise ModelError for a folder inside a run, or a begun run: a checkpoint lacks the config with the scaling."""
    for folder in (path, *path.parents, *path.absolute().parents):
        begun = BEGUN.fullmatch(folder.name)
        if begun and Run(folder).has_recipe:
            command = resume_command(folder.with_name(begun[1]))
            raise ModelError(f"{path}: belongs to a run that is not finished; resume it with {command}")
    if is_complete(path) and not (path / "config.json").is_file():
        raise ModelError(f"{path}: is a checkpoint without the config of its run; name the run, or resume it there")


def check_finished(output: Path) -> None:
    """Raise ModelError if the run of that name was interrupted and is not finished, or if the name is inside a run."""
    check_not_inside(output)
    if output.exists():
        return
    run = Run(staging_path(output))
    last_checkpoint = run.last_checkpoint
    if last_checkpoint:
        raise ModelError(
            f"{output}: interrupted at step {step_of(last_checkpoint)} of {run.recipe.training.steps}; "
            f"resume it with {resume_command(output)}"
        )


def check_output(output: Path, *, resume: bool = False) -> None:
    """Raise RunExistsError if `output` cannot become a run.

    It exists, cannot be written, is being made by another process, or holds an interrupted run that is neither resumed
    nor removed.
    """
    if resume and Run(output).has_recipe:
        raise RunExistsError(f"{output}: is finished; nothing is left to resume")
    target = output.resolve()
    if target == Path.cwd() or not _is_free(target):
        raise RunExistsError(f"{output}: already exists and is not overwritten; choose another --output or remove it")
    if not resume:  # which must go on where the disk is full
        check_can_make(output)
    staging = staging_path(output)
    if staging.with_suffix(".lock").exists():
        with _locked(output):  # what a killed process left locks nothing
            pass
    if resume and not staging.is_dir():
        raise RunExistsError(f"{output}: no interrupted run to resume; start it without --resume")
    if not resume and Run(staging).last_checkpoint is not None:
        raise RunExistsError(
            f"{output}: an interrupted run is kept in {staging}; resume it with {resume_command(output)}, or remove "
            "that folder"
        )


def staging_path(output: Path) -> Path:
    """Return the folder in which a run is made: next to `output`, or next to its target if it is a link."""
    target = output.resolve()
    return target.with_name(f".{target.name}.partial")  # see BEGUN


@contextmanager
def staged(output: Path, *, resume: bool = False) -> Iterator[Path]:
    """Make `output` whole or not at all: the body fills the staging folder, which is then renamed.

    The staging folder is locked for other processes. If the body fails, the folder is removed unless it holds a
    checkpoint to resume from. Raise ModelError if the disk is full.
    """
    check_output(output, resume=resume)
    target = output.resolve()
    staging = staging_path(output)
    with _locked(output):
        if not resume:
            shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(exist_ok=True)
        try:
            yield staging
        except BaseException as error:
            run = Run(staging)
            if run.last_checkpoint is None:
                shutil.rmtree(staging, ignore_errors=True)
            if is_disk_full(error):
                run.remove_unfinished_checkpoints()  # which fill the disk
                remedy = resume_command(output) if run.last_checkpoint else "start again"
                raise ModelError(f"{output}: a disk is full ({first_line(error)}); make room, then {remedy}") from error
            raise
        for weights in staging.glob("*.safetensors"):
            if weights.stat().st_nlink == 1:  # not the base's own file
                weights.chmod(staging.stat().st_mode & 0o666)  # safetensors 0.8 writes them for their owner alone
        if not _is_free(target):
            raise RunExistsError(
                f"{output}: was created meanwhile and is not overwritten; move the result from {staging}"
            )
        os.replace(staging, target)  # replaces an empty folder
        WRITTEN.append(output)


def _is_free(path: Path) -> bool:
    if not path.exists():
        return True
    return path.is_dir() and not any(path.iterdir())


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Hold the lock of `output`.

    The kernel releases the lock of a process that was killed, and the file alone locks nothing.
    """
    file = staging_path(output).with_suffix(".lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(file, timeout=0).acquire()
    except Timeout:
        raise RunExistsError(
            f"{output}: is being made by another process; wait for it, or choose another --output"
        ) from None
    with lock:
        try:
            yield
        finally:
            file.unlink()

"""Run folders: made whole or not at all, by one process at a time, resumed, and what is written into them."""

import contextlib
import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, SoftFileLock, Timeout
from pydantic import BaseModel, ValidationError

from pi_lora.distributed import is_leader
from pi_lora.errors import ModelError, RecipeError, RunExistsError
from pi_lora.models.machine import hardware, versions
from pi_lora.models.origin import RUN_FILE, Origin
from pi_lora.recipe.files import RECIPE_FILE, load_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.writing import read_json, write_json, write_whole

CHECKPOINTS = "checkpoints"
COMPLETE = "complete"
LOCK = "lock"
SPARE_BYTES = 50_000_000  # for tokenizer, card, and other programs
SCORES = "scores"
TRAINING_LOG = "training.jsonl"
# Keys that a resumed run may change: they affect where it runs and what it logs, not its result.
MAY_CHANGE = ("hardware.", "evaluation.", "training.save_every", "training.log_every", "training.tracking", "paper")


def output_folder(recipe: Recipe, recipe_path: Path) -> Path:
    """Return the default folder of a run: `adapters/<recipe>` for LoRA, `models/<recipe>` for full tuning."""
    return Path("models" if recipe.tuning.method == "full" else "adapters") / recipe_path.stem


def check_output(output: Path, resume: bool = False) -> None:
    """Raise RunExistsError if `output` cannot become a run: it exists, is a place that no folder can be renamed to, is
    being made by another process, or holds an interrupted run that is neither resumed nor removed.
    """
    if output.name in ("", ".."):
        raise RunExistsError(f"{output}: is not the name of a new folder; choose another --output")
    _check_place(output)
    staging = staging_path(output)
    if staging.is_symlink():
        raise RunExistsError(f"{staging}: is a link, where a run was to be made; remove it")
    if is_leader() and os.path.lexists(staging / LOCK):
        with _locked(output):  # what a killed process left locks nothing
            pass
    if resume and not staging.is_dir():
        raise RunExistsError(f"{output}: no interrupted run to resume; start it without --resume")
    if not resume and last_checkpoint(staging) is not None:
        kept = f"an interrupted run is kept in {staging}"
        raise RunExistsError(f"{output}: {kept}; continue with --resume, or remove that folder")


def _check_place(output: Path) -> None:
    place, problem = _place(output), ""
    try:
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            problem = "already exists and is not overwritten; choose another --output or remove it"
        # A bind mount from the same file system has its device number, and is only in the system's table.
        elif os.path.ismount(place) or str(place) in {each.mountpoint for each in psutil.disk_partitions(all=True)}:
            problem = f"is a mount point, which no folder can be renamed to; name one in it: {output}/run"
        elif place == Path.cwd():
            problem = "is the current folder, which would be replaced; name one in it"
    except OSError as error:
        problem = f"cannot be read ({error.strerror}); choose another --output"
    if problem:
        raise RunExistsError(f"{output}: {problem}")


def check_room(output: Path, needed: int) -> None:
    """Raise RunExistsError if the disk has no room for `needed` bytes and a reserve."""
    free = shutil.disk_usage(staging_path(output).parent).free
    if free < needed + SPARE_BYTES:
        sizes = f"takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        raise RunExistsError(f"{output}: {sizes}; make room, or choose another --output")


def staging_path(output: Path) -> Path:
    """Return the folder in which a run is made: beside `output`, or where that leads if it is a link."""
    place = _place(output)
    return place.with_name(f".{place.name}.partial")


def _place(output: Path) -> Path:
    return Path(os.path.realpath(output))


@contextmanager
def staged(output: Path, resume: bool = False) -> Iterator[Path]:
    """Make `output` whole or not at all: the body fills the staging folder, which no other process takes meanwhile and
    which is then renamed. If the body fails, the staging folder is removed unless it holds a checkpoint to resume from.
    """
    check_output(output, resume)
    staging = staging_path(output)
    with _locked(output):
        try:
            _check_place(output)  # another process may have finished it meanwhile
            for each in () if resume else staging.iterdir():
                if each.is_dir() and not each.is_symlink():
                    shutil.rmtree(each)
                elif each.name != LOCK:
                    each.unlink()
            yield staging
        except BaseException:
            if last_checkpoint(staging) is None:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        made = _publish(staging, output)
        for file in made.rglob("*"):
            if file.is_file() and not file.is_symlink():
                file.chmod(0o644)  # transformers 5 writes 0600
        (made / LOCK).unlink(missing_ok=True)
    if made != _place(output):
        raise RunExistsError(f"{output}: came into being while it was made, and is not overwritten; look in {made}")


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Hold the lock of the staging folder of `output`, in which the owner leaves its name. The kernel releases the lock
    of a process that was killed, and the file alone locks nothing.
    """
    file = staging_path(output) / LOCK
    if file.is_symlink():
        raise RunExistsError(f"{file}: is a link, where a lock was to be made; remove it")
    lock = FileLock(file, timeout=0)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        owner = "another process"
        with contextlib.suppress(OSError, ValueError, IndexError):
            owner = "process {} on {}".format(*file.read_text(encoding="utf-8").split()[:2])
        raise RunExistsError(f"{output}: is being made by {owner}; wait for it, or choose another --output") from None
    except OSError as error:
        raise RunExistsError(f"{output}: cannot be written ({error.strerror}); choose another --output") from None
    mine = None
    try:
        if not isinstance(lock, SoftFileLock):  # which writes the same itself, where the file system has no locks
            file.write_text(f"{os.getpid()}\n{socket.gethostname()}\n", encoding="utf-8")
        mine = file.stat()
        yield
    finally:
        # Removed while it is locked: whoever opened it meanwhile holds a file without a name, and filelock tries again.
        with contextlib.suppress(OSError):
            if mine and os.path.samestat(mine, file.stat()):
                file.unlink()
        lock.release()


def _publish(staging: Path, output: Path) -> Path:
    """Rename what is finished to `output`, or beside it under a name that is free; return the folder that it became."""
    place = _place(output)
    for other in (place.with_name(f"{place.name}-{number}") for number in count(2)):
        try:
            os.replace(staging, place)  # takes the place of an empty folder
        except OSError:
            if not os.path.lexists(place):
                raise
            place = other
        else:
            break
    return place


def remove(output: Path) -> None:
    """Remove what was made, so that at no time a part of it stands under the name of the whole."""
    staging = staging_path(output)
    os.replace(_place(output), staging)
    shutil.rmtree(staging, ignore_errors=True)


def check_resumed_recipe(output: Path, recipe: Recipe) -> None:
    """Raise RecipeError with the keys that differ from the interrupted run and affect the result."""
    kept = staging_path(output) / RECIPE_FILE
    if not kept.is_file():
        return
    begun = load_recipe(kept)
    pairs = {key: (attrgetter(key)(begun.recipe), attrgetter(key)(recipe)) for key in begun.origins}
    if problems := [
        f"{key}: {now} given, but the interrupted run began with {before}; use that, or start a new run"
        for key, (before, now) in pairs.items()
        if before != now and not key.startswith(MAY_CHANGE)
    ]:
        raise RecipeError(problems)


def last_checkpoint(staging: Path) -> Path | None:
    """Return the newest complete checkpoint of an unfinished run."""
    return next((path for path in _checkpoints(staging) if (path / COMPLETE).is_file()), None)


def _checkpoints(staging: Path) -> list[Path]:
    """All checkpoints, the newest first, complete or not."""
    found = [path for path in (staging / CHECKPOINTS).glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def mark_complete(checkpoint: Path) -> None:
    """Mark a checkpoint as complete, with the training log up to it and the SHA-256 sums of its files."""
    shutil.copyfile(checkpoint.parent.parent / TRAINING_LOG, checkpoint / TRAINING_LOG)
    write_json(checkpoint / COMPLETE, _sums(checkpoint))


def checkpoint_to_resume(staging: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint whose files are as they were written, whose training log is restored, or None; and
    say which newer ones are damaged, which are removed. Raise ModelError if there are only damaged ones.
    """
    unusable: list[Path] = []
    damaged: list[str] = []
    for checkpoint in _checkpoints(staging):
        if (checkpoint / COMPLETE).is_file():
            if (problem := _damage(checkpoint)) is None:
                break
            damaged.append(f"{checkpoint}: {problem}")
        unusable.append(checkpoint)
    else:
        if damaged:
            raise ModelError(f"{'; '.join(damaged)}; no checkpoint before is left: remove {staging} and start again")
        return None, []
    for each in unusable:
        shutil.rmtree(each)
    said = [f"{each}; resuming from {checkpoint.name}" for each in damaged]
    if (log := checkpoint / TRAINING_LOG).is_file():
        write_whole(staging / TRAINING_LOG, log.read_text(encoding="utf-8"))
    else:
        said.append(f"{checkpoint}: has no sums, as an earlier version wrote it; resuming from it unchecked")
    return checkpoint, said


def _sums(checkpoint: Path) -> dict[str, str]:
    """The SHA-256 sums of a checkpoint's files, which are on the disk afterwards and not only in memory."""
    sums = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != COMPLETE:
            with path.open("rb") as file:
                sums[path.relative_to(checkpoint).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
    return sums


def _damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a complete checkpoint, or None."""
    if not (checkpoint / COMPLETE).stat().st_size:
        return None
    try:
        expected, found = json.loads((checkpoint / COMPLETE).read_text(encoding="utf-8")), _sums(checkpoint)
    except (OSError, ValueError, RecursionError) as error:
        return f"cannot be read ({error})"
    if not isinstance(expected, dict) or TRAINING_LOG not in expected:
        return f"{COMPLETE} is damaged"
    differing = sorted(name for name in expected.keys() | found.keys() if found.get(name) != expected.get(name))
    return f"{', '.join(differing)} changed since they were written" if differing else None


class LogLine(BaseModel, extra="allow", strict=True):
    """A line of training.jsonl: what is read of it here."""

    step: int
    loss: float


class Provenance(BaseModel, extra="allow", strict=True, frozen=True):
    """What run.json says of a run, as far as it is read here."""

    tokens: int
    seconds: float
    peak_memory: int
    loss: float
    versions: dict[str, str]
    python: str
    commit: str | None
    hardware: str
    original: int | None = None
    trainable_parameters: int | None = None


def read_provenance(folder: Path) -> Provenance | None:
    """Return what a run was made with, or None if it does not say so."""
    file = folder / RUN_FILE
    return read_json(file, Provenance, "correct it or remove it") if file.is_file() else None


def read_training_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a training.jsonl, if there is one, but those that a crash cut off or a disk damaged."""
    lines = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        with contextlib.suppress(ValidationError):
            lines.append(LogLine.model_validate_json(line).model_dump())
    return lines


def write_provenance(folder: Path, origin: Origin, facts: Mapping[str, Any]) -> None:
    """Write what a run was made from and with: its base and data, versions, commit, hardware, and `facts`."""
    machine = {"python": platform.python_version(), "commit": _commit(), "hardware": hardware()}
    made_with = {"origin": origin.model_dump(), **facts, "versions": versions(), **machine}
    write_json(folder / RUN_FILE, made_with)


def _commit() -> str | None:
    """Return the commit of this source tree if it is a git checkout."""
    here = Path(__file__).parent.parent
    if not (here / ".git").exists() or not shutil.which("git"):
        return None
    describe = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip() or None

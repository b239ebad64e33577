"""The folder of a run: made whole or not at all by one process at a time, resumed, and what its files say."""

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import BaseModel

from pi_lora.errors import ModelError, RecipeError, RunExistsError
from pi_lora.recipe.files import RECIPE_FILE, find_recipe, load_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.storage import read_json, write_json, write_whole
from pi_lora.types import Permissions

RUN_FILE, TRAINING_LOG, SCORES = "run.json", "training.jsonl", "scores"
CHECKPOINTS, COMPLETE = "checkpoints", "complete"
BASE, STEP_0, TUNED = "base", "step 0", "tuned"
# How a file of scores ends that is not of the finished run.
STAGE = re.compile(r"-(base|step-\d+)$")
# Keys that a resumed run may change: they affect where it runs and what it logs, not its result.
MAY_CHANGE = ("hardware.", "evaluation.", "training.save_every", "training.log_every", "training.tracking", "paper")


class Fingerprint(BaseModel, frozen=True, strict=True):
    """What a run is made from: the place or hub commit of its base, digests of its weights, tokenizer and data. A path
    or a name may mean other weights tomorrow, or elsewhere.
    """

    place: str | None = None
    commit: str | None = None
    weights: str
    tokenizer: str | None = None
    data: str | None = None


class RunMetadata(BaseModel, extra="allow", strict=True, frozen=True):
    """The content of `run.json`: the origin, written when a run starts, and what the training took, written at the end
    (see `training.save`). The card shows both.
    """

    python: str
    origin: Fingerprint | None = None
    precision: str | None = None
    original: int | None = None


@dataclass(frozen=True)
class Run:
    """The folder of a run, finished or not. A file is read once, on first use."""

    path: Path

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name

    @cached_property
    def has_recipe(self) -> bool:
        """Whether pi-lora trained it: other tools write a recipe.yaml as well."""
        return (self.path / RECIPE_FILE).is_file() and (self.path / RUN_FILE).is_file()

    @cached_property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return load_recipe(self.path / RECIPE_FILE).recipe

    @cached_property
    def metadata(self) -> RunMetadata:
        """What `run.json` says; nothing if there is none, as of adapters made by other tools."""
        file = self.path / RUN_FILE
        if not file.is_file():
            return RunMetadata(python="unknown")
        return read_json(file, RunMetadata, "correct it or remove it")

    def record(self, facts: Mapping[str, Any]) -> None:
        """Add `facts` to `run.json`, with the commit of pi-lora and the version of Python."""
        made_with = {"python": platform.python_version(), "commit": _commit()}
        write_json(self.path / RUN_FILE, {**self.metadata.model_dump(exclude_unset=True), **facts, **made_with})
        vars(self).pop("metadata")

    @property
    def log(self) -> list[dict[str, Any]]:
        """The lines of `training.jsonl`, if there is one, but those that a crash cut off or a disk damaged."""
        lines, file = [], self.path / TRAINING_LOG
        for line in file.read_bytes().split(b"\n") if file.is_file() else ():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return lines

    def scores_file(self, name: str, stage: str = TUNED) -> Path:
        """Return where a measurement of this run, or of an earlier stage, is kept."""
        return self.path / SCORES / f"{name}{'' if stage == TUNED else f'-{stage}'.replace(' ', '-')}.json"

    def score_files(self) -> list[tuple[str, str, Path]]:
        """Return stage, measurement and file of all scores, the stages in order: base, step 0, 200, ..., tuned."""
        files = []
        for file in (self.path / SCORES).glob("*.json"):
            stage = STAGE.search(file.stem)
            files.append((stage[1].replace("-", " ") if stage else TUNED, STAGE.sub("", file.stem), file))
        # A longer name of a step is that of a later one.
        return sorted(files, key=lambda each: (each[0] == TUNED, len(each[0]), each))

    @property
    def checkpoints(self) -> list[Path]:
        """All checkpoints, the newest first, complete or not."""
        return sorted((self.path / CHECKPOINTS).glob("checkpoint-*"), key=_step, reverse=True)

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        return next((path for path in self.checkpoints if (path / COMPLETE).is_file()), None)

    def mark_complete(self, checkpoint: Path) -> None:
        """Mark a checkpoint as complete, with the training log up to it and the sizes of its files, once
        all of them are on the disk.
        """
        shutil.copyfile(self.path / TRAINING_LOG, checkpoint / TRAINING_LOG)
        for file in checkpoint.rglob("*"):
            if file.is_file():
                with file.open("rb") as content:
                    os.fsync(content.fileno())
        write_json(checkpoint / COMPLETE, _sizes(checkpoint))

    def checkpoint_to_resume(self) -> Path | None:
        """Return the newest checkpoint whose files are all there, and restore its training log. Newer ones are removed,
        and a line on stderr says which of them is damaged. Raise ModelError if there are only damaged ones.
        """
        unusable: list[Path] = []
        damaged: list[str] = []
        for checkpoint in self.checkpoints:
            if (checkpoint / COMPLETE).is_file():
                if (problem := _damage(checkpoint)) is None:
                    break
                damaged.append(f"{checkpoint}: {problem}")
            unusable.append(checkpoint)
        else:
            if damaged:
                raise ModelError(
                    f"{'; '.join(damaged)}; no checkpoint before is left: remove {self.path} and start again"
                )
            return None
        for path in unusable:
            shutil.rmtree(path)
        write_whole(self.path / TRAINING_LOG, (checkpoint / TRAINING_LOG).read_text(encoding="utf-8"))
        for line in damaged:
            print(f"{line}; resuming from {checkpoint.name}", file=sys.stderr)
        return checkpoint

    def check_same_fingerprint(self, output: Path, now: Fingerprint, permissions: Permissions) -> None:
        """Raise ModelError if this interrupted run of `output` began with another base, tokenizer or data."""
        before = None if permissions.allow_mismatch else self.metadata.origin
        names = ("weights", "tokenizer", "data")
        if before and (changed := [name for name in names if getattr(before, name) != getattr(now, name)]):
            raise ModelError(
                f"{output}: {' and '.join(changed)} are others than those that the interrupted run began with; "
                "bring them back, start a new run, or go on with --allow-mismatch"
            )

    def check_same_recipe(self, recipe: Recipe) -> None:
        """Raise RecipeError with the keys that differ from this interrupted run and affect the result."""
        if not self.has_recipe:
            return
        begun = load_recipe(self.path / RECIPE_FILE)
        pairs = {key: (attrgetter(key)(begun.recipe), attrgetter(key)(recipe)) for key in begun.origins}
        if problems := [
            f"{key}: {now} given, but the interrupted run began with {before}; use that, or start a new run"
            for key, (before, now) in pairs.items()
            if before != now and not key.startswith(MAY_CHANGE)
        ]:
            raise RecipeError(problems)


def resolve_run(
    name: Path, overrides: Sequence[str] = (), output: Path | None = None, resume: bool = False
) -> tuple[Recipe, Path]:
    """Return the resolved recipe and the folder of a run: of the recipe `name`, or to `resume` of the interrupted run
    `name`, with everything that it began with.
    """
    file, begun = find_recipe(name), staging_path(name) / RECIPE_FILE
    if resume and not file.is_file() and begun.is_file():
        return load_recipe(begun, overrides).recipe, output or name
    recipe = load_recipe(file, overrides).recipe
    return recipe, output or Path("models" if recipe.tuning.method == "full" else "adapters", file.stem)


def resume_command(output: Path) -> str:
    """Return the command that continues an interrupted run."""
    return f"pi-lora train {shlex.quote(str(output))} --resume"


def check_tuned(run: Run) -> None:
    """Raise ModelError if a folder is not that of a finished run, with its recipe."""
    check_finished(run.path)
    if not run.has_recipe:
        raise ModelError(f"{run.path}: holds no {RECIPE_FILE}; name a run folder that pi-lora train made")


def check_finished(output: Path) -> None:
    """Raise ModelError if the run of that name was interrupted and is not finished."""
    run = Run(staging_path(output))
    if not output.exists() and (last := run.last_checkpoint):
        raise ModelError(
            f"{output}: interrupted at step {_step(last)} of {run.recipe.training.steps}; "
            f"resume it with {resume_command(output)}"
        )


def check_output(output: Path, resume: bool = False) -> None:
    """Raise RunExistsError if `output` cannot become a run: it exists, is in a place that cannot be written, is being
    made by another process, or holds an interrupted run that is neither resumed nor removed.
    """
    place = _place(output)
    if place == Path.cwd() or not _is_free(place):
        raise RunExistsError(f"{output}: already exists and is not overwritten; choose another --output or remove it")
    # Of a file, "file/." cannot be accessed either.
    if not os.access(f"{next(parent for parent in place.parents if parent.exists())}/.", os.W_OK):
        raise RunExistsError(f"{output}: is in a place that cannot be written; choose another --output")
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
    """Return the folder in which a run is made: beside `output`, or where that leads if it is a link."""
    place = _place(output)
    return place.with_name(f".{place.name}.partial")


@contextmanager
def staged(output: Path, resume: bool = False) -> Iterator[Path]:
    """Make `output` whole or not at all: the body fills the staging folder, which no other process takes meanwhile and
    which is then renamed. If the body fails, the staging folder is removed unless it holds a checkpoint to resume from.
    """
    check_output(output, resume)
    place, staging = _place(output), staging_path(output)
    with _locked(output):
        if not resume:
            shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(exist_ok=True)
        try:
            yield staging
        except BaseException:
            if Run(staging).last_checkpoint is None:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        for weights in staging.glob("*.safetensors"):
            if weights.stat().st_nlink == 1:  # not the base's own file
                weights.chmod(staging.stat().st_mode & 0o666)  # safetensors 0.8 writes them for their owner alone
        if not _is_free(place):
            raise RunExistsError(
                f"{output}: was created meanwhile and is not overwritten; move the result from {staging}"
            )
        os.replace(staging, place)  # takes the place of an empty folder


def _place(output: Path) -> Path:
    return Path(os.path.realpath(output))


def _is_free(place: Path) -> bool:
    return not place.exists() or (place.is_dir() and not any(place.iterdir()))


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Hold the lock of `output`. The kernel releases the lock of a process that was killed, and the file alone locks
    nothing.
    """
    file = staging_path(output).with_suffix(".lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(file, timeout=0).acquire()
    except Timeout:
        raise RunExistsError(
            f"{output}: is being made by another process; wait for it, or choose another --output"
        ) from None
    with held:
        try:
            yield
        finally:
            file.unlink()


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _sizes(checkpoint: Path) -> dict[str, int]:
    """Return the sizes in bytes of the files of a checkpoint by name, without that of its marker."""
    files = (path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != COMPLETE)
    return {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}


def _damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a complete checkpoint, or None."""
    try:
        expected = read_json(checkpoint / COMPLETE, dict[str, int], "start again")
    except ModelError:
        return f"{COMPLETE} is damaged"
    differing = sorted({name for name, _ in expected.items() ^ _sizes(checkpoint).items()})
    return f"{', '.join(differing)} changed since they were written" if differing else None


def _commit() -> str | None:
    """Return the commit of this source tree if it is a git checkout."""
    here = Path(__file__).parent.parent
    if not (here / ".git").exists() or not shutil.which("git"):
        return None
    describe = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip() or None

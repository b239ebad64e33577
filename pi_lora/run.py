"""The folder of a run: its files, its checkpoints, and whether another training may go on with it."""

import glob
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from safetensors import SafetensorError

from pi_lora.errors import ModelError, RecipeError
from pi_lora.recipe.data import Source
from pi_lora.recipe.files import RECIPE_FILE, load_recipe
from pi_lora.recipe.schema import Dtype, Recipe
from pi_lora.storage import read_json, read_json_lines, write_json, write_whole
from pi_lora.types import Json, Permissions

RUN_FILE = "run.json"
MERGE_FILE = "merge.json"
TRAINING_LOG = "training.jsonl"
SCORES = "scores"
CHECKPOINTS = "checkpoints"
COMPLETE = "complete"
# As transformers names it.
TRAINER_STATE = "trainer_state.json"
BASE = "base"
STEP_0 = "step 0"
TUNED = "tuned"
# The name of a file of scores: the measurement, and an earlier stage.
SCORES_NAME = re.compile(r"(.+?)(?:-(base|step-\d+))?")
CHECKPOINT_NAME = re.compile(r"checkpoint-\d+")
# Keys that a resumed run may change: they affect speed, memory, the machine and the log, not what is computed.
RESUMABLE_CHANGES = (
    "hardware.",
    "evaluation.",
    "model.attention",
    "model.kernels",
    "training.per_device_batch_size",
    "training.activation_checkpointing",
    "training.mlp_chunk_tokens",
    "training.save_every",
    "training.log_every",
    "training.tracking",
    "paper",
)


class Fingerprint(BaseModel, frozen=True, strict=True):
    """The base, tokenizer and data that a run is made from: folder or hub commit of the base, and digests.

    A path or a name may mean other weights tomorrow, or elsewhere.
    """

    path: str | None = None
    commit: str | None = None
    weights: str
    tokenizer: str | None = None
    data: str | None = None


class RunMetadata(BaseModel, extra="allow", strict=True, frozen=True):
    """The content of `run.json`, which the card shows.

    The origin is written when a run starts; time and memory of the training are written at the end. Relative names in
    the recipe begin in `directory`. A merged or extended model has this file too.

    Attributes:
        origin: The base, tokenizer and data of the training.
        precision: The dtype in which the steps compute.
        base_dtype: The dtype of the base while it is tuned.
        original: L, the window before the extension, in tokens.
        directory: The folder in which the training started.
        texts_before: The texts that the models before this one were tuned on.
    """

    python: str
    origin: Fingerprint | None = None
    precision: Dtype | None = None
    base_dtype: Dtype | None = None
    original: int | None = None
    base_window: int | None = None
    directory: str | None = None
    texts_before: list[Source] = []


class MergeRecord(BaseModel, strict=True, frozen=True):
    """The content of `merge.json`: the names of base and run, absolute paths of folders, and what was checked."""

    base: str
    run: str
    checks: list[str]


@dataclass(frozen=True)
class Run:
    """The folder of a run, finished or not. A file is read once, on first use."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))  # a string is a path as well

    def __str__(self) -> str:
        return str(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name

    @cached_property
    def has_recipe(self) -> bool:
        """Whether pi-lora trained it: other tools write a recipe.yaml as well."""
        return (self.path / RECIPE_FILE).is_file() and (self.path / RUN_FILE).is_file()

    @property
    def texts(self) -> list[Source]:
        """The texts that the model and the models before it were tuned on, by the paths that they had. Examples have no
        column: their rows are held out by the columns of the prompt.
        """
        texts = list(self.metadata.texts_before)
        if not self.has_recipe:
            return texts
        folder = Path(self.metadata.directory or "")
        before = Run(folder / self.recipe.model.name)
        if not texts and before.path.resolve() != self.path.resolve():
            texts = before.texts
        for source in self.recipe.data.source:
            path = folder / Path(source.name).expanduser()
            is_here = glob.has_magic(source.name) or path.exists()
            name = str(path) if is_here else source.name
            column = "" if self.recipe.data.has_examples else source.column
            text = source.changed(name=name, column=column)
            if text not in texts:
                texts.append(text)
        return texts

    @cached_property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return load_recipe(self.path / RECIPE_FILE).recipe

    @cached_property
    def metadata(self) -> RunMetadata:
        """The content of `run.json`; empty if there is none, or one of another tool, as in models made by these."""
        file = self.path / RUN_FILE
        remedy = "correct it or remove it"
        if not file.is_file():
            return RunMetadata(python="unknown")
        if not self.has_recipe and "python" not in read_json(file, Json, remedy):
            return RunMetadata(python="unknown")
        return read_json(file, RunMetadata, remedy)

    def with_dtypes(self, recipe: Recipe) -> Recipe:
        """Return a recipe with the dtypes that the run started with: another machine may choose others."""
        training = recipe.training.changed(precision=self.metadata.precision or recipe.training.precision)
        model = recipe.model.changed(dtype=self.metadata.base_dtype or recipe.model.dtype)
        return recipe.model_copy(update={"training": training, "model": model})

    def record(self, facts: Mapping[str, Any]) -> None:
        """Add `facts` to `run.json`, with the commit of pi-lora and the version of Python."""
        write_json(
            self.path / RUN_FILE,
            {
                **self.metadata.model_dump(exclude_unset=True),
                **facts,
                "python": platform.python_version(),
                "commit": _commit(),
            },
        )
        vars(self).pop("metadata")

    @property
    def log(self) -> list[Json]:
        """The lines of `training.jsonl`, without those that a crash cut off or a disk damaged."""
        file = self.path / TRAINING_LOG
        return list(read_json_lines(file)) if file.is_file() else []

    def scores_file(self, name: str, stage: str = TUNED) -> Path:
        """Return the file for a measurement of this run, or of an earlier stage."""
        suffix = "" if stage == TUNED else "-" + stage.replace(" ", "-")
        return self.path / SCORES / f"{name}{suffix}.json"

    def score_files(self) -> list[tuple[str, str, Path]]:
        """Return stage, measurement and file of all scores, the stages in order: base, step 0, 200, ..., tuned."""
        files = []
        for file in (self.path / SCORES).glob("*.json"):
            if parts := SCORES_NAME.fullmatch(file.stem):
                name, stage = parts.groups(TUNED)
                files.append((stage.replace("-", " "), name, file))

        # A longer name of a step is that of a later one.
        return sorted(files, key=lambda scores: (scores[0] == TUNED, len(scores[0]), scores))

    @property
    def checkpoints(self) -> list[Path]:
        """All checkpoints, the newest first, complete or not. A copy that a user made there is none."""
        folders = [
            path for path in (self.path / CHECKPOINTS).glob("checkpoint-*") if CHECKPOINT_NAME.fullmatch(path.name)
        ]
        return sorted(folders, key=step_of, reverse=True)

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        return next(filter(is_complete, self.checkpoints), None)

    @property
    def commit(self) -> str | None:
        """The commit of the base on the hub."""
        origin = self.metadata.origin
        return origin.commit if origin else None

    @property
    def final_checkpoint(self) -> Path:
        """The checkpoint of the last step, which `save_last` writes."""
        return self.path / CHECKPOINTS / f"checkpoint-{self.recipe.training.steps}"

    @property
    def is_trained(self) -> bool:
        """Whether all steps are done, and the weights after them are kept."""
        return is_complete(self.final_checkpoint)

    def mark_complete(self, checkpoint: Path) -> None:
        """Mark a checkpoint as complete once all files are on the disk.

        The checkpoint gets the training log up to it, and the marker has the sizes of the files.
        """
        shutil.copyfile(self.path / TRAINING_LOG, checkpoint / TRAINING_LOG)
        for file in checkpoint.rglob("*"):
            if file.is_file():
                with file.open("rb") as content:
                    os.fsync(content.fileno())
        write_json(checkpoint / COMPLETE, _sizes(checkpoint))

    def save_last(self, log: Sequence[Json], save: Callable[[Path], object]) -> None:
        """Write the log, and by `save` the weights after the last step: a checkpoint without an optimizer, which stays
        until the run stands. If the disk is full, all checkpoints but the one before make room.
        """
        checkpoint = self.final_checkpoint

        def write() -> None:
            write_whole(self.path / TRAINING_LOG, "".join(json.dumps(line) + "\n" for line in log))
            checkpoint.mkdir(parents=True, exist_ok=True)
            save(checkpoint)
            self.mark_complete(checkpoint)

        try:
            write()
        except (OSError, SafetensorError):
            for unneeded in self.checkpoints[2:]:
                shutil.rmtree(unneeded, ignore_errors=True)
            write()

    def remove_unfinished_checkpoints(self) -> None:
        """Remove the checkpoints that were not written whole."""
        for checkpoint in self.checkpoints:
            if not is_complete(checkpoint):
                shutil.rmtree(checkpoint, ignore_errors=True)

    def checkpoint_to_resume(self) -> Path | None:
        """Return the newest checkpoint with all files, and restore the training log up to it.

        Newer checkpoints are removed, and damaged ones among them are named on stderr; without a checkpoint the log is
        removed. Raise ModelError if there are only damaged ones.
        """
        unusable: list[Path] = []
        damaged: list[str] = []
        for checkpoint in self.checkpoints:
            if is_complete(checkpoint):
                problem = _damage(checkpoint)
                if problem is None:
                    break
                damaged.append(f"{checkpoint}: {problem}")
            unusable.append(checkpoint)
        else:
            if damaged:
                raise ModelError(
                    f"{'; '.join(damaged)}; no checkpoint before is left: remove {self.path} and start again"
                )
            (self.path / TRAINING_LOG).unlink(missing_ok=True)
            return None
        for path in unusable:
            shutil.rmtree(path)
        log = (checkpoint / TRAINING_LOG).read_text(encoding="utf-8")
        write_whole(self.path / TRAINING_LOG, log)
        for line in damaged:
            print(f"{line}; resuming from {checkpoint.name}", file=sys.stderr)
        return checkpoint

    def check_same_fingerprint(self, output: Path, now: Fingerprint, permissions: Permissions) -> None:
        """Raise ModelError if this interrupted run of `output` began with another base, tokenizer or data."""
        before = self.metadata.origin
        if permissions.allow_mismatch or before is None:
            return
        digests = ("weights", "tokenizer", "data")
        changed = [name for name in digests if getattr(before, name) != getattr(now, name)]
        if changed:
            raise ModelError(
                f"{output}: {' and '.join(changed)} changed since the interrupted run began; "
                "undo the change, start a new run, or go on with --allow-mismatch"
            )

    def check_same_recipe(self, recipe: Recipe) -> None:
        """Raise RecipeError with the keys that differ from this interrupted run and affect the result."""
        if not self.has_recipe:
            return
        begun = load_recipe(self.path / RECIPE_FILE)
        problems = []
        for key in begun.origins:
            value_of = attrgetter(key)
            before = value_of(begun.recipe)
            now = value_of(recipe)
            if key.startswith(RESUMABLE_CHANGES) or (key, now) == ("model.revision", self.commit):
                continue
            if before != now:
                problems.append(
                    f"{key}: {now} given, but the interrupted run began with {before}; use that, or start a new run"
                )
        if (begun.recipe.shards > 1) != (recipe.shards > 1):
            # Checkpoints of shards are other files.
            problems.append(
                "hardware: weights are sharded before or now, but not both; use one GPU, or several, as before"
            )
        if problems:
            raise RecipeError(problems)


def check_tuned(run: Run) -> None:
    """Raise ModelError if a folder is not that of a run, with its recipe."""
    if not run.has_recipe:
        raise ModelError(f"{run.path}: holds no {RECIPE_FILE}; name a run folder that pi-lora train made")


def is_complete(checkpoint: Path) -> bool:
    """Whether all files of a checkpoint were written."""
    return (checkpoint / COMPLETE).is_file()


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint of a training, or a copy of one, complete or not."""
    if (folder / RUN_FILE).is_file():
        return False
    traces = (COMPLETE, TRAINER_STATE, TRAINING_LOG)
    has_name = CHECKPOINT_NAME.fullmatch(folder.resolve().name) is not None
    return has_name or any((folder / name).is_file() for name in traces)


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def _sizes(checkpoint: Path) -> dict[str, int]:
    """Return the sizes in bytes of the files of a checkpoint by name, without the marker."""
    files = (path for path in checkpoint.rglob("*") if path.is_file() and path.name != COMPLETE)
    return {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}


def _damage(checkpoint: Path) -> str | None:
    """Return the problem of a checkpoint that was marked as complete, or None."""
    try:
        expected = read_json(checkpoint / COMPLETE, dict[str, int], "start again")
    except ModelError:
        return f"{COMPLETE} is damaged"
    differing = sorted({name for name, _ in expected.items() ^ _sizes(checkpoint).items()})
    if not differing:
        return None
    return f"{', '.join(differing)} changed since they were written"


@cache
def _commit() -> str | None:
    """Return the commit of this source tree, when it is first asked for, if it is a git checkout."""
    source_tree = Path(__file__).parent.parent
    if not (source_tree / ".git").exists() or not shutil.which("git"):
        return None
    command = ["git", "-C", str(source_tree), "describe", "--always", "--dirty", "--abbrev=12"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    return completed.stdout.strip() or None

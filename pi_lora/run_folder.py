"""Run folders: made whole or not at all, resumed, and what is written into them."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pi_lora.errors import RecipeError, RunExistsError
from pi_lora.models.machine import hardware, versions
from pi_lora.recipe.files import RECIPE_FILE, dump_recipe, load_recipe
from pi_lora.recipe.schema import Recipe

RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
COMPLETE = "complete"
SPARE_BYTES = 50_000_000  # for tokenizer, card, and other programs
SCORES = "scores"
TRAINING_LOG = "training.jsonl"
# Keys that a resumed run may change: they affect where it runs and what it logs, not its result.
MAY_CHANGE = ("hardware.", "evaluation.", "training.save_every", "training.log_every", "training.tracking", "paper")


def output_folder(recipe: Recipe, recipe_path: Path) -> Path:
    """Return the default folder of a run: `adapters/<recipe>` for LoRA, `models/<recipe>` for full tuning."""
    return Path("models" if recipe.tuning.method == "full" else "adapters") / recipe_path.stem


def check_output(output: Path, resume: bool = False) -> None:
    """Raise RunExistsError if `output` exists, or holds an interrupted run that is neither resumed nor removed."""
    staging = staging_path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RunExistsError(f"{output}: already exists and is not overwritten; choose another --output or remove it")
    if resume and not staging.is_dir():
        raise RunExistsError(f"{output}: no interrupted run to resume; start it without --resume")
    if not resume and last_checkpoint(staging) is not None:
        kept = f"an interrupted run is kept in {staging}"
        raise RunExistsError(f"{output}: {kept}; continue with --resume, or remove that folder")


def check_room(output: Path, needed: int) -> None:
    """Raise RunExistsError if the disk has no room for `needed` bytes and a reserve."""
    free = shutil.disk_usage(staging_path(output).parent).free
    if free < needed + SPARE_BYTES:
        sizes = f"takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        raise RunExistsError(f"{output}: {sizes}; make room, or choose another --output")


def staging_path(output: Path) -> Path:
    """Return the folder beside `output` in which a run is made and which is renamed to `output` when it is complete."""
    return output.with_name(f".{output.name}.partial")


@contextmanager
def staged(output: Path, resume: bool = False) -> Iterator[Path]:
    """Make `output` whole or not at all: the body fills the staging folder, which is then renamed. If the body fails,
    the staging folder is removed unless it holds a checkpoint to resume from.
    """
    check_output(output, resume)
    staging = staging_path(output)
    if not resume:
        shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunExistsError(f"{output}: cannot be written ({error.strerror}); choose another --output") from None
    try:
        yield staging
    except BaseException:
        if last_checkpoint(staging) is None:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    for file in staging.rglob("*"):
        if file.is_file():
            file.chmod(0o644)  # transformers 5 writes 0600
    if output.is_dir():
        output.rmdir()  # empty, or check_output would have refused it
    os.replace(staging, output)


def check_resumed_recipe(output: Path, recipe: Recipe) -> None:
    """Raise RecipeError with the keys that differ from the interrupted run and affect the result."""
    kept = staging_path(output) / RECIPE_FILE
    if not kept.is_file():
        return
    begun, now = (_flat(each.model_dump()) for each in (load_recipe(kept).recipe, recipe))
    if problems := [
        f"{key}: {now[key]} given, but the interrupted run began with {begun[key]}; use that, or start a new run"
        for key in begun
        if begun[key] != now[key] and not key.startswith(MAY_CHANGE)
    ]:
        raise RecipeError(problems)


def last_checkpoint(staging: Path) -> Path | None:
    """Return the newest complete checkpoint of an unfinished run."""
    found = [path for path in (staging / CHECKPOINTS).glob("checkpoint-*") if (path / COMPLETE).is_file()]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def mark_complete(checkpoint: Path) -> None:
    """Mark a checkpoint as complete; a process may be killed while it writes one."""
    (checkpoint / COMPLETE).touch()


def read_training_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a training.jsonl, without one that a crash cut off; none if there is no file yet."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the resolved recipe."""
    (folder / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")


def write_provenance(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write what a run was made with: versions, commit, hardware, and `facts`."""
    machine = {"python": platform.python_version(), "commit": _commit(), "hardware": hardware()}
    made_with = {**facts, "versions": versions(), **machine}
    (folder / RUN_FILE).write_text(json.dumps(made_with, indent=2) + "\n", encoding="utf-8")


def _commit() -> str | None:
    """Return the commit of this source tree if it is a git checkout."""
    here = Path(__file__).parent.parent
    if not (here / ".git").exists():
        return None
    describe = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    answer = subprocess.run(describe, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten `{"a": {"b": 1}}` to `{"a.b": 1}`, one level deep like a recipe's sections."""
    flat: dict[str, Any] = {}
    for section, content in tree.items():
        nested = isinstance(content, dict)
        flat |= {f"{section}.{key}": content[key] for key in content} if nested else {section: content}
    return flat

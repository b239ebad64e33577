"""Sequences on disk: Arrow files that are written piece by piece under a lock, and mapped into memory when read.

A folder is named by the digest of what its sequences are made from, and appears whole or not at all.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, List, Value, concatenate_datasets
from filelock import FileLock, Timeout

from pi_lora.errors import DataError
from pi_lora.types import Json

SHARD_TOKENS = 2**28
BATCH_TOKENS = 2**20
# Of a sequence whose length is its own: only how many are written at once depends on it.
TYPICAL_TOKENS = 2**13
MADE_FROM = "made_from.json"
NOTES = "notes.json"

Row = Mapping[str, list[int]]


@dataclass(frozen=True)
class Layout:
    """The columns of the sequences with their integer types, and how long and how many the sequences are.

    Without `length` each has its own, without `number` there are as many as come.
    """

    columns: Mapping[str, str]
    length: int | None = None
    number: int | None = None

    @property
    def features(self) -> Features:
        """The columns as `datasets` describes them."""
        length = -1 if self.length is None else self.length
        return Features({name: List(Value(kind), length=length) for name, kind in self.columns.items()})


def write_shards(folder: Path, rows: Iterator[Row], layout: Layout, shard_tokens: int = SHARD_TOKENS) -> None:
    """Write `rows` into files of about `shard_tokens` tokens; one batch of them is in memory at a time."""
    length, schema = layout.length or TYPICAL_TOKENS, layout.features.arrow_schema
    per_shard, per_batch = max(1, shard_tokens // length), max(1, BATCH_TOKENS // length)
    rows = itertools.islice(rows, layout.number)
    for number, first in enumerate(rows):
        shard = itertools.chain([first], itertools.islice(rows, per_shard - 1))
        with (folder / f"{number:05d}.arrow").open("wb") as out:
            with pa.ipc.new_stream(out, schema) as writer:
                while batch := list(itertools.islice(shard, per_batch)):
                    columns = {name: [row[name] for row in batch] for name in layout.columns}
                    writer.write_batch(pa.RecordBatch.from_pydict(columns, schema=schema))
            # A machine that loses power after the folder was renamed must not leave files of zeros under its name.
            out.flush()
            os.fsync(out.fileno())


def read_shards(folder: Path, layout: Layout) -> Dataset | None:
    """Return the sequences in `folder`, mapped into memory, as NumPy arrays; None if they are missing or damaged."""
    try:
        shards = [Dataset.from_file(str(file)) for file in sorted(folder.glob("*.arrow"))]
        found = concatenate_datasets(shards) if shards else None
    except (pa.ArrowException, OSError, ValueError):
        return None
    if found is None or layout.number not in (None, len(found)) or found.features != layout.features:
        return None
    return found.with_format("numpy")


def cache_folder() -> Path:
    """Return `$PI_LORA_CACHE`, or `pi-lora` in the user's cache folder (`$XDG_CACHE_HOME`, by default `~/.cache`).

    It may be deleted whenever nothing trains: what is missing is made again.
    """
    if own := os.environ.get("PI_LORA_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pi-lora"


def folder_of(made_from: Json) -> Path:
    """Return the folder of the sequences that are made from `made_from`, whatever the order of its keys.

    >>> folder_of({"a": 1, "b": 2}) == folder_of({"b": 2, "a": 1}) != folder_of({"a": 1})
    True
    """
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "sequences" / key


def cached(
    made_from: Json,
    layout: Layout,
    make: Callable[[], Iterator[Row]],
    waiting: Callable[[], None],
    notes: Callable[[], Any] | None = None,
) -> Dataset:
    """Return the sequences that were made from `made_from`: those in the cache, or what `make` yields, put there first.

    Processes that ask for the same sequences at once call `waiting` while the first of them makes them. What `notes`
    returns when all are made, as JSON, is kept beside them for `notes_on`.

    Raises:
        DataError: the cache cannot be written.
    """
    folder = folder_of(made_from)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_suffix(".lock"))
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            waiting()
            held = lock.acquire()
        with held:
            if (found := read_shards(folder, layout)) is None:
                _write_whole(folder, made_from, layout, make(), notes)
                found = read_shards(folder, layout)
            assert found is not None, f"{folder}: cannot be read back"
            return found
    except OSError as error:
        raise DataError(
            f"{folder}: the cache cannot be written ({error.strerror or error}); "
            "make room, or name another folder in the environment variable PI_LORA_CACHE"
        ) from error


def notes_on(made_from: Json) -> Any:
    """Return what was noted when the sequences in the cache were made."""
    return json.loads((folder_of(made_from) / NOTES).read_text(encoding="utf-8"))


def _write_whole(
    folder: Path, made_from: Json, layout: Layout, rows: Iterator[Row], notes: Callable[[], Any] | None
) -> None:
    part = folder.with_suffix(".partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        write_shards(part, rows, layout)
        for name, content in {MADE_FROM: made_from, **({NOTES: notes()} if notes else {})}.items():
            (part / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)

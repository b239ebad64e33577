"""Packed sequences on disk: Arrow files that are written piece by piece, and mapped into memory when read."""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value, concatenate_datasets
from filelock import FileLock, Timeout

from pi_lora.errors import DataError

SHARD_TOKENS = 2**28
BATCH_TOKENS = 2**20
# Of a sequence whose length is its own: only how many are written at once depends on it.
TYPICAL_TOKENS = 2**13

Row = Mapping[str, list[int]]


class DamagedShards(Exception):
    """A folder that does not hold the sequences it should."""


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
    per_shard = max(1, shard_tokens // (layout.length or TYPICAL_TOKENS))
    rows = itertools.islice(rows, layout.number)
    for number in itertools.count():
        shard = itertools.islice(rows, per_shard)
        first = next(shard, None)
        if first is None:
            return
        _write_shard(folder / f"{number:05d}.arrow", itertools.chain([first], shard), layout)


def read_shards(folder: Path, layout: Layout) -> Dataset:
    """The sequences in `folder`, mapped into memory; rows come as NumPy arrays.

    Raises:
        DamagedShards: files are missing, unreadable or cut off.
    """
    try:
        shards = [Dataset.from_file(str(file)) for file in sorted(folder.glob("*.arrow"))]
        found = concatenate_datasets(shards) if shards else None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamagedShards(f"{folder}: {error}") from error
    if found is None or layout.number not in (None, len(found)) or found.features != layout.features:
        raise DamagedShards(f"{folder}: holds other sequences than it should")
    return found.with_format("numpy")


def _write_shard(file: Path, rows: Iterator[Row], layout: Layout) -> None:
    schema = layout.features.arrow_schema
    per_batch = max(1, BATCH_TOKENS // (layout.length or TYPICAL_TOKENS))
    with file.open("wb") as out:
        with pa.ipc.new_stream(out, schema) as writer:
            while batch := list(itertools.islice(rows, per_batch)):
                columns = [_column(batch, name, kind, layout.length) for name, kind in layout.columns.items()]
                writer.write_batch(pa.record_batch(columns, schema=schema))
        # A machine that loses power after the folder was renamed must not leave files of zeros under the final name.
        out.flush()
        os.fsync(out.fileno())


def _column(batch: list[Row], name: str, kind: str, length: int | None) -> pa.Array:
    flat = pa.array(np.concatenate([np.asarray(row[name], dtype=kind) for row in batch]))
    if length is not None:
        return pa.FixedSizeListArray.from_arrays(flat, length)
    ends = np.cumsum([0, *(len(row[name]) for row in batch)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), flat)


MADE_FROM = "made_from.json"
NOTES = "notes.json"


def cache_folder() -> Path:
    """`$PI_LORA_CACHE`, or `pi-lora` in the user's cache folder (`$XDG_CACHE_HOME`, by default `~/.cache`).

    It may be deleted whenever nothing trains: what is missing is made again.
    """
    if own := os.environ.get("PI_LORA_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pi-lora"


def key_of(made_from: Mapping[str, Any]) -> str:
    """SHA-256 of what sequences are made from.

    >>> key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1}) != key_of({"a": 1})
    True
    """
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def cached(
    made_from: Mapping[str, Any],
    layout: Layout,
    make: Callable[[], Iterator[Row]],
    waiting: Callable[[], None],
    notes: Callable[[], Any] | None = None,
) -> Dataset:
    """The sequences that were made from `made_from`: those in the cache, or what `make` yields, put there first.

    Processes that ask for the same sequences at once call `waiting` while the first of them makes them. What `notes`
    gives when all are made, as JSON, is kept beside them for `notes_on`.

    Raises:
        DataError: the cache cannot be written.
    """
    folder = _folder_of(made_from)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock"), waiting):
            try:
                return read_shards(folder, layout)
            except DamagedShards:
                _write_whole(folder, made_from, layout, make(), notes)
                return read_shards(folder, layout)
    except OSError as error:
        raise DataError(
            f"{folder}: the cache cannot be written ({error.strerror or error}); "
            "make room, or name another folder in the environment variable PI_LORA_CACHE"
        ) from error


def notes_on(made_from: Mapping[str, Any]) -> Any:
    """What was noted when the sequences in the cache were made."""
    return json.loads((_folder_of(made_from) / NOTES).read_text(encoding="utf-8"))


def _folder_of(made_from: Mapping[str, Any]) -> Path:
    return cache_folder() / "sequences" / key_of(made_from)


def _write_whole(
    folder: Path,
    made_from: Mapping[str, Any],
    layout: Layout,
    rows: Iterator[Row],
    notes: Callable[[], Any] | None,
) -> None:
    part = folder.with_suffix(".partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        write_shards(part, rows, layout)
        (part / MADE_FROM).write_text(json.dumps(made_from, indent=2) + "\n", encoding="utf-8")
        if notes:
            (part / NOTES).write_text(json.dumps(notes(), indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _locked(file: Path, waiting: Callable[[], None]) -> Iterator[None]:
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waiting()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()

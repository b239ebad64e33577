"""Packed sequences are made once: kept under a key of all that they were made from, whole or not at all."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset
from filelock import FileLock, Timeout

from pi_lora.data.shards import DamagedShards, Layout, Row, read_shards, write_shards
from pi_lora.errors import DataError

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

"""Sequences on disk: an Arrow file, written piece by piece and mapped into memory when read; whole or not at all."""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, List, Value

from pi_lora.recipe.places import cache_folder
from pi_lora.types import Json
from pi_lora.writing import make_once, write_json

ROWS_AT_ONCE = 32
ROWS, ABOUT = "rows.arrow", "about.json"
# Kinds of columns: a list in every row.
INTEGERS, FLAGS = List(Value("int32")), List(Value("bool"))

Row = Mapping[str, Sequence[int]]


def cached(
    made_from: Json, columns: Features, make: Callable[[], Iterator[Row]], notes: Callable[[], Any] = lambda: None
) -> tuple[Dataset, Any]:
    """Return the rows made from `made_from`, NumPy arrays mapped into memory, and the notes on them: those in the
    cache, or what `make` yields and the JSON of `notes` after it. Raise DataError if the cache cannot be written.
    """
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    folder = cache_folder() / "sequences" / key

    def fill(part: Path) -> None:
        number = write_rows(part / ROWS, columns, make())
        write_json(part / ABOUT, {"made_from": made_from, "rows": number, "notes": notes()})

    make_once(folder, lambda: read_rows(folder, columns) is not None, fill)
    found = read_rows(folder, columns)
    assert found is not None, f"{folder}: cannot be read back"
    return found


def read_rows(folder: Path, columns: Features) -> tuple[Dataset, Any] | None:
    """Return the rows in `folder` and the notes on them; None if they are missing, damaged, or have other columns."""
    try:
        rows = Dataset.from_file(str(folder / ROWS))
        about = json.loads((folder / ABOUT).read_bytes())
    except (pa.ArrowException, OSError, ValueError):
        return None
    if (len(rows), rows.features) != (about["rows"], columns):
        return None
    return rows.with_format("numpy"), about["notes"]


def write_rows(file: Path, columns: Features, rows: Iterator[Row]) -> int:
    """Write `rows` into an Arrow file, a few of them in memory at a time, and return their number."""
    number, schema = 0, columns.arrow_schema
    with file.open("wb") as out:
        with pa.ipc.new_stream(out, schema) as writer:
            while batch := list(itertools.islice(rows, ROWS_AT_ONCE)):
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
                number += len(batch)
        # A machine that loses power after the folder was renamed must not leave a file of zeros under its name.
        out.flush()
        os.fsync(out.fileno())
    return number

"""Packed sequences on disk: Arrow files that are written piece by piece, and mapped into memory when read."""

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value, concatenate_datasets

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

"""Safetensors files read a few rows at a time: what is mapped or read whole would count as memory.

The format (its documentation, "Format"): 8 bytes, little-endian, the length of the header; the header, JSON of dtype,
shape and the bytes where each tensor begins and ends; then the data without gaps.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from pi_lora.errors import ModelError

LENGTH_BYTES = 8
# What is worked on at a time, in numbers: 2 MB in float32 stay in a processor's cache, which is twice as fast as 16 MB.
BLOCK = 500_000
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Rows(Protocol):
    """A tensor of which some rows can be had without the others."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""

    @property
    def where(self) -> str:
        """How an error names it."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop`, along the first axis; the caller may write on them."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor where it lies in a file; `offset` is its first byte there."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def where(self) -> str:
        """How an error names it."""
        return f"{self.path}: {self.name}"

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop`, along the first axis; a number by itself counts as one row.

        Raises:
            ModelError: the file ends before them, or cannot be read.
        """
        row = math.prod(self.shape[1:])
        data = torch.empty((stop - start) * row, dtype=self.dtype)
        buffer = data.view(torch.uint8).numpy().data
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset + start * row * self.dtype.itemsize)
                done = 0
                while done < len(buffer) and (count := file.readinto(buffer[done:])):
                    done += count
        except OSError as error:
            raise ModelError(f"{self.where}: cannot be read ({error.strerror})") from None
        if done < len(buffer):
            raise ModelError(f"{self.where}: the file ends within this tensor; it is truncated, download it again")
        return data.view(stop - start, *self.shape[1:]) if self.shape else data

    def whole(self) -> torch.Tensor:
        """All of it."""
        return self.rows(0, self.shape[0] if self.shape else 1).view(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """What a safetensors file holds, in the order of its data.

    Raises:
        ModelError: it is missing, its header is damaged, or its length is not what the header says.
    """
    try:
        with safe_open(path, framework="pt"):
            pass  # the library's own validation: extents, gaps, overlaps, the length of the file
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{path}: truncated, damaged or no safetensors file ({reason}); download it again") from None
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ModelError(f"{path}: {name}: is stored as {entry['dtype']}, which merging does not know")
    begin = LENGTH_BYTES + length
    found = [
        StoredTensor(name, path, DTYPES[each["dtype"]], tuple(each["shape"]), begin + each["data_offsets"][0])
        for name, each in header.items()
    ]
    return {each.name: each for each in sorted(found, key=lambda each: each.offset)}


def spans(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """First and last row (exclusive) of pieces with at most `BLOCK` numbers each, but a whole row at the least.

    >>> list(spans((5, 250_000))), list(spans(())), list(spans((0, 3)))
    ([(0, 2), (2, 4), (4, 5)], [(0, 1)], [])
    """
    rows, row = (shape[0] if shape else 1), math.prod(shape[1:])
    step = max(1, BLOCK // max(1, row))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)

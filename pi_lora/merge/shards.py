"""Safetensors files read a few rows at a time: what is mapped or read whole would count as memory.

The format (its documentation, "Format"): 8 bytes, little-endian, the length of the header; the header, JSON of dtype,
shape and the bytes where each tensor begins and ends; then the data without gaps.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from pi_lora.errors import ModelError
from pi_lora.models.base import BaseModel

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


def base_shards(base: BaseModel) -> list[list[StoredTensor]]:
    """What each file of `base` holds, in the order of its data; nothing but headers is read.

    Raises:
        ModelError: a file is missing or damaged, the index names what is not there, or there is only pickle.
    """
    index = find_file(base, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        single = find_file(base, SAFE_WEIGHTS_NAME)
        if single is None:
            raise ModelError(_no_weights(base))
        return [list(read_header(single).values())]
    placed = _read_index(index)
    return [_shard(base, file, placed) for file in sorted(set(placed.values()))]


def find_file(base: BaseModel, name: str) -> Path | None:
    """A file of `base`, downloaded if the base is on the hub; None where it has no such file."""
    try:
        found = cached_file(
            base.path,
            name,
            revision=base.revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"{base.name}: {name} cannot be had ({str(error).strip().splitlines()[0]})") from None
    return Path(found) if found else None


def _read_index(path: Path) -> dict[str, str]:
    """Which file holds which tensor."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): str(file) for name, file in index["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{path}: is no index of weights; download it again") from None


def _shard(base: BaseModel, file: str, placed: dict[str, str]) -> list[StoredTensor]:
    path = find_file(base, file)
    held = [name for name, where in placed.items() if where == file]
    if path is None:
        raise ModelError(f"{base.name}: {file}: is missing, and with it {held[0]} and others; download it again")
    found = read_header(path)
    if lacking := sorted(set(held) - set(found)):
        raise ModelError(f"{path}: lacks {', '.join(lacking)}, which the index places there; download it again")
    # What the index does not name is not read by transformers either.
    return [tensor for tensor in found.values() if placed.get(tensor.name) == file]


def _no_weights(base: BaseModel) -> str:
    pickled = next((name for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME) if find_file(base, name)), None)
    if pickled:
        return f"{base.name}: {pickled}: pickle can run code and is not read; save the base as safetensors"
    return f"{base.name}: holds neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; name a whole base"


INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Planned:
    """A tensor to be written; `blocks` makes it, a few rows at a time, already in `dtype`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[torch.Tensor]]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def filled_shards(tensors: Iterable[Planned], limit: int) -> list[list[Planned]]:
    """The same tensors in the same order, in shards of at most `limit` bytes; a larger tensor has one for itself."""
    shards: list[list[Planned]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.size > room:
            shards.append([])
            room = limit
        shards[-1].append(tensor)
        room -= tensor.size
    return shards


def write_shards(shards: Sequence[Sequence[Planned]], folder: Path, wrote: Callable[[int], None]) -> None:
    """Write the shards, and an index where there are several; `wrote` is told the bytes as they go.

    Every file is on the disk, not only on its way there, before this returns.

    Raises:
        OSError: the disk is full, or fails.
    """
    names = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    for file, shard in zip(names, shards, strict=True):
        _write(shard, folder / file, wrote)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.size for shard in shards for tensor in shard)},
            "weight_map": {tensor.name: file for file, shard in zip(names, shards, strict=True) for tensor in shard},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write(shard: Sequence[Planned], path: Path, wrote: Callable[[int], None]) -> None:
    # Wider dtypes first, as the library does: what is mapped from the file is then aligned.
    ordered = sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)
    # One block is written while the next one is made: torch and the kernel leave Python alone meanwhile.
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as writer:
        writing = writer.submit(_all_of, file.write, memoryview(_header(ordered)))
        for tensor in ordered:
            written = 0
            for block in tensor.blocks():
                data = block.contiguous().view(-1).view(torch.uint8).numpy().data
                writing.result()
                writing = writer.submit(_all_of, file.write, data)
                written += len(data)
                wrote(len(data))
            assert written == tensor.size, tensor.name
        writing.result()
        os.fsync(file.fileno())


def _header(tensors: Sequence[Planned]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.size
        entries[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (begin, end),
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header


def _all_of(write: Callable[[memoryview], int | None], data: memoryview) -> None:
    """Write all of `data`: an unbuffered write may take a part of it, at most 2 GiB at once."""
    done = 0
    while done < len(data):
        done += write(data[done:]) or 0

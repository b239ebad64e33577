"""Safetensors shards written as their tensors come: the layout is decided from shapes before any weight is read."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from pi_lora.merge.shards import LENGTH_BYTES, NAMES

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

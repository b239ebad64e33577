"""Safetensors files, read and written a few rows at a time: memory does not grow with the model.

Rows are read by offset: the format is 8 bytes with the length of the header, the header, and the tensors. `safe_open`
maps the file, and mapped pages count as resident memory (953 MB instead of 385 for a file of 600 MB); opened for each
block it parses the header as long as it reads the block, and an I/O error on mapped pages kills the process.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME as INDEX
from transformers.utils import SAFE_WEIGHTS_NAME as SINGLE
from transformers.utils import WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from pi_lora.errors import ModelError, first_line
from pi_lora.models.model import Model
from pi_lora.models.stored import LENGTH_BYTES, METADATA, read_index, read_tensors
from pi_lora.types import Progress

PICKLED = "pickle can run code and is not read; save it as safetensors"
# The numbers in a block: 2 MB in float32 stay in a processor's cache, which is twice as fast as 16 MB.
BLOCK = 500_000
DTYPE_NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `offset` is the position of its first byte."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    offset: int

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read rows `start` to `stop` (exclusive) along the first axis; a scalar is one row."""
        data = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        buffer = data.view(-1).view(torch.uint8).numpy().data
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset + start * math.prod(self.shape[1:]) * self.dtype.itemsize)
                count = file.readinto(buffer)
        except OSError as error:
            raise ModelError(f"{self}: cannot be read ({error.strerror})") from None
        if count < len(buffer):
            raise ModelError(f"{self}: the file ends within this tensor; it is truncated, download it again")
        return data

    def blocks(self) -> Iterator[torch.Tensor]:
        """Read all rows, a block at a time."""
        return (self.rows(*span) for span in spans(self.shape))

    def equals(self, other: "StoredTensor") -> bool:
        """Return whether two tensors have the same shape and values."""
        return self.shape == other.shape and all(map(torch.equal, self.blocks(), other.blocks()))

    def whole(self) -> torch.Tensor:
        """Read the whole tensor."""
        return self.rows(0, self.shape[0] if self.shape else 1).view(self.shape)

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"


@dataclass(frozen=True)
class Planned:
    """A tensor to be written; `blocks` makes it, a few rows at a time, in `dtype`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[torch.Tensor]]

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def spans(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield the first and last row (exclusive) of blocks of at most `BLOCK` numbers, or one row if that has more.

    >>> list(spans((5, 250_000))), list(spans(())), list(spans((0, 3)))
    ([(0, 2), (2, 4), (4, 5)], [(0, 1)], [])
    """
    rows = shape[0] if shape else 1
    step = max(1, BLOCK // max(1, math.prod(shape[1:])))
    return ((start, min(rows, start + step)) for start in range(0, rows, step))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, in the order of its data; raise ModelError if it is damaged."""
    try:
        # The library validates extents, gaps, overlaps and the length of the file.
        with safe_open(path, framework="pt"):
            start, entries = read_tensors(path)
    except (SafetensorError, OSError) as error:
        reason = first_line(error)
        raise ModelError(f"{path}: truncated, damaged or not safetensors ({reason}); download it again") from None
    found = {}
    for name, entry in sorted(entries.items(), key=lambda each: each[1].data_offsets):
        if (dtype := str_to_torch_dtype.get(entry.dtype)) is None:
            raise ModelError(f"{path}: {name}: is stored as {entry.dtype}, which cannot be merged")
        found[name] = StoredTensor(name, dtype, tuple(entry.shape), path, start + entry.data_offsets[0])
    return found


def base_shards(base: Model) -> list[list[StoredTensor]]:
    """Return the tensors of each weight file of `base`, in the order of its data; only headers are read. Raise
    ModelError if a file is missing or damaged, lacks what the index places there, or the weights are pickled.
    """
    if (index := base.file(INDEX)) is None:
        if single := base.file(SINGLE):
            return [list(read_header(single).values())]
        if pickled := [name for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME) if base.file(name)]:
            raise ModelError(f"{base.base}: {pickled[0]}: {PICKLED}")
        raise ModelError(f"{base.base}: has neither {SINGLE} nor {INDEX}; name a base with its weights")
    placed: dict[str, set[str]] = defaultdict(set)
    for name, file in read_index(index).items():
        placed[file].add(name)
    shards = []
    for file, expected in sorted(placed.items()):
        if (path := base.file(file)) is None:
            raise ModelError(f"{base.base}: {file}: is missing (it holds {min(expected)}); download it again")
        found = read_header(path)
        if lacking := sorted(expected - found.keys()):
            raise ModelError(f"{path}: lacks {', '.join(lacking)}, which the index places there; download it again")
        # transformers does not read what the index leaves out either.
        shards.append([tensor for tensor in found.values() if tensor.name in expected])
    return shards


def filled_shards(tensors: Iterable[Planned], limit: int) -> list[list[Planned]]:
    """Divide tensors, in their order, into shards of at most `limit` bytes; a larger tensor gets its own shard."""
    shards: list[list[Planned]] = []
    for tensor in tensors:
        if not shards or sum(each.size for each in shards[-1]) + tensor.size > limit:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def write_shards(shards: Sequence[Sequence[Planned]], folder: Path, progress: Progress) -> None:
    """Write the shards to disk (fsync), and an index if there are several, or raise OSError; `progress` is in bytes."""
    total, done, count = sum(tensor.size for shard in shards for tensor in shard), 0, len(shards)
    weight_map: dict[str, str] = {}
    # Blocks are too small to share: on a busy machine, threads that wait for each other took ten times as long.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else SINGLE
            weight_map |= {tensor.name: file for tensor in shard}
            for size in _write(shard, folder / file):
                done += size
                progress(done, total, "writing")
    finally:
        torch.set_num_threads(threads)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write(shard: Sequence[Planned], path: Path) -> Iterator[int]:
    """Write one file and yield the bytes of each block; `safetensors` can only write tensors that are all in memory."""
    # Wider dtypes first, as the library does, which aligns what is mapped from the file.
    ordered = sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)
    entries: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for tensor in ordered:
        place = (end, end := end + tensor.size)
        entries[tensor.name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": place}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    # One block is written while the next is made: torch and the kernel release Python's lock meanwhile.
    with path.open("wb") as file, ThreadPoolExecutor(1) as writer:
        writing = writer.submit(file.write, len(header).to_bytes(LENGTH_BYTES, "little") + header)
        for tensor in ordered:
            written = 0
            for block in tensor.blocks():
                data = block.contiguous().view(-1).view(torch.uint8).numpy().data
                writing.result()
                writing = writer.submit(file.write, data)
                written += len(data)
                yield len(data)
            assert written == tensor.size, tensor.name
        writing.result()
        file.flush()
        os.fsync(file.fileno())

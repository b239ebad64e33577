"""Tensors in safetensors files, read a few rows at a time: memory does not grow with the model.

Rows are read by offset: the format is 8 bytes with the length of the header, the header, and the tensors. `safe_open`
maps the file, and mapped pages count as resident memory (953 MB instead of 385 for a file of 600 MB); opened for each
block it parses the header as long as it reads the block, and an I/O error on mapped pages kills the process.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from pi_lora.errors import ModelError
from pi_lora.models.files import read_index, read_tensors

# The numbers in a block: 2 MB in float32 stay in a processor's cache.
BLOCK = 500_000
# As the format names them.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


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
        row = self.shape[1:]
        size = math.prod(row) * self.dtype.itemsize
        data = np.fromfile(self.path, np.uint8, (stop - start) * size, offset=self.offset + start * size)
        return torch.from_numpy(data).view(self.dtype).view(stop - start, *row)

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield the tensor, a few rows at a time."""
        return (self.rows(start, stop) for start, stop in spans(self.shape))

    def whole(self) -> torch.Tensor:
        """Read the whole tensor."""
        return self.rows(0, self.shape[0])


def spans(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield the first and last row (exclusive) of blocks of at most `BLOCK` numbers, or one row if that has more.

    >>> list(spans((5, 250_000))), list(spans(())), list(spans((0, 3)))
    ([(0, 2), (2, 4), (4, 5)], [(0, 1)], [])
    """
    rows = shape[0] if shape else 1
    step = max(1, BLOCK // max(1, math.prod(shape[1:])))
    return ((start, min(rows, start + step)) for start in range(0, rows, step))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name; raise ModelError if it is damaged."""
    start, entries = read_tensors(path)
    if other := {entry.dtype for entry in entries.values()} - DTYPES.keys():
        raise ModelError(f"{path}: stores tensors as {', '.join(other)}, which cannot be merged; use the model itself")
    return {
        name: StoredTensor(name, DTYPES[entry.dtype], tuple(entry.shape), path, start + entry.data_offsets[0])
        for name, entry in entries.items()
    }


def read_weights(model: str, find: Callable[[str], Path | None]) -> dict[str, StoredTensor]:
    """Return the tensors of `model` by name, in the order of its files; only headers are read. `find` returns the path
    of a file by name, or None. Raise ModelError if a file is missing or damaged, or lacks what the index places there.
    """
    if index := find(SAFE_WEIGHTS_INDEX_NAME):
        files = read_index(index)
    elif single := find(SAFE_WEIGHTS_NAME):
        files = dict.fromkeys(read_header(single), SAFE_WEIGHTS_NAME)
    else:
        raise ModelError(
            f"{model}: has no {SAFE_WEIGHTS_NAME} (pickle can run code and is not read); name another base"
        )
    weights: dict[str, StoredTensor] = {}
    for file in sorted(set(files.values())):
        # transformers does not read what the index leaves out either.
        names = {name for name, holder in files.items() if holder == file}
        if (path := find(file)) is None:
            raise ModelError(f"{model}: {file}: is missing (it holds {min(names)}); download it again")
        tensors = read_header(path)
        if lacking := names - tensors.keys():
            raise ModelError(f"{path}: lacks {min(lacking)}, which the index places there; download it again")
        weights |= {name: tensor for name, tensor in tensors.items() if name in names}
    return weights

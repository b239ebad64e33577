"""Weights in safetensors files: their headers, tensors read a few rows at a time, and a digest of all of them.

Rows are read by offset: the format is 8 bytes with the length of the header, the header, and the tensors. `safe_open`
maps the file, and mapped pages count as resident memory (953 MB instead of 385 for a file of 600 MB); opened for each
block it parses the header as long as it reads the block, and an I/O error on mapped pages kills the process.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from pi_lora.errors import ModelError, first_line
from pi_lora.models.files import find_file
from pi_lora.storage import digest_of, read_json, write_json

# The numbers in a block: 2 MB in float32 stay in the cache of a processor.
BLOCK = 500_000
# The dtypes by their names in the format.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Old checkpoints store the unscaled frequencies of their rope; every reader computes them from the config.
COMPUTED = "rotary_emb.inv_freq"
# Bytes read of each tensor for a digest, at the start, the middle and the end: other weights differ everywhere.
SAMPLE_BYTES = 4096
# Of the format (https://huggingface.co/docs/safetensors): the bytes at the start with the length of the header, and the
# entry of the header that is no tensor.
LENGTH_BYTES, METADATA = 8, "__metadata__"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `offset` is the position of its first byte."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read rows `start` to `stop` (exclusive) along the first axis; a scalar is one row."""
        row_shape = self.shape[1:]
        row_bytes = math.prod(row_shape) * self.dtype.itemsize
        data = self._read(start * row_bytes, stop * row_bytes)
        numbers = torch.from_numpy(data).view(self.dtype)
        return numbers.view(stop - start, *row_shape)

    def _read(self, start: int, stop: int) -> "np.ndarray[Any, Any]":
        """Read bytes `start` to `stop` (exclusive) of the tensor, or as many as there are."""
        return np.fromfile(
            self.path,
            dtype=np.uint8,
            count=min(stop, self.size) - start,
            offset=self.offset + start,
        )

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield the tensor, a few rows at a time."""
        matrix = self.as_matrix()
        return (matrix.rows(start, stop) for start, stop in spans(matrix.shape))

    def as_matrix(self) -> "StoredTensor":
        """Return a stack of matrices as one matrix, and any other tensor as it is."""
        if len(self.shape) < 3:
            return self
        *others, columns = self.shape
        return replace(self, shape=(math.prod(others), columns))

    def equals(self, other: "StoredTensor") -> bool:
        """Whether another tensor has the same numbers."""
        if self.shape != other.shape:
            return False
        return all(map(torch.equal, self.blocks(), other.blocks()))

    def whole(self) -> torch.Tensor:
        """Read the whole tensor."""
        rows = self.shape[0] if self.shape else 1
        return self.rows(0, rows).view(self.shape)

    def digest(self) -> str:
        """Return a SHA-256 of sampled bytes."""
        middle = self.size // 2
        last = max(0, self.size - SAMPLE_BYTES)
        digest = hashlib.sha256()
        for start in sorted({0, middle, last}):
            sample = self._read(start, start + SAMPLE_BYTES)
            digest.update(sample.tobytes())
        return digest.hexdigest()


@lru_cache(maxsize=4)
def keep(read: Callable[..., torch.Tensor], *arguments: int) -> torch.Tensor:
    """Return what `read` returns, and keep it for the next callers; whoever writes files empties this cache."""
    return read(*arguments)


def spans(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield the first and last row (exclusive) of blocks of at most `BLOCK` numbers, or of one row if it has more.

    >>> list(spans((5, 250_000))), list(spans(())), list(spans((0, 3)))
    ([(0, 2), (2, 4), (4, 5)], [(0, 1)], [])
    """
    rows = shape[0] if shape else 1
    row_numbers = max(1, math.prod(shape[1:]))
    step = max(1, BLOCK // row_numbers)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name; raise ModelError if it is damaged."""
    try:
        # The library validates extents, gaps, overlaps and the length of the file.
        with safe_open(path, framework="numpy"), path.open("rb") as content:
            size = int.from_bytes(content.read(LENGTH_BYTES), "little")
            header = json.loads(content.read(size))
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path}: missing, damaged or not safetensors ({first_line(error)}); download it again"
        ) from None
    header.pop(METADATA, None)
    other_dtypes = {entry["dtype"] for entry in header.values()} - DTYPES.keys()
    if other_dtypes:
        names = ", ".join(other_dtypes)
        raise ModelError(f"{path}: stores tensors as {names}, which are not read; name a model in bfloat16")
    tensors = {}
    for name, entry in header.items():
        first_byte, _ = entry["data_offsets"]
        tensors[name] = StoredTensor(
            name=name,
            dtype=DTYPES[entry["dtype"]],
            shape=tuple(entry["shape"]),
            path=path,
            offset=LENGTH_BYTES + size + first_byte,
        )
    return tensors


def read_weights(model: str, find: Callable[[str], Path | None]) -> dict[str, StoredTensor]:
    """Return the tensors of `model` by name, in the order of the files; only headers are read.

    `find` returns the path of a file by name, or None. Raise ModelError if a file is missing or damaged, or lacks a
    tensor that the index places there.
    """
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    # As in transformers, a single file counts before an index that was left beside it. The hub is not asked for one.
    single_file = find_file(index.parent, SAFE_WEIGHTS_NAME) if index else find(SAFE_WEIGHTS_NAME)
    if single_file:
        return read_header(single_file)
    if index is None:
        raise ModelError(
            f"{model}: has no {SAFE_WEIGHTS_NAME} (pickle can run code and is not read); name another base"
        )
    weights: dict[str, StoredTensor] = {}
    headers: dict[str, dict[str, StoredTensor]] = {}
    placed = [(file, name) for name, file in read_index(index).items()]
    # Tensors that the index leaves out are not read, as in transformers.
    for file, name in sorted(placed):
        if file not in headers:
            path = find(file)
            if path is None:
                raise ModelError(f"{model}: {file}: is missing (it holds {name}); download it again")
            headers[file] = read_header(path)
        if name not in headers[file]:
            raise ModelError(f"{model}: {file}: lacks {name}, which the index places there; download it again")
        weights[name] = headers[file][name]
    return weights


class _Index(BaseModel):
    """The fields of an index that are read; there are others."""

    weight_map: dict[str, Annotated[str, Field(pattern=r"^[\w.-]+\.safetensors$")]] = Field(min_length=1)


def read_index(file: Path) -> dict[str, str]:
    """Return the file of every tensor of a model, by name; raise ModelError if the index is damaged."""
    return read_json(file, _Index, "download it again").weight_map


def write_index(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write the index of the tensors of a folder."""
    total_size = sum(tensor.size for tensor in tensors.values())
    weight_map = {name: tensor.path.name for name, tensor in tensors.items()}
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    write_json(folder / SAFE_WEIGHTS_INDEX_NAME, index)


def weights_digest(tensors: Mapping[str, StoredTensor]) -> str:
    """Return a SHA-256 of the names, types, shapes and sampled bytes of tensors, independent of their files."""
    digests = []
    for name, tensor in sorted(tensors.items()):
        dtype_name = DTYPE_NAMES[tensor.dtype]
        digests.append([name, [dtype_name, tensor.shape, tensor.digest()]])
    return digest_of(digests)


def finite(values: torch.Tensor) -> bool:
    """Return whether all numbers are finite."""
    # A finite sum tells in one pass, but the sum may overflow.
    sum_dtype = torch.float32 if values.dtype == torch.float16 else None
    total = values.sum(dtype=sum_dtype)
    return math.isfinite(total.item()) or bool(values.isfinite().all())


def check_finite(name: str, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ModelError if the model `name` has infinite or NaN weights, also in the scales of NF4 ones."""
    for key, weight in weights:
        state = getattr(weight, "quant_state", None)
        values = weight.detach()
        if state is not None:
            # The mean of the scales, which double quantization subtracts from them, is NaN if one of them is.
            values = state.absmax if state.offset is None else state.offset
        if values.itemsize > 1 and not finite(values):
            raise ModelError(f"{name}: {key} has infinite or NaN values; it is damaged, download or tune it again")

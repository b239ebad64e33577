"""Safetensors files written a block at a time: `safetensors` can only write tensors that are all in memory."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from pi_lora.merging.layout import OutputTensor
from pi_lora.merging.tensors import DTYPES
from pi_lora.models.stored import LENGTH_BYTES, METADATA
from pi_lora.types import Progress
from pi_lora.writing import write_json

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def divide(tensors: Iterable[OutputTensor], limit: int) -> list[list[OutputTensor]]:
    """Divide tensors, in their order, into shards of at most `limit` bytes; a larger tensor gets its own shard."""
    shards: list[list[OutputTensor]] = []
    for tensor in tensors:
        if not shards or sum(other.size for other in shards[-1]) + tensor.size > limit:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def write_shards(shards: Sequence[Sequence[OutputTensor]], folder: Path, progress: Progress) -> None:
    """Write the shards to disk (fsync), and an index if there are several, or raise OSError; `progress` is in bytes."""
    total, done, count = sum(tensor.size for shard in shards for tensor in shard), 0, len(shards)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else SAFE_WEIGHTS_NAME
        weight_map |= {tensor.name: file for tensor in shard}
        for size in _write(shard, folder / file):
            progress(done := done + size, total, "writing")
    if count > 1:
        write_json(folder / SAFE_WEIGHTS_INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write(shard: Sequence[OutputTensor], path: Path) -> Iterator[int]:
    """Write one file and yield the bytes of each block."""
    # Wider dtypes first, as the library does, which aligns what is mapped from the file.
    ordered = sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)
    entries: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for tensor in ordered:
        place = (end, end := end + tensor.size)
        entries[tensor.name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": place}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    # One block is written while the next is made: torch and the kernel release Python's lock meanwhile.
    with path.open("wb") as file, ThreadPoolExecutor(1) as writer:
        writing = writer.submit(file.write, len(header).to_bytes(LENGTH_BYTES, "little") + header)
        for tensor in ordered:
            for block in tensor.blocks():
                writing.result()
                writing = writer.submit(file.write, block.contiguous().view(-1).view(torch.uint8).numpy().data)
                yield block.nbytes
        writing.result()
        file.flush()
        os.fsync(file.fileno())

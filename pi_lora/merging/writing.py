"""Merged tensors, written a few rows at a time: `safetensors` can only write tensors that are all in memory."""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers.utils import SAFE_WEIGHTS_NAME

from pi_lora.merging.deltas import OutputTensor
from pi_lora.models.weights import DTYPE_NAMES, LENGTH_BYTES, METADATA, StoredTensor, keep, read_header, write_index
from pi_lora.types import Progress

# Threads that read, compute and write.
NUM_THREADS = 2
# More than the bytes of a block.
RETAINED_BYTES = 2**23


def in_threads(
    work: Callable[[OutputTensor], object], tensors: Sequence[OutputTensor], *, progress: Progress, note: str
) -> None:
    """Do `work` for all tensors in threads, where torch and the kernel release Python's lock; `progress` is in bytes.

    Blocks are too small to share: on a busy machine, threads of torch that wait for each other took ten times as long.
    """
    total = sum(tensor.size for tensor in tensors)
    done = 0
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # glibc keeps the memory of blocks up to the size of the largest that was freed, and gives larger ones back to the
    # system each time, which took a sixth of a check.
    torch.empty(RETAINED_BYTES, dtype=torch.uint8)
    try:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            results = pool.map(work, tensors)
            for tensor, _ in zip(tensors, results, strict=True):
                done += tensor.size
                progress(done, total, note)
    finally:
        torch.set_num_threads(torch_threads)
        keep.cache_clear()


def write_tensors(tensors: Sequence[OutputTensor], folder: Path, progress: Progress) -> None:
    """Write the tensors to the disk (fsync), and an index if there are several files."""
    stored: dict[str, StoredTensor] = {}
    files = sorted({tensor.file for tensor in tensors})
    for number, file in enumerate(files, start=1):
        name = SAFE_WEIGHTS_NAME
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        shard = [tensor for tensor in tensors if tensor.file == file]
        stored |= _write_header(shard, folder / name)

    def write(tensor: OutputTensor) -> None:
        target = stored[tensor.name]
        with target.path.open("r+b") as out:
            out.seek(target.offset)
            for block in tensor.blocks():
                block_bytes = block.contiguous().view(-1).view(torch.uint8)
                out.write(block_bytes.numpy().data)

    in_threads(
        write,
        tensors,
        progress=progress,
        note="writing",
    )
    for path in {tensor.path for tensor in stored.values()}:
        with path.open("r+b") as out:
            os.fsync(out.fileno())
    if len(files) > 1:
        write_index(folder, stored)


def _write_header(shard: Sequence[OutputTensor], file: Path) -> dict[str, StoredTensor]:
    """Write the header of a file with room for the data, and return the tensors, still unwritten, by name."""
    entries: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    # Wider dtypes first, as the library does, which aligns what is mapped from the file.
    for tensor in sorted(shard, key=lambda tensor: -tensor.dtype.itemsize):
        start = end
        end = start + tensor.size
        entries[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": tensor.source.shape,
            "data_offsets": (start, end),
        }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    length = len(header).to_bytes(LENGTH_BYTES, "little")
    with file.open("wb") as out:
        out.write(length + header)
        out.truncate(out.tell() + end)
    return read_header(file)

"""What computes: the device, its free memory, and whether it is faster in bfloat16."""

import functools
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch

# Autocast converts what it multiplies, so bfloat16 has to be this many times as fast to gain anything.
ENOUGH = 1.2


def device() -> torch.device:
    """Return the accelerator if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_fast_bfloat16() -> bool:
    """Return whether bfloat16 arithmetic is faster than float32: on a GPU with instructions for it (those before Ampere
    emulate it), and on a CPU that has them and is measured to be faster. AVX512-BF16 alone is no proof: an AMD EPYC
    multiplies four times as fast in bfloat16, an Intel Xeon whose AMX is not to be had at half the speed.
    """
    if device().type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return has_bfloat16_instructions() and bfloat16_speed() > ENOUGH


def has_bfloat16_instructions() -> bool:
    """Whether the processor multiplies in bfloat16 (AVX512-BF16 or AMX)."""
    return any(torch.cpu.get_capabilities().get(each) for each in ("avx512_bf16", "amx_bf16"))


@functools.cache
def bfloat16_speed() -> float:
    """Measure how many times as fast as in float32 this processor multiplies matrices in bfloat16: once, in 20 ms.

    The best of twenty short rounds each, in turns and on one thread, is the same beside other work, which would delay
    one of several threads: a run that is resumed has to compute as it did before.
    """
    best = {torch.float32: math.inf, torch.bfloat16: math.inf}
    pairs = {dtype: torch.ones(2, 256, 256, dtype=dtype) for dtype in best}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(20):
        for dtype, (left, right) in pairs.items():
            begin = time.perf_counter()
            left @ right
            best[dtype] = min(best[dtype], time.perf_counter() - begin)
    torch.set_num_threads(threads)
    return best[torch.float32] / best[torch.bfloat16]


def dtype_named(name: str) -> torch.dtype:
    """Return torch's dtype of that name, such as `bfloat16`."""
    found: torch.dtype = getattr(torch, name)
    return found


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return the bytes of memory that this process may use, in all and still free: the machine's, or less where a
    cgroup limits it, as containers and batch systems do. `root` has the system's files.
    """
    machine = psutil.virtual_memory()
    limits = [(machine.total, machine.available), *_cgroup_limits(root)]
    return min(total for total, _ in limits), max(0, min(free for _, free in limits))


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each cgroup that this process is in, and what is free of it; the cache of files is free."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        limit, used, cache = "memory.max", "memory.current", "inactive_file"
        if controllers == "memory":  # version 1
            limit, used, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        mounted = root / "sys/fs/cgroup" / controllers
        own_group = mounted / path.lstrip("/")
        # A limit may be set above. In a container, the path may be the host's, and the mounted folder its own group.
        for folder in (own_group, *own_group.parents):
            with suppress(OSError, ValueError, KeyError):  # no such file, or no limit ("max")
                most = int((folder / limit).read_text())
                counts = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                yield most, most - int((folder / used).read_text()) + int(counts[cache])


def free_memory(place: torch.device) -> int:
    """Return the bytes that this process can still take on a device; on a GPU also those that torch holds unused."""
    if place.type == "cpu":
        return host_memory()[1]
    free, _ = torch.cuda.mem_get_info(place)
    return free + torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)

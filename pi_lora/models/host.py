"""The host: its memory, and whether its processor has bfloat16 instructions; without torch, which takes seconds."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil


def has_bfloat16_instructions(root: Path = Path("/")) -> bool:
    """Whether the processor multiplies in bfloat16 (AVX512-BF16 or AMX), as Linux says; False on other systems."""
    processor = root / "proc/cpuinfo"
    return processor.is_file() and re.search("avx512_bf16|amx_bf16", processor.read_text()) is not None


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return the bytes of memory that this process may use, in all and still free: the machine's, or less where a
    cgroup limits it, as containers and batch systems do. `root` has the system's files.
    """
    machine = psutil.virtual_memory()
    limits = [(machine.total, machine.available), *_cgroup_limits(root)]
    return min(total for total, _ in limits), max(0, min(free for _, free in limits))


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limits of the cgroup that this process is in, and what is free of them; the cache of files is free."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        own_group = root / "sys/fs/cgroup" / line.split(":", 2)[2].lstrip("/")
        # A limit may be set above. In a container, the path may be the host's, and the mounted folder its own group.
        for folder in (own_group, *own_group.parents):
            with suppress(OSError, ValueError, KeyError):  # no such file, or no limit ("max")
                most = int((folder / "memory.max").read_text())
                counts = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                yield most, most - int((folder / "memory.current").read_text()) + int(counts["inactive_file"])

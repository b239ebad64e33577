"""Memory and processor of the host, without torch, whose import takes seconds."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil


def has_bfloat16_instructions() -> bool:
    """Whether the processor multiplies in bfloat16 (AVX512-BF16 or AMX), as Linux says; False on other systems."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return False
    return re.search("avx512_bf16|amx_bf16", cpuinfo.read_text()) is not None


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return the bytes of memory that this process may use, and how many of them are free.

    They are those of the machine, or fewer in a cgroup with a limit, as in containers and batch systems. `root` has the
    files of the system.
    """
    machine = psutil.virtual_memory()
    limits = [(machine.total, machine.available), *_cgroup_limits(root)]
    lowest_total = min(total for total, _ in limits)
    lowest_free = min(free for _, free in limits)
    return lowest_total, max(0, lowest_free)


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and free bytes of the cgroups of this process; the cache of files counts as free."""
    cgroup_file = root / "proc/self/cgroup"
    if not cgroup_file.is_file():
        return
    for line in cgroup_file.read_text().splitlines():
        _, _, path = line.split(":", 2)
        group = root / "sys/fs/cgroup" / path.lstrip("/")
        # A parent may have the limit. In a container the path may be that on the host, and the mount the group.
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError, KeyError):  # no such file, or no limit ("max")
                limit = int((folder / "memory.max").read_text())
                used = int((folder / "memory.current").read_text())
                rows = (folder / "memory.stat").read_text().splitlines()
                counts = dict(row.split() for row in rows)
                yield limit, limit - used + int(counts["inactive_file"])

"""The memory of the host, under the limits of containers and batch systems."""

from pathlib import Path

import psutil
import pytest

from pi_lora.models.device import host_memory

GIB = 2**30
NAMES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def limited(root: Path, version: int, group: str, limits: dict[str, str]) -> None:
    """Write the files of a system whose process is in `group`: limits by folder, of which 3 GiB are used, 1 of them by
    the cache of files.
    """
    mounted = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    (root / "proc/self").mkdir(parents=True)
    line = f"4:memory:{group}\n3:cpu:/\n" if version == 1 else f"0::{group}\n"
    (root / "proc/self/cgroup").write_text(line)
    limit_file, used_file, cache = NAMES[version]
    for folder, limit in limits.items():
        place = mounted / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / limit_file).write_text(f"{limit}\n")
        (place / used_file).write_text(f"{3 * GIB}\n")
        (place / "memory.stat").write_text(f"anon 5\n{cache} {GIB}\n")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("group", "limits"),
    [
        ("/", {"": str(4 * GIB)}),
        ("/job/step", {"job/step": "max", "job": str(4 * GIB), "": "max"}),
        # In a container the path is the host's, whose folders are not there.
        ("/docker/0123", {"": str(4 * GIB)}),
    ],
)
def test_a_limit_is_the_memory_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, group: str, limits: dict[str, str]
) -> None:
    machine = type(psutil.virtual_memory())
    sizes = dict.fromkeys(machine._fields, 0) | {"total": 64 * GIB, "available": 32 * GIB}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine(**sizes))
    none = {1: str(2**63 - 4096), 2: "max"}[version]
    limited(tmp_path, version, group, {folder: none if limit == "max" else limit for folder, limit in limits.items()})
    assert host_memory(tmp_path) == (4 * GIB, 2 * GIB)

"""Main memory that this process may use, on this machine and in its container."""

from collections.abc import Iterator
from pathlib import Path

import psutil

_RESERVED_SHARE = 0.1  # of all memory
_CGROUPS = Path("/sys/fs/cgroup")


def free_memory() -> tuple[int, int]:
    """Bytes of main memory that are free for this process, and of all memory; both within its cgroups."""
    machine = psutil.virtual_memory()
    free, total = int(machine.available), int(machine.total)
    for used, limit in _group_limits():
        free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


def has_room(needed_bytes: int) -> bool:
    """Whether so many bytes fit into main memory, and leave a tenth of it to other programs."""
    free, total = free_memory()
    return needed_bytes <= free - total * _RESERVED_SHARE


def _group_limits() -> Iterator[tuple[int, int]]:
    """Used bytes that cannot be reclaimed, and the limit, of each control group that this process is in.

    https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
    """
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers not in ("", "memory"):
            continue
        root = _CGROUPS / controllers
        if controllers:  # cgroup v1
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached_name = "total_inactive_file"
        else:
            limit_name, used_name, cached_name = "memory.max", "memory.current", "inactive_file"
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
            if limit.isdigit() and used.isdigit():  # not 'max', and the files exist
                reclaimable = 0
                for entry in _read(folder / "memory.stat").splitlines():
                    name, value = entry.split()
                    if name == cached_name:
                        reclaimable = int(value)
                        break
                yield int(used) - reclaimable, int(limit)
            if folder == root:
                break


def _read(path: Path) -> str:
    """Read a text file; empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""

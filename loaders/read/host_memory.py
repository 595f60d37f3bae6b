"""Memory that the processes of one user on one host share, and that is freed with the last of them.

It is a memory file without a name on any disk (memfd_create): sparse until it is written to, and freed by the
system when no process has it open or mapped any more, however those processes ended. Nothing is left behind
by `kill -9`. A process finds the memory among the files that the user's other processes have open
(/proc/PID/fd), and opens it there. A list of the memories on a disk would need a folder that all processes
find, and would be wrong after each kill.

Processes that start at the same time make or find the memory one after another. They lock (flock) the file
that stands for the processes that see each other, /proc/self/ns/pid: it is on no disk, and the lock ends with
its holder. Seals keep every process from making the memory shorter, so that none that has mapped it gets a
SIGBUS.

https://man7.org/linux/man-pages/man2/memfd_create.2.html
"""

import errno
import glob
import mmap
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from precache.storage.locks import lock

_PREFIX = "precache-"  # of the names of memory files
_LOCK_S, _POLL_S = 20.0, 0.01
RESERVED_SHARE = 0.1
"""Share of all memory that stays free for other programs."""
_CGROUPS = Path("/sys/fs/cgroup")


class HostMemory:
    """Main memory that this user's processes share, or that this process has for itself.

    Args:
        mapped: the map of the memory.
        file: the memory file that is mapped; None: the memory is of this process alone.

    Attributes:
        content: all of the memory, uint8 [bytes].
    """

    def __init__(self, mapped: mmap.mmap, file: FileIO | None = None) -> None:
        self.content = np.frombuffer(mapped, np.uint8)
        self._file = file
        if file is not None:
            weakref.finalize(self, file.close)  # in case nobody closes the loader

    def write(self, start: int, pixels: npt.NDArray[np.uint8]) -> None:
        """Write contiguous `pixels` from the byte `start` on; several threads may write at a time.

        Raises:
            OSError: the system has no memory left for them.
        """
        if self._file is None:
            np.copyto(self.content[start : start + pixels.nbytes], pixels.reshape(-1))
            return
        # Not through the map, where the first write to each page costs a page fault, and zeroing the page.
        rest = memoryview(pixels.data).cast("B")
        while rest:
            written = os.pwrite(self._file.fileno(), rest, start)
            start, rest = start + written, rest[written:]

    def close(self) -> None:
        """Release the memory; arrays that show a part of `content` keep it alive."""
        self.content = np.empty(0, np.uint8)
        if self._file is not None:
            self._file.close()


def share_memory(name: str, choose_bytes: Callable[[int], int]) -> HostMemory | None:
    """Open the memory called `name` of this user's processes; if there is none, make it, filled with zeros.

    Args:
        name: letters and digits, at most 200.
        choose_bytes: returns the bytes of a new memory, given how many bytes other memories of this kind may
            still use of what is free. 0: make none, and return None.

    Raises:
        OSError: this system has no memory files, or not as much memory.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "this system has no memory files")
    unused_bytes = {}  # of each memory: those that it may still take from what is free
    with _lock():
        for path, file_name, status in _open_memory_files():
            # Without a size its maker was killed meanwhile, and it is of no use.
            if file_name == _PREFIX + name and status.st_size:
                with suppress(OSError):  # the last process that had it open has just ended
                    return _map(FileIO(path, "r+"))
            unused_bytes[status.st_dev, status.st_ino] = max(0, status.st_size - status.st_blocks * 512)
        size = choose_bytes(sum(unused_bytes.values()))
        if not size:
            return None
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        file = FileIO(os.memfd_create(_PREFIX + name, flags), "r+")
        try:
            os.fchmod(file.fileno(), 0o600)
            os.ftruncate(file.fileno(), size)
        except BaseException:
            file.close()
            raise
        return _map(file)


@contextmanager
def _lock() -> Iterator[None]:
    """Run the block in one process at a time, of all those that see each other.

    Raises:
        TimeoutError: another process has held the lock for too long.
    """
    import fcntl

    with open("/proc/self/ns/pid", "rb", buffering=0) as file:
        deadline_s = time.monotonic() + _LOCK_S
        while not lock(file.fileno()):
            if time.monotonic() >= deadline_s:
                raise TimeoutError(errno.ETIMEDOUT, f"its lock is held for {_LOCK_S:.0f} s")
            time.sleep(_POLL_S)
        yield
        # Explicitly: a process that was forked meanwhile has the file open, too, and would keep the lock.
        fcntl.flock(file, fcntl.LOCK_UN)


def _open_memory_files() -> Iterator[tuple[str, str, os.stat_result]]:
    """Path, name and status of the memory files that this user's processes have open; for each process."""
    for path in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # closed meanwhile
            target = os.readlink(path)
            if target.startswith(f"/memfd:{_PREFIX}"):
                status = os.stat(path)
                if status.st_uid == os.geteuid():
                    yield path, target.removeprefix("/memfd:").split(" ")[0], status


def _map(file: FileIO) -> HostMemory:
    """Map all of a memory file, and seal its size; the file is closed if that fails."""
    import fcntl

    try:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return HostMemory(mmap.mmap(file.fileno(), 0), file)
    except BaseException:
        file.close()
        raise


def free_memory() -> tuple[int, int]:
    """Bytes of main memory that are free for this process, and of all memory; both within its cgroups."""
    machine = psutil.virtual_memory()
    free, total = int(machine.available), int(machine.total)
    for used, limit in _group_limits():
        free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


def has_room(needed_bytes: int) -> bool:
    """Whether so many bytes fit into main memory, beside `RESERVED_SHARE`."""
    free, total = free_memory()
    return needed_bytes <= free - total * RESERVED_SHARE


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

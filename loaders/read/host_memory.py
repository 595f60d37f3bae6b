"""Memory that the processes of one user on one host share, and that goes with the last of them.

It is a memory file without a name (memfd_create), sparse until it is written to, which the system frees when
nobody has it open or mapped, however those processes end: nothing is left behind by `kill -9`. Who wants to
join looks for it among the files that the user's processes have open (/proc/PID/fd), and opens it there. A
list of who has it, on a disk, would need a folder that all of them find, and be wrong after each kill.
Two that start at a time do it one after the other: a lock (flock) on what stands for "all processes that I
see", /proc/self/ns/pid, which is no file on any disk and is given up with its holder. Seals keep everybody
from making the memory shorter, so that nobody who has mapped it gets a SIGBUS.

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

_PREFIX = "precache-"
_LOCK_S, _POLL_S = 20.0, 0.01
RESERVED_SHARE = 0.1
"""Share of all memory that is left free for others."""
_CGROUPS = Path("/sys/fs/cgroup")


class HostMemory:
    """Main memory that this user's processes share, or that this process has for itself.

    Attributes:
        content: uint8 [bytes], which shows all of it.
    """

    def __init__(self, mapped: mmap.mmap, file: FileIO | None = None) -> None:
        """`file`: the memory file that is mapped; None: memory of this process."""
        self.content = np.frombuffer(mapped, np.uint8)
        self._file = file
        if file is not None:
            weakref.finalize(self, file.close)  # of a loader that nobody closes, too

    def write(self, start: int, pixels: npt.NDArray[np.uint8]) -> None:
        """Put contiguous `pixels` there, from the byte `start` on; several threads may do so at a time.

        Raises:
            OSError: the system has no more memory for it.
        """
        if self._file is None:
            np.copyto(self.content[start : start + pixels.nbytes], pixels.reshape(-1))
            return
        # not through the map, where each page that is touched first is a fault, and zeros before
        rest = memoryview(pixels.data).cast("B")
        while rest:
            written = os.pwrite(self._file.fileno(), rest, start)
            start, rest = start + written, rest[written:]

    def close(self) -> None:
        """Give it back; what shows a part of `content` keeps it."""
        self.content = np.empty(0, np.uint8)
        if self._file is not None:
            self._file.close()


def share_memory(name: str, size_of: Callable[[int], int]) -> HostMemory | None:
    """The memory called `name` of this user's processes, made if there is none: zeros at first.

    Args:
        name: letters and digits, at most 200.
        size_of: how many bytes it is to have, given how many are promised to other memory of this kind, but
            not yet used; called where it is made. 0: nothing is made, and None is returned.

    Raises:
        OSError: this system has no such memory, or does not give as much.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "this system has no memory files")
    promised = {}
    with _lock():
        for path, found, status in _find():
            if found == _PREFIX + name and status.st_size:  # else who made it was killed meanwhile
                with suppress(OSError):  # gone since it was found
                    return _map(FileIO(path, "r+"))
            promised[status.st_dev, status.st_ino] = max(0, status.st_size - status.st_blocks * 512)
        size = size_of(sum(promised.values()))
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
    """One at a time of all processes that see each other; TimeoutError if somebody holds it for long."""
    import fcntl

    with open("/proc/self/ns/pid", "rb", buffering=0) as file:
        deadline_s = time.monotonic() + _LOCK_S
        while not lock(file.fileno()):
            if time.monotonic() >= deadline_s:
                raise TimeoutError(errno.ETIMEDOUT, f"its lock is held for {_LOCK_S:.0f} s")
            time.sleep(_POLL_S)
        yield
        fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile may have it open, too


def _find() -> Iterator[tuple[str, str, os.stat_result]]:
    """Path, name and status of the memory that this user's processes have open; some of it several times."""
    for path in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # it has been closed
            target = os.readlink(path)
            if target.startswith(f"/memfd:{_PREFIX}"):
                status = os.stat(path)
                if status.st_uid == os.geteuid():
                    yield path, target.removeprefix("/memfd:").split(" ")[0], status


def _map(file: FileIO) -> HostMemory:
    """All of a memory file, which nobody can make shorter from now on; closed if that fails."""
    import fcntl

    try:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return HostMemory(mmap.mmap(file.fileno(), 0), file)
    except BaseException:
        file.close()
        raise


def free_memory() -> tuple[int, int]:
    """Bytes of main memory that are free for this process, and of all memory, by its control groups, too."""
    machine = psutil.virtual_memory()
    free, total = int(machine.available), int(machine.total)
    for used, limit in _group_limits():
        free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


def has_room(needed_bytes: int) -> bool:
    """Whether so many bytes can stay in memory, beside what is left free for others."""
    free, total = free_memory()
    return needed_bytes <= free - total * RESERVED_SHARE


def _group_limits() -> Iterator[tuple[int, int]]:
    """Of each control group that this process is in: bytes that cannot be had back, and its limit.

    https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
    """
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers not in ("", "memory"):
            continue
        root = _CGROUPS / controllers
        limit_name, used_name, cached_name = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else ("memory.max", "memory.current", "inactive_file")
        )
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
            if limit.isdigit() and used.isdigit():  # else 'max', or no such file
                columns = (entry.split() for entry in _read(folder / "memory.stat").splitlines())
                cached = next((int(value) for name, value in columns if name == cached_name), 0)
                yield int(used) - cached, int(limit)
            if folder == root:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

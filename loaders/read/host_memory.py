"""Memory that the processes of one user on one host share, and that goes with the last of them.

It is a memory file without a name (memfd_create), sparse until it is written to, which the system frees when
nobody has it open or mapped, however those processes end: nothing is left behind by `kill -9`. Who wants to
join looks for it among the files that the user's processes have open (/proc/PID/fd), and opens it there. Two
that start at a time do it one after the other: a lock (flock) on what stands for "all processes that I see",
/proc/self/ns/pid, which is no file on any disk and is given up with its holder. Seals keep everybody from
making the memory shorter, so that nobody who has mapped it gets a SIGBUS.

What is opened here is a file object from the start, which is closed when nobody has it: Ctrl-C comes between
any two steps, also between `os.open` and the `try` behind it.

https://man7.org/linux/man-pages/man2/memfd_create.2.html
"""

import errno
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import psutil

_PREFIX = "precache-"
HEADER_BYTES = 4096
_LOCK_S, _POLL_S = 20.0, 0.01
_NO_EXEC = 0x8  # MFD_NOEXEC_SEAL, from Linux 6.3 on, where some systems insist on it
_CGROUPS = Path("/sys/fs/cgroup")


class Memory(NamedTuple):
    """Memory that is mapped.

    Attributes:
        content: of `HEADER_BYTES`, zeros to who made it but for a few, and as many as were asked for.
        most_bytes: what `most_bytes` gave to who made it.
        joined: whether it was there before.
    """

    content: mmap.mmap
    most_bytes: int
    joined: bool


class _Found(NamedTuple):
    path: str
    name: str
    status: os.stat_result


def private_memory(size: int) -> mmap.mmap:
    """Memory of this process alone, with a header, too."""
    return mmap.mmap(-1, HEADER_BYTES + size)


def share_memory(name: str, most_bytes: Callable[[int], int], size_of: Callable[[int], int]) -> Memory | None:
    """The memory called `name` of this user's processes, made if there is none.

    Args:
        name: letters and digits, at most 200.
        most_bytes: how many bytes may be used, given how many are promised to other memory of this kind, but
            not yet used; called where the memory is made.
        size_of: of the memory, given what `most_bytes` said; 0: None is returned, and nothing is made.

    Raises:
        OSError: this system has no such memory, or does not give as much.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "this system has no memory files")
    with _lock():
        found = list(_find())
        for memory in found:
            if memory.name == _PREFIX + name and (joined := _join(memory.path, size_of)) is not None:
                return joined
        unused = {
            (f.status.st_dev, f.status.st_ino): max(0, f.status.st_size - f.status.st_blocks * 512)
            for f in found
        }
        most = most_bytes(sum(unused.values()))
        size = size_of(most)
        return _make(name, most, size) if size else None


@contextmanager
def _lock() -> Iterator[None]:
    """One at a time of all processes that see each other; TimeoutError if somebody holds it for long."""
    import fcntl

    with open("/proc/self/ns/pid", "rb", buffering=0) as file:
        deadline_s = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise TimeoutError(errno.ETIMEDOUT, f"its lock is held for {_LOCK_S:.0f} s") from None
                time.sleep(_POLL_S)
        yield
        fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile may have it open, too


def _find() -> Iterator[_Found]:
    """The memory that this user's processes have open; some of it several times."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is another user's
            for number in os.listdir(f"/proc/{process}/fd"):
                path = f"/proc/{process}/fd/{number}"
                with suppress(OSError):
                    target = os.readlink(path)
                    if target.startswith(f"/memfd:{_PREFIX}"):
                        status = os.stat(path)
                        if status.st_uid == os.geteuid():
                            yield _Found(path, target.removeprefix("/memfd:").split(" ")[0], status)


def _join(path: str, size_of: Callable[[int], int]) -> Memory | None:
    """The memory open at `path`; None if it has gone meanwhile, or was never finished."""
    import fcntl

    try:
        with open(path, "r+b", buffering=0) as file:  # the mapping has it open, too
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                return None  # who made it was killed before it was complete
            size = os.fstat(file.fileno()).st_size
            said = json.loads(os.pread(file.fileno(), HEADER_BYTES, 0).rstrip(b"\0"))
            if size != HEADER_BYTES + size_of(said["most_bytes"]):
                return None
            return Memory(mmap.mmap(file.fileno(), size), said["most_bytes"], joined=True)
    except (OSError, ValueError, KeyError, TypeError):  # it is another's that took the name
        return None


def _make(name: str, most_bytes: int, size: int) -> Memory:
    import fcntl

    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        opened = _create(_PREFIX + name, flags | _NO_EXEC)
    except OSError:
        opened = _create(_PREFIX + name, flags)
    with opened as file:
        os.fchmod(file.fileno(), 0o600)
        os.ftruncate(file.fileno(), HEADER_BYTES + size)
        os.pwrite(file.fileno(), json.dumps({"most_bytes": most_bytes}).encode(), 0)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)  # last: it says that the rest is there
        return Memory(mmap.mmap(file.fileno(), HEADER_BYTES + size), most_bytes, joined=False)


def _create(name: str, flags: int) -> FileIO:
    """A new memory file, of which no descriptor is ever seen here: Ctrl-C could come before it is stored."""
    return next(map(FileIO, map(os.memfd_create, (name,), (flags,)), ("r+",)))


def free_memory() -> tuple[int, int]:
    """Bytes of main memory that are free for this process, and of all memory, by its control groups, too."""
    machine = psutil.virtual_memory()
    free, total = int(machine.available), int(machine.total)
    for used, limit in _group_limits():
        free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


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

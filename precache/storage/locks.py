"""Locks of files (flock), which the system releases when a process ends, and the lock of a destination.

The lock of a destination lets one process at a time convert into it:

    .NAME.precache-lock    beside DST; or `.precache-lock` inside DST, if that is a mount point, of which only
                           the inside is shared with other machines and containers

The holder removes the file at the end. A process that has opened it meanwhile sees that its name is gone, and
opens the next one. So a lock file remains only after a kill. It holds the host and the process id of its
holder, which are for messages alone. Some file systems (FUSE) lock within one machine only; then only the
processes of that machine are kept apart. A file system without locks is refused.
"""

import errno
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from precache.errors import DatasetError, os_errors_as
from precache.storage import is_leftover, open_append
from precache.storage.records import PROBED_BYTES, may_be_records

LOCK_SUFFIX = ".precache-lock"
_LONG_NAME = 111  # bytes; eCryptfs allows 143, and names beside the folder have up to 32 more
_PATIENCE_S = 1.0  # the workers of a killed process may hold its lock for a moment
_POLL_S = 0.05
_WAIT_S = 1.0  # between two looks at a lock that is waited for


def lock(descriptor: int, *, exclusive: bool = True, wait: bool = False) -> bool:
    """Lock an open file until it is closed, and return whether that succeeded.

    Args:
        descriptor: descriptor of the file.
        exclusive: let no other process lock the file; else other processes can share the lock.
        wait: wait while other processes hold a lock that excludes this one; else return False at once.
    """
    import fcntl  # missing on Windows, where no dataset can be written

    operation = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    if not wait:
        operation |= fcntl.LOCK_NB
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def unlock(descriptor: int) -> None:
    """Unlock and close an open file; closing is not enough, as a process that was forked may have it open."""
    import fcntl

    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def has_name(descriptor: int, path: Path) -> bool:
    """Whether `path` is still a name of the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def lock_path(destination: Path) -> Path:
    """Path of the lock file of `destination`."""
    if is_mount_point(destination):
        return destination / LOCK_SUFFIX
    return destination.with_name(f".{hidden_name(destination)}{LOCK_SUFFIX}")


def hidden_name(destination: Path) -> str:
    """Name of `destination` within longer names beside it: its own, or a digest where that is long."""
    name = os.fsencode(destination.name)
    return destination.name if len(name) <= _LONG_NAME else hashlib.sha256(name).hexdigest()[:32]


def is_mount_point(folder: Path) -> bool:
    """Whether `folder` is a mount point, bind mounts included."""
    if os.path.ismount(folder):
        return True
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:  # no Linux
        return False
    real = os.fsencode(os.path.realpath(folder))
    points = (line.split(b" ")[4] for line in mounts if line.count(b" ") > 4)
    return any(re.sub(rb"\\([0-7]{3})", _octal, point) == real for point in points)


def foreign_names(folder: Path, names: frozenset[str]) -> list[str]:
    """Names in a folder that are not among `names`, nor of a temporary file of these, nor of a lock file."""
    allowed = names | {LOCK_SUFFIX, "lost+found"} if is_mount_point(folder) else names
    others = (path for path in folder.iterdir() if path.name not in allowed)
    return sorted(path.name for path in others if not is_leftover(path, names))


@contextmanager
def hold_lock(destination: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the lock of `destination` until the end of the block, so that no other process converts into it.

    Args:
        destination: folder of the dataset.
        on_wait: called every second with the holder, 'process 7 on HOST', while another process holds the
            lock; None: do not wait for it.

    Raises:
        DatasetError: another process holds the lock, and there is no `on_wait`; the lock file's name is
            taken by another file; or the file system has no locks.
    """
    path = lock_path(destination)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _open_locked(path, destination, on_wait)
    try:
        if not may_be_records(os.pread(descriptor, PROBED_BYTES, 0), "lock"):
            raise _foreign_file_error(path, "is not a lock file of this project")
        os.ftruncate(descriptor, 0)
        with suppress(OSError):  # the disk may be full
            holder = {"lock": "precache", "host": socket.gethostname(), "pid": os.getpid()}
            os.write(descriptor, f"{json.dumps(holder)}\n".encode())
        try:
            yield
        finally:
            with suppress(OSError):
                if has_name(descriptor, path):
                    path.unlink()
    finally:
        unlock(descriptor)


def _open_locked(path: Path, destination: Path, on_wait: Callable[[str], None] | None) -> int:
    """Open and lock the lock file at `path`, and return its descriptor."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        descriptor = _open(path)
        try:
            with os_errors_as(
                DatasetError,
                "cannot be locked",
                "choose a DST on a file system with locks, or mount this one with them",
                path=path,
            ):
                locked = lock(descriptor)
                if locked and has_name(descriptor, path):
                    return descriptor
            is_held = not locked and time.monotonic() >= deadline_s
            if is_held and on_wait is not None:
                on_wait(_holder(descriptor))
            elif is_held:
                raise DatasetError(
                    f"is being converted by {_holder(descriptor)}",
                    path=destination,
                    remedy="wait for it, or stop it",
                )
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if not locked:  # if it was locked, its name is gone, and the next file is tried at once
            time.sleep(_WAIT_S if is_held else _POLL_S)


def _open(path: Path) -> int:
    try:
        return open_append(path, os.O_CREAT)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO):
            raise
        raise _foreign_file_error(
            path, "is a link, a folder or something else, no lock file of this project"
        ) from error


def _foreign_file_error(path: Path, problem: str) -> DatasetError:
    return DatasetError(problem, path=path, remedy="give it another name, then run the same command again")


def _holder(descriptor: int) -> str:
    """Describe the holder of the lock, as the file states it; it may not have been written yet."""
    try:
        holder = json.loads(os.pread(descriptor, PROBED_BYTES, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, LookupError, TypeError):
        return "another process"


def _octal(match: "re.Match[bytes]") -> bytes:
    return bytes([int(match[1], 8) & 255])

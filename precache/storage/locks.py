"""Locks of the system (flock), which end with their process; and the one of a destination.

One process at a time converts into a destination:

    .NAME.precache-lock    beside DST; `.precache-lock` in it where DST is a mount point, since there only
                           what is in it is shared with other machines and containers

The holder removes the file at the end; whoever has opened that file meanwhile sees that its name is gone, and
opens the next. So a file stays only after a kill. Inside is who holds the lock, for the message alone. File
systems that lock for one machine only (some of FUSE) keep the processes of that machine apart, no others; one
without locks is refused.
"""

import errno
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from precache.errors import DatasetError, os_errors_as
from precache.storage import is_leftover, open_append
from precache.storage.records import PROBED_BYTES, may_be_records
from precache.storage.urls import Location

LOCK_SUFFIX = ".precache-lock"
_PATIENCE_S = 1.0  # a process that was killed may be outlived, for a moment, by its workers
_POLL_S = 0.05


def lock(descriptor: int, *, alone: bool = True, waiting: bool = False) -> bool:
    """Lock an open file until it is closed; False if others have it."""
    import fcntl  # missing on Windows: without a lock nothing is converted

    how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    try:
        fcntl.flock(descriptor, how if waiting else how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def unlock(descriptor: int) -> None:
    """Unlock and close an open file: a process that was forked meanwhile may have it open, too."""
    import fcntl

    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def lock_path(destination: Path) -> Path:
    """Where the lock file of `destination` lies."""
    if is_mount_point(destination):
        return destination / LOCK_SUFFIX
    return destination.with_name(f".{destination.name}{LOCK_SUFFIX}")


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
    """Names in a folder that are not of `names`, nor left of writing one of them, nor that of its lock."""
    allowed = {LOCK_SUFFIX, "lost+found"} if is_mount_point(folder) else set()
    found = (path for path in folder.iterdir() if path.name not in names | allowed)
    return sorted(path.name for path in found if not is_leftover(path, names))


@contextmanager
def hold_lock(destination: Path, shown: Location | None = None) -> Iterator[None]:
    """Keep other conversions out of `destination` for the duration of the block.

    Args:
        shown: the destination's name in messages, if not its path.

    Raises:
        DatasetError: another process holds the lock, a file that is not ours has its name, or the file
            system has no locks.
    """
    path = lock_path(destination)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _open_locked(path, shown or destination)
    try:
        if not may_be_records(os.pread(descriptor, PROBED_BYTES, 0), "lock"):
            raise _foreign(path, "is not a lock file of this project")
        os.ftruncate(descriptor, 0)
        with suppress(OSError):  # the disk may be full
            holder = {"lock": "precache", "host": socket.gethostname(), "pid": os.getpid()}
            os.write(descriptor, f"{json.dumps(holder)}\n".encode())
        try:
            yield
        finally:
            with suppress(OSError):
                if is_at(descriptor, path):
                    path.unlink()
    finally:
        unlock(descriptor)


def _open_locked(path: Path, destination: Location) -> int:
    """A descriptor of the lock file, which this process has locked."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        descriptor = _open(path)
        try:
            with os_errors_as(
                DatasetError,
                f"{path}: cannot be locked",
                "choose a DST on a file system with locks, or mount this one with them",
            ):
                locked = lock(descriptor)
                if locked and is_at(descriptor, path):
                    return descriptor
            if not locked and time.monotonic() >= deadline_s:
                raise DatasetError(
                    f"{destination}: is being converted by {_holder(descriptor)}; wait for it, or stop it"
                )
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if not locked:  # else its holder has removed it: the next one is locked instead
            time.sleep(_POLL_S)


def _open(path: Path) -> int:
    try:
        return open_append(path, os.O_CREAT)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO):
            raise
        raise _foreign(path, "is a link, a folder or something else, no lock file of this project") from error


def _foreign(path: Path, what: str) -> DatasetError:
    return DatasetError(f"{path}: {what}; give it another name, then run the same command again")


def _holder(descriptor: int) -> str:
    """Who holds the lock, as the file says; its holder may not have written it yet."""
    try:
        holder = json.loads(os.pread(descriptor, PROBED_BYTES, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, LookupError, TypeError):
        return "another process"


def _octal(match: "re.Match[bytes]") -> bytes:
    return bytes([int(match[1], 8) & 255])

"""Locks of files (flock), which the system releases when a process ends, and the lock of a destination.

The lock of a destination lets one process at a time convert into it:

    .NAME.precache-lock    beside DST; or `.precache-lock` inside DST, if that is a mount point, of which only
                           the inside is shared with other machines and containers

The holder removes the file at the end, if it is empty. A process that has opened it meanwhile sees that its
name is gone, and opens the next one. So a lock file remains only after a kill, and does no harm. Some file
systems (FUSE) lock within one machine only; then only the processes of that machine are kept apart. A file
system without locks is refused.
"""

import errno
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from precache.errors import DatasetError, SettingError, os_errors_as, shell_command
from precache.storage import is_leftover, open_single

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

    Raises:
        SettingError: the system is Windows.
    """
    try:
        import fcntl
    except ImportError as error:
        raise SettingError(
            "datasets are written on Linux and macOS alone: this system has no flock", remedy="use WSL"
        ) from error
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


def open_exclusive(path: Path) -> int | None:
    """Open a file, created if missing, with an exclusive lock; None if another process has locked it.

    Raises:
        OSError: the file cannot be opened, see `open_single`, or cannot be locked.
    """
    descriptor = open_single(path, os.O_CREAT)
    try:
        if lock(descriptor) and has_name(descriptor, path):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


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
def hold_lock(destination: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of `destination` until the end of the block, so that no other process converts into it.

    Args:
        destination: folder of the dataset.
        on_wait: called every second while another process holds the lock; None: do not wait for it.

    Raises:
        DatasetError: another process holds the lock, and there is no `on_wait`; or the lock file cannot be
            made or locked.
    """
    path = lock_path(destination)
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + _PATIENCE_S
    while (descriptor := _try_lock(path)) is None:
        if time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        elif on_wait is None:
            raise DatasetError(
                "is being converted by another process",
                path=destination,
                remedy=f"wait for it, or stop it ('{shell_command('fuser', path)}' says which it is)",
            )
        else:
            on_wait()
            time.sleep(_WAIT_S)
    try:
        yield
    finally:
        with suppress(OSError):
            is_empty = os.fstat(descriptor).st_size == 0  # else it is a file of the user's
            if is_empty and has_name(descriptor, path):
                path.unlink()
        unlock(descriptor)


def _try_lock(path: Path) -> int | None:
    """Open and lock the lock file at `path`; None if another process has locked it."""
    remedy = "choose a DST on a file system with locks, where this name is not taken"
    with os_errors_as(DatasetError, "cannot be locked", remedy, path=path):
        return open_exclusive(path)


def _octal(match: "re.Match[bytes]") -> bytes:
    return bytes([int(match[1], 8) & 255])

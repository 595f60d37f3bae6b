"""A lock: one process at a time converts into a destination; and the record of a swap of two datasets.

    .NAME.precache-lock    beside DST; `.precache-lock` in it where DST is a mount point, since there only
                           what is in it is shared with other machines and containers

The system keeps the lock (flock), so that it ends with its process, however that ends. The holder removes
the file at the end; whoever has opened that file meanwhile sees that its name is gone, and opens the next. So
a file stays only after a kill, or as long as a swap is not complete: inside are records (see
`precache.storage.records`) of who holds the lock, for the message alone, and of a swap under way. File
systems that lock for one machine only (some of FUSE) keep the processes of that machine apart, no others; one
without locks is refused.
"""

import errno
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from precache.errors import DatasetError
from precache.reporting import some, warn
from precache.storage import fsync_folder, open_append
from precache.storage.records import PROBED_BYTES, RecordFile, may_be_records
from precache.storage.urls import Location

LOCK_SUFFIX = ".precache-lock"
_PATIENCE_S = 1.0  # a process that was killed may be outlived, for a moment, by its workers
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Swap:
    """A dataset that is about to replace another.

    Attributes:
        build: name, beside DST, of the folder in which the new one is made.
        old: name, beside DST, that the old one gets before it is removed.
        files: names of the old one's files; none as long as nothing was renamed.
    """

    build: str
    old: str
    files: tuple[str, ...] = ()


class Lock:
    """A lock that is held.

    Attributes:
        destination: the folder that it is for.
        swap: the one under way, or None.
    """

    def __init__(self, destination: Path, path: Path, descriptor: int) -> None:
        self.destination = destination
        self._path = path
        self._descriptor = descriptor
        self._records = records = RecordFile(descriptor)
        swaps = [record["swap"] for record in records.read() if "swap" in record]
        self.swap = _decode(swaps[-1], destination) if swaps and swaps[-1] is not None else None
        if self.swap is None:
            if records.damaged:
                self._warn_of_folders()
            records.clear()
        with suppress(OSError):  # the disk may be full: this record is for the message alone
            records.append({"lock": "precache", "host": socket.gethostname(), "pid": os.getpid()})

    def note(self, swap: Swap | None) -> None:
        """Record the swap under way, durable when this returns; None: no swap, recorded if possible."""
        if swap is None:
            with suppress(OSError):  # the next run sees that nothing is left to do
                self._records.append({"swap": None})
        else:
            self._records.append({"swap": asdict(swap)})
            fsync_folder(self._path.parent)
        self.swap = swap

    def new_swap(self) -> Swap:
        """Record a swap under new names that nobody can guess."""
        build, old = (f".{self.destination.name}.{secrets.token_hex(8)}.precache" for _ in range(2))
        self.note(Swap(build, old))
        assert self.swap is not None
        return self.swap

    def _warn_of_folders(self) -> None:
        ours = _folder_names(self.destination)
        if left := sorted(p.name for p in self.destination.parent.iterdir() if ours.fullmatch(p.name)):
            warn(
                f"{self._path}: is damaged, so the folders of an earlier --overwrite are left alone: look "
                f"into {some(left)} in {self.destination.parent}, and remove what you do not need"
            )

    def release(self) -> None:
        """Release the lock, and remove its file unless a swap is on record."""
        import fcntl

        with suppress(OSError):
            if self.swap is None and _is_at(self._descriptor, self._path):
                self._path.unlink()
        with suppress(OSError):  # at once, though a process that was forked meanwhile may have it open, too
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._records.close()


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


@contextmanager
def hold_lock(destination: Path, shown: Location | None = None) -> Iterator[Lock]:
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
        lock = Lock(destination, path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    try:
        yield lock
    finally:
        lock.release()


def _open_locked(path: Path, destination: Location) -> int:
    """A descriptor of the lock file, which this process has locked."""
    import fcntl  # missing on Windows: without a lock nothing is converted

    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
            os.close(descriptor)  # its holder has removed it: the next one is locked instead
        except OSError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise DatasetError(
                    f"{path}: cannot be locked ({error.strerror}); choose a DST on a file system with locks, "
                    f"or mount this one with them"
                ) from error
            if time.monotonic() >= deadline_s:
                raise DatasetError(
                    f"{destination}: is being converted by {holder}; wait for it, or stop it"
                ) from error
            time.sleep(_POLL_S)
        except BaseException:
            os.close(descriptor)
            raise


def _open(path: Path) -> int:
    try:
        return open_append(path, os.O_CREAT)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO):
            raise
        raise _foreign(path, "is a link, a folder or something else, no lock file of this project") from error


def _foreign(path: Path, what: str) -> DatasetError:
    return DatasetError(f"{path}: {what}; give it another name, then run the same command again")


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    """Who holds the lock, as the file says; its holder may not have written it yet."""
    holders = [record for record in RecordFile(descriptor).read() if "pid" in record]
    return f"process {holders[-1]['pid']} on {holders[-1].get('host')}" if holders else "another process"


def _decode(content: Any, destination: Path) -> Swap:
    """The swap of a record; DatasetError if it names what this project does not make."""
    ours = _folder_names(destination)
    try:
        swap = Swap(content["build"], content["old"], tuple(content["files"]))
        folders = {name for name in (swap.build, swap.old) if ours.fullmatch(name)}
        if len(folders) == 2 and all(n not in ("", ".", "..") and "/" not in n for n in swap.files):
            return swap
    except (KeyError, TypeError):
        pass
    raise _foreign(lock_path(destination), "names files that precache does not make")


def _folder_names(destination: Path) -> "re.Pattern[str]":
    return re.compile(rf"\.{re.escape(destination.name)}\.[0-9a-f]{{16}}\.precache")


def _octal(match: "re.Match[bytes]") -> bytes:
    return bytes([int(match[1], 8) & 255])

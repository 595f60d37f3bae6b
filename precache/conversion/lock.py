"""Who may write a destination, and what it is about to swap.

    .NAME.precache-lock    beside DST; `.precache-lock` in it where DST is a mount point, since there only
                           what is in it is shared with other machines and containers

The system keeps the lock (flock), so that it ends with its process, however that ends. The file stays: one
that is removed could be locked twice. Inside are records (see `precache.storage.records`): who holds it, for
the message alone, and a swap that is under way. File systems that lock for one machine only (some of FUSE)
keep the processes of that machine apart, no others; one without locks is refused.
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

from precache.console.notices import some, warn
from precache.errors import DatasetError
from precache.storage import fsync_folder, open_append
from precache.storage.records import PROBED_BYTES, RecordFile, may_be_records

LOCK_SUFFIX = ".precache-lock"
_PATIENCE_S = 1.0  # a process that was killed may be outlived, for a moment, by its workers
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Swap:
    """A dataset that is to take the place of another.

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
        destination: what it is on.
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
        with suppress(OSError):  # for the message alone: the disk may be full, and there be nothing to do
            records.append({"lock": "precache", "host": socket.gethostname(), "pid": os.getpid()})

    def note(self, swap: Swap | None) -> None:
        """Record the swap under way, durable when this returns; or, if it can be, that there is none."""
        if swap is None:
            with suppress(OSError):  # the next run sees that nothing is left to do
                self._records.append({"swap": None})
        else:
            self._records.append({"swap": asdict(swap)})
            fsync_folder(self._path.parent)
        self.swap = swap

    def new_swap(self) -> Swap:
        """Record a swap under names that nothing has, nor anybody can guess."""
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
        """Let others in."""
        import fcntl

        with suppress(OSError):
            if self.swap is None:
                self._records.clear()
        with suppress(OSError):  # at once, though a process that was forked meanwhile may have it open, too
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._records.close()


def lock_path(destination: Path) -> Path:
    """Where the lock file of `destination` lies."""
    if is_mount_point(destination):
        return destination / LOCK_SUFFIX
    return destination.with_name(f".{destination.name}{LOCK_SUFFIX}")


def is_mount_point(folder: Path) -> bool:
    """Whether `folder` is one; also of the file system that its parent is on, as bind mounts are."""
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
def hold_lock(destination: Path) -> Iterator[Lock]:
    """Keep other conversions out of `destination` for the duration of the block.

    Raises:
        DatasetError: another process holds the lock, a file of somebody else has its name, or the file
            system has no locks.
    """
    path = lock_path(destination)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _open_locked(path, destination)
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


def _open_locked(path: Path, destination: Path) -> int:
    """A descriptor of the lock file, which this process has locked."""
    import fcntl  # no Windows has it, and a conversion without a lock is none

    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
            os.close(descriptor)  # somebody has removed it: another is locked by others
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
    """Who says to hold the lock; he may be about to write it."""
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

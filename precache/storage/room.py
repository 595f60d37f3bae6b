"""How much of the disk the cache of datasets at URLs takes, and which of its files go to make room.

What was used least recently goes first, whichever dataset it is of. If that is of the dataset which needs the
room, the file that was read last goes instead: an epoch comes back to it last of all, and what was read least
recently, soonest. So a set that does not fit keeps what fits, and each epoch finds that part here; by age
alone it would find nothing.

Never removed: what is in use, what this project has not noted that it fetched, what the storage has no more.
"""

import errno
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from precache.storage.local import open_append, open_new, open_regular, partial_of, read_descriptor_at

FETCH_SUFFIX = ".precache-fetch"
ROOM_NAME = ".precache-room"
_RESERVE_SHARE, _MOST_RESERVE = 20, 10 << 30  # a twentieth of the disk
_POLL_S = 0.02
_NOTE_BYTES = 1 << 16
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Kept:
    """A file of the cache that may go.

    Attributes:
        target: what it is to become, if it is being fetched; else its path.
        used_s: when somebody opened it last.
    """

    path: Path
    target: Path
    bytes: int
    used_s: float


def note_path(path: Path) -> Path:
    """Of the file that says whether the one at `path` was fetched, and is locked meanwhile."""
    return path.with_name(f".{path.name}{FETCH_SUFFIX}")


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a note says: which file of the cache is how many bytes (all, or some) of which object."""

    name: str
    url: str
    bytes: int


def read_note(descriptor: int) -> Fetched | None:
    """What an open note says; None where it is none, or says nothing yet."""
    try:
        content: Any = json.loads(read_descriptor_at(descriptor, 0, _NOTE_BYTES))
        return Fetched(str(content["name"]), str(content["url"]), int(content["bytes"]))
    except (ValueError, KeyError, TypeError):
        return None


def write_note(descriptor: int, fetched: Fetched) -> None:
    """Have the note say so."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(fetched)).encode(), 0)


@contextmanager
def locked(path: Path, waiting: Callable[[float], None] = lambda waited_s: None) -> Iterator[int]:
    """A descriptor of the file at `path`, which is made, and locked until the end of the block.

    Who has the lock is waited for as long as his process lives; `waiting` is told how long, and may raise.
    """
    import fcntl

    descriptor = open_append(path, os.O_CREAT)
    try:
        begin_s = time.monotonic()
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting(time.monotonic() - begin_s)
                time.sleep(_POLL_S)
        yield descriptor
    finally:
        with suppress(OSError):  # a process that was forked meanwhile may have it open, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Room:
    """Room in the cache for the files of a dataset.

    Attributes:
        folder: of the dataset, in the cache.
        most_bytes: of the cache; None leaves a twentieth of the disk free.
        is_at_storage: whether an object is still what was fetched.
        waiting: as of `locked`.
    """

    folder: Path
    most_bytes: int | None
    is_at_storage: Callable[[Fetched], bool]
    waiting: Callable[[float], None]

    def open_new(self, path: Path, file_bytes: int, ranges: Sequence[tuple[int, int]]) -> int:
        """A descriptor, for writing, of a new file at `path` that has its room on the disk already.

        Its size is `file_bytes`; room have the pieces `ranges`, of (first byte, bytes), the rest are holes.
        So several processes do not count on the same room, and a full disk is found before anything comes.

        Raises:
            OSError: the disk is full, and nothing may go.
        """
        cache = self.folder.parent
        with locked(cache / ROOM_NAME, self.waiting):
            self._make(sum(count for _, count in ranges))
            descriptor = open_new(path)
            try:
                while (error := _allocate(descriptor, file_bytes, ranges)) is not None:
                    os.ftruncate(descriptor, 0)  # gives back what it got
                    if error.errno not in FULL or not self._remove_first(self._victims(_kept(cache))):
                        raise error
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor

    def _make(self, needed: int) -> None:
        """Remove files until `needed` bytes fit, or nothing may go any more; what is in use stays."""
        disk = os.statvfs(self.folder)
        reserve = min(disk.f_blocks * disk.f_frsize // _RESERVE_SHARE, _MOST_RESERVE)
        excess = needed - (disk.f_bavail * disk.f_frsize - reserve)
        if self.most_bytes is None and excess <= 0:
            return
        kept = list(_kept(self.folder.parent))
        if self.most_bytes is not None:
            excess = max(excess, sum(file.bytes for file in kept) + needed - self.most_bytes)
        victims = self._victims(kept)
        while excess > 0 and (freed := self._remove_first(victims)):
            excess -= freed

    def _victims(self, kept: Iterable[Kept]) -> Iterator[Kept]:
        """Files in the order in which they go."""
        own: deque[Kept] = deque()
        others: deque[Kept] = deque()
        for file in sorted(kept, key=lambda file: file.used_s):
            (own if file.path.parent == self.folder else others).append(file)
        while own or others:
            older = others and (not own or others[0].used_s <= own[0].used_s)
            yield others.popleft() if older else own.pop()

    def _remove_first(self, victims: Iterator[Kept]) -> int:
        """Remove the first that may go; its bytes, or 0 if there is none."""
        return next((max(1, file.bytes) for file in victims if self._remove(file)), 0)

    def _remove(self, file: Kept) -> bool:
        with suppress(OSError), locked(note_path(file.target), _not_waiting) as note:
            if file.target != file.path:  # being fetched, by somebody who has died
                file.path.unlink()
                return True
            fetched = read_note(note)
            if fetched is None or fetched.name != file.path.name:
                return False
            with _unused(file.path):
                if self.is_at_storage(fetched):
                    file.path.unlink()
                    return True
        return False


def _allocate(descriptor: int, file_bytes: int, ranges: Sequence[tuple[int, int]]) -> OSError | None:
    """Give the file its room; what it got none for, or None."""
    try:
        os.ftruncate(descriptor, file_bytes)
        for start, count in ranges if hasattr(os, "posix_fallocate") else ():
            if count:
                os.posix_fallocate(descriptor, start, count)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            return error
    return None


def _kept(cache: Path) -> Iterator[Kept]:
    """All that was fetched into the folders of the cache, or is being fetched."""
    for folder in [entry for entry in os.scandir(cache) if entry.is_dir(follow_symlinks=False)]:
        entries: dict[str, os.DirEntry[str]] = {}
        with suppress(PermissionError, FileNotFoundError):  # somebody else's
            entries = {
                entry.name: entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)
            }
        for name, entry in entries.items():
            target = partial_of(name) or name
            if note_path(Path(target)).name in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    used = min(status.st_size, status.st_blocks * 512)
                    yield Kept(Path(entry.path), Path(folder, target), used, status.st_mtime)


@contextmanager
def _unused(path: Path) -> Iterator[None]:
    """Keep others from using the file at `path`; BlockingIOError: somebody does.

    Who opens it meanwhile waits, and then sees whether it still has its name: see `precache.storage.mirror`.
    """
    import fcntl

    descriptor = open_regular(path, os.O_RDWR)  # NFS locks nothing else for one alone
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _not_waiting(waited_s: float) -> None:
    raise BlockingIOError(errno.EAGAIN, "is locked")

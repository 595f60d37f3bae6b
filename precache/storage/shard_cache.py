"""Cache on this machine of files of datasets at URLs, which are fetched when they are first used.

A file is fetched whole, or some byte ranges of it (`FilePart`), at the same offsets of a sparse file.

    CACHE/.precache-cache.lock    locked (flock) while room is made
    CACHE/DIGEST/                 files of a dataset, by the digest of its manifest, from whichever URL
        .precache-cache           marks the folder as one of the cache; holds the URL
        NAME                      file of the dataset: complete, and compared with its checksum
        PREFIX-NAME               part of a file, see `FilePart.prefix`: compared piece by piece
        .NAME.fetching            file or part that is being fetched; it is renamed when it is complete

All processes of a machine share the cache. A process that fetches a file locks it exclusively (flock), and
processes that use it share a lock. The system releases a lock when its process ends, be it killed; a process
that waits for the lock then fetches the file again.

When a file needs room, files that nobody has locked are removed, one by one. The dataset that has the least
recently used one gives up the next:

- Another dataset gives up the least recently used file.
- The dataset that needs the room gives up its most recently used file: each epoch reads all files, and needs
  that one last. So a dataset that does not fit keeps as many files as fit, and each epoch finds these in the
  cache. If it gave up the least recently used one, which is needed soonest, no epoch would find any.

Nothing is removed from folders without the mark.
"""

import errno
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from precache.errors import SettingError, StorageError, check_range, os_errors_as
from precache.storage import atomic_write, open_regular, open_single
from precache.storage.locks import has_name, lock, open_exclusive, unlock
from precache.storage.objects import ObjectStore
from precache.storage.retries import (
    FETCHES,
    Check,
    WrongBytesError,
    call_for_each,
    fetch_right_bytes,
    no_check,
    storage_patience_s,
)
from precache.storage.urls import Url

_CACHE_DIR = "PRECACHE_CACHE_DIR"
"""Name of the environment variable with the folder of the cache."""
_MARK, _ROOM_LOCK, _FETCHING = ".precache-cache", ".precache-cache.lock", ".fetching"
_PIECES_AT_A_TIME = 8
# This part of the disk is left free, but not more bytes than the maximum.
_RESERVE_DIVISOR, _MAX_RESERVE_BYTES = 20, 10 << 30
_POLL_S = 0.02
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ALLOCATION = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """Settings of the cache on this machine.

    Attributes:
        folder: folder of the cache; default PRECACHE_CACHE_DIR, or ~/.cache/precache.
        bytes: maximal size of the cache; by default, a twentieth of the disk, at most 10 GiB, is left free.
    """

    folder: str | os.PathLike[str] = field(
        default_factory=lambda: os.environ.get(_CACHE_DIR) or Path("~/.cache/precache").expanduser()
    )
    bytes: int | None = None

    def __post_init__(self) -> None:
        if self.bytes is not None:
            object.__setattr__(self, "bytes", check_range("cache_bytes", self.bytes, 1))


class WrittenFile(Protocol):
    """File of a dataset, as its manifest describes it."""

    @property
    def name(self) -> str:
        """Name in the dataset's folder."""

    @property
    def bytes(self) -> int:
        """Size in bytes."""

    @property
    def crc32c(self) -> str:
        """CRC-32C of its bytes, 8 hex digits."""


class FilePart(Protocol):
    """Part of a file, which the cache keeps as a sparse file of the whole file's size."""

    @property
    def prefix(self) -> str:
        """Prefix of the part's name in the cache, by which parts of a file are told apart."""

    def ranges(self) -> list[tuple[int, int]]:
        """First byte and number of bytes of each piece."""

    def is_right(self, number: int, content: bytes) -> bool:
        """Whether piece `number` has the right content."""


class CachedFiles:
    """Cached files of a dataset at a URL.

    Several threads may use them, and they can be sent to other processes.

    Attributes:
        url: URL of the dataset.
        folder: folder of the cache with the dataset's files.
        cache: settings of the cache.
    """

    def __init__(self, url: Url, digest: str, cache: Cache) -> None:
        self.url = url
        self.folder = Path(os.path.abspath(os.path.expanduser(cache.folder))) / digest[:32]
        self.cache = cache
        self._digest = digest
        self._patience_s = storage_patience_s()
        self._object_store: ObjectStore | None = None
        self._mark_folder()

    @contextmanager
    def local_file(self, file: WrittenFile) -> Iterator[Path]:
        """Yield the path of a file, which is fetched if needed, and is kept until the end of the block.

        Raises:
            StorageError: the file cannot be fetched, or the storage has another one in its place.
        """
        with self.open_file(file):
            yield self.folder / file.name

    def open_file(self, file: WrittenFile, check: Check = no_check, part: FilePart | None = None) -> FileIO:
        """Open a file, which is fetched if needed, and is kept in the cache until it is closed.

        Args:
            file: file of the dataset.
            check: called repeatedly while the file is fetched, by several threads; an error of it ends that.
            part: part of the file to fetch, under a name of its own; None for the whole file.

        Raises:
            StorageError: as `local_file`.
        """
        path = self.folder / (file.name if part is None else f"{part.prefix}{file.name}")
        temporary = path.with_name(f".{path.name}{_FETCHING}")
        begin_s = time.monotonic()
        with os_errors_as(
            StorageError,
            f"{file.bytes:,} bytes cannot be kept in {self.folder}",
            f"make room on that disk, or give another cache_dir or {_CACHE_DIR}",
            path=self.url / file.name,
        ):
            while (opened := _open_complete(path, file.bytes)) is None:
                descriptor = open_exclusive(temporary)
                if descriptor is None:
                    self._wait(temporary, begin_s, check)
                    continue
                try:
                    self._fetch(file, part, descriptor, temporary, path, check)
                finally:
                    unlock(descriptor)
        return opened

    def forget(self, name: str) -> None:
        """Remove a damaged file, if it is in the cache, so that it is fetched again when it is needed."""
        with suppress(OSError):
            (self.folder / name).unlink()

    def __reduce__(self) -> Any:
        return CachedFiles, (self.url, self._digest, self.cache)

    def _mark_folder(self) -> None:
        """Make the folder and its mark; SettingError if that fails, or other files are in the folder."""
        mark = self.folder / _MARK
        with os_errors_as(
            SettingError,
            "cannot be made",
            f"give another cache_dir, or another {_CACHE_DIR}",
            path=self.folder,
        ):
            self.folder.mkdir(parents=True, exist_ok=True)
            if mark.exists():
                return
            others = [name for name in os.listdir(self.folder) if not name.startswith(".")]
            if others and not mark.exists():
                raise SettingError(
                    f"holds {others[0]}, which was not fetched",
                    path=self.folder,
                    remedy=f"move it elsewhere, or give another cache_dir or {_CACHE_DIR}",
                )
            with atomic_write(mark) as file:
                file.write(json.dumps({"url": str(self.url)}).encode())

    def _store(self) -> ObjectStore:
        """Objects at the URL."""
        if self._object_store is None:
            self._object_store = ObjectStore(self.url, self._patience_s)
        return self._object_store

    def _wait(self, path: Path, begin_s: float, check: Check) -> None:
        """Wait a moment for the process that has locked `path`; StorageError if that is stuck."""
        check()
        limit_s = 2 * self._patience_s
        if time.monotonic() - begin_s > limit_s:
            with suppress(FileNotFoundError):  # the other process has finished
                if time.time() - path.stat().st_mtime > limit_s:
                    raise StorageError(
                        f"another download has been stuck for {limit_s:.0f} s",
                        path=path,
                        remedy="end that process, or wait",
                    )
        time.sleep(_POLL_S)

    def _fetch(
        self,
        file: WrittenFile,
        part: FilePart | None,
        descriptor: int,
        temporary: Path,
        path: Path,
        check: Check,
    ) -> None:
        """Fetch into the file `temporary`, open and locked as `descriptor`, and rename it to `path`."""
        if path.exists() and path.stat().st_size == file.bytes:  # another process has just fetched it
            temporary.unlink()
            return
        try:
            ranges = [(0, file.bytes)] if part is None else part.ranges()
            if self._excess_bytes(sum(count for _, count in ranges)) > 0:
                self._check_size(file)  # before other files are removed for it
            self._make_room(descriptor, file.bytes, ranges, check)
            if part is None:
                self._store().download_checked(file.name, temporary, file.bytes, file.crc32c, check)
            else:
                self._download_part(file, part, ranges, descriptor, check)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _download_part(
        self,
        file: WrittenFile,
        part: FilePart,
        ranges: list[tuple[int, int]],
        descriptor: int,
        check: Check,
    ) -> None:
        """Fetch the pieces of a part, compare them with their checksums, and write them into the file."""

        def fetch(number: int, check: Check) -> None:
            start, count = ranges[number]
            content = self._store().get_range(file.name, start, count, check=check)
            if not part.is_right(number, content):
                raise WrongBytesError(
                    f"{count:,} bytes from {start:,} on are not the sample that was written (checksum; "
                    f"fetched {FETCHES} times)",
                    path=self.url / file.name,
                    remedy="put the file there again",
                )
            os.pwrite(descriptor, content, start)

        def fetch_right(number: int, check: Check) -> None:
            fetch_right_bytes(partial(fetch, number, check))

        call_for_each(fetch_right, range(len(ranges)), _PIECES_AT_A_TIME, check)

    def _make_room(
        self, descriptor: int, file_bytes: int, ranges: Sequence[tuple[int, int]], check: Check
    ) -> None:
        """Give an open file its size, and allocate room on the disk for the pieces `ranges` of it.

        The room is allocated before anything is fetched, so that several processes do not count on the same
        room, and a full disk is detected first.

        Raises:
            OSError: the disk is full, and no file can be removed.
        """
        room_lock, begin_s = self.folder.parent / _ROOM_LOCK, time.monotonic()
        while (lock_descriptor := open_exclusive(room_lock)) is None:
            self._wait(room_lock, begin_s, check)
        try:
            candidates = self._remove_excess(sum(count for _, count in ranges))
            os.ftruncate(descriptor, 0)  # drops what a killed process has left
            while (error := _allocate(descriptor, file_bytes, ranges)) is not None:
                os.ftruncate(descriptor, 0)  # frees what could be allocated
                if error.errno not in DISK_FULL or not _remove_first(candidates):
                    raise error
        finally:
            unlock(lock_descriptor)

    def _remove_excess(self, needed_bytes: int) -> "Iterator[_FileInCache]":
        """Remove files until `needed_bytes` fit, or none can be removed; return the next candidates."""
        files = list(_files_in(self.folder.parent))
        candidates, excess_bytes = self._removal_order(files), self._excess_bytes(needed_bytes, files)
        while excess_bytes > 0 and (freed_bytes := _remove_first(candidates)):
            excess_bytes -= freed_bytes
        return candidates

    def _excess_bytes(self, needed_bytes: int, files: "Sequence[_FileInCache] | None" = None) -> int:
        """Compute the bytes that have to be removed before `needed_bytes` fit; 0 or less if they fit."""
        files = list(_files_in(self.folder.parent)) if files is None else files
        disk = os.statvfs(self.folder)
        reserve_bytes = min(disk.f_blocks * disk.f_frsize // _RESERVE_DIVISOR, _MAX_RESERVE_BYTES)
        excess_bytes = needed_bytes - (disk.f_bavail * disk.f_frsize - reserve_bytes)
        if self.cache.bytes is not None:
            cached_bytes = sum(file.bytes for file in files)
            excess_bytes = max(excess_bytes, cached_bytes + needed_bytes - self.cache.bytes)
        return excess_bytes

    def _check_size(self, file: WrittenFile) -> None:
        """Raise StorageError unless the object has the size in the manifest, which may be forged."""
        info = self._store().find(file.name)
        if info is None or info.bytes != file.bytes:
            size = "nothing" if info is None else f"{info.bytes:,}"
            raise StorageError(
                f"expected {file.bytes:,} bytes, got {size}",
                path=self.url / file.name,
                remedy="put it there again, or remove the dataset if you do not trust its origin",
            )

    def _removal_order(self, files: "Sequence[_FileInCache]") -> "Iterator[_FileInCache]":
        """Yield the files in the order in which they are to be removed, by the two rules of the module."""
        own: deque[_FileInCache] = deque()
        others: deque[_FileInCache] = deque()
        for file in sorted(files, key=lambda file: file.used_s):
            (own if file.path.parent == self.folder else others).append(file)
        while own or others:
            is_other_older = others and (not own or others[0].used_s <= own[0].used_s)
            yield others.popleft() if is_other_older else own.pop()


@dataclass(frozen=True, slots=True)
class _FileInCache:
    """File in the cache, and the time when it was last opened, in seconds since the epoch."""

    path: Path
    bytes: int
    used_s: float


def is_fetched(path: Path) -> bool:
    """Whether a file is in a folder of the cache, so that it can be removed and fetched again."""
    return path.with_name(_MARK).exists()


def _files_in(cache: Path) -> Iterator[_FileInCache]:
    """Yield all files in the cache, those that are being fetched included."""
    for folder in [entry for entry in os.scandir(cache) if entry.is_dir(follow_symlinks=False)]:
        if not os.path.lexists(os.path.join(folder, _MARK)):
            continue  # no folder of the cache
        with suppress(PermissionError, FileNotFoundError):
            for entry in os.scandir(folder):
                if entry.name == _MARK or not entry.is_file(follow_symlinks=False):
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    disk_bytes = min(status.st_size, status.st_blocks * 512)
                    yield _FileInCache(Path(entry.path), disk_bytes, status.st_mtime)


def _remove_first(candidates: Iterator[_FileInCache]) -> int:
    """Remove the first file that nobody uses, and return its bytes; 0 if there is none."""
    for file in candidates:
        with suppress(OSError):
            descriptor = open_single(file.path)  # writable, because NFS needs that for an exclusive lock
            try:
                if lock(descriptor) and has_name(descriptor, file.path):
                    file.path.unlink()
                    return max(1, file.bytes)
            finally:
                unlock(descriptor)
    return 0


def _allocate(descriptor: int, file_bytes: int, ranges: Sequence[tuple[int, int]]) -> OSError | None:
    """Allocate space on the disk for `ranges` of a file; return the error if that fails, else None."""
    try:
        os.ftruncate(descriptor, file_bytes)
        if hasattr(os, "posix_fallocate"):
            for start, count in ranges:
                if count:
                    os.posix_fallocate(descriptor, start, count)
    except OSError as error:
        if error.errno not in _NO_ALLOCATION:
            return error
    return None


def _open_complete(path: Path, file_bytes: int) -> FileIO | None:
    """Open a complete file with a shared lock, so that it is not removed; None if it is not complete."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return None
    lock(file.fileno(), exclusive=False, wait=True)
    if os.fstat(file.fileno()).st_size == file_bytes and has_name(file.fileno(), path):
        with suppress(OSError):  # the file is another user's, or the disk is read-only
            os.utime(file.fileno())  # makes it the most recently used file
        return file
    file.close()
    return None

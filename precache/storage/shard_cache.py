"""Files of datasets at URLs, kept on this machine: each is fetched, whole, when it is first asked for.

    CACHE/.precache-cache.lock    locked (flock) while room is made
    CACHE/DIGEST/                 of each dataset, by its manifest, wherever it is read from
        .precache-cache           marks the folder as the cache's, with the URL
        NAME                      a file of the dataset: all of it, compared with its checksum
        .NAME.fetching            one that is being fetched; it is renamed when it is all there

All processes of a machine share the folder. Who fetches a file locks it alone (flock), who uses it shares a
lock with others. The system takes a lock back when its process ends, however that ends: who waited for it
fetches the file again.

Where a file needs room, those that nobody has locked go, the least recently used first, whichever dataset it
is of. If that is of the dataset which needs the room, the file that was read last goes instead: an epoch
comes back to it last of all, and what was read least recently, soonest. So a set that does not fit keeps what
fits, and each epoch finds that part here; by age alone it would find nothing. Folders without the mark are
not ours, and nothing in them is removed.
"""

import errno
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from precache.errors import SettingError, StorageError, check_range, os_errors_as
from precache.storage import atomic_write, open_regular, open_single
from precache.storage.locks import is_at, lock, unlock
from precache.storage.objects import ObjectStore
from precache.storage.retries import FETCHES, Check, Patience, WrongBytesError, fetch_right_bytes, unchecked
from precache.storage.urls import Url

CACHE_DIR = "PRECACHE_CACHE_DIR"
"""Environment variable: the folder that keeps what is fetched."""
_MARK, _ROOM_LOCK, _FETCHING = ".precache-cache", ".precache-cache.lock", ".fetching"
_AT_A_TIME = 8  # pieces of one file
_RESERVE_SHARE, _MOST_RESERVE = 20, 10 << 30  # a twentieth of the disk
_POLL_S = 0.02
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ALLOCATION = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """Where files of datasets at URLs are kept on this machine.

    Attributes:
        folder: of all datasets; default PRECACHE_CACHE_DIR, or ~/.cache/precache.
        bytes: that may lie in it; default as much as leaves a twentieth of the disk free, at most 10 GiB.
    """

    folder: str | os.PathLike[str] = field(
        default_factory=lambda: os.environ.get(CACHE_DIR) or Path("~/.cache/precache").expanduser()
    )
    bytes: int | None = None

    def __post_init__(self) -> None:
        if self.bytes is not None:
            object.__setattr__(self, "bytes", check_range("cache_bytes", self.bytes, 1))


class WrittenFile(Protocol):
    """A file of a dataset, as its manifest names it."""

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
    """A part of a file, which is kept as a file of the same size with holes."""

    @property
    def prefix(self) -> str:
        """What its name in the cache begins with; the same part has the same."""

    def ranges(self) -> list[tuple[int, int]]:
        """First byte and number of bytes of each piece."""

    def is_right(self, number: int, content: bytes) -> bool:
        """Whether that is what piece `number` is to be."""


class CachedFiles:
    """The files of the dataset at a URL; several threads may use one, and it can be sent to other processes.

    Attributes:
        url: of the dataset.
        folder: where its files are, or will be.
        cache: as it was given.
    """

    def __init__(self, url: Url, digest: str, cache: Cache) -> None:
        self.url = url
        self.folder = Path(os.path.abspath(cache.folder)) / digest[:32]
        self.cache = cache
        self._digest = digest
        self._patience = Patience.of_environment()
        self._opened: tuple[int, ObjectStore] | None = None
        self._mark_folder()

    @contextmanager
    def held(self, file: WrittenFile) -> Iterator[Path]:
        """The path of a file, which is fetched if it is not there, and stays until the end of the block.

        Raises:
            StorageError: it cannot be fetched, or the storage has something else.
        """
        with self.hold(file):
            yield self.folder / file.name

    def hold(self, file: WrittenFile, check: Check = unchecked, part: FilePart | None = None) -> FileIO:
        """An open file, which is fetched if it is not there, and stays until this is closed.

        Args:
            check: called now and then while it is fetched, by several threads; what it raises ends that.
            part: of the file, instead of all of it; its name is another.

        Raises:
            StorageError: as `held`.
        """
        path = self.folder / (file.name if part is None else f"{part.prefix}{file.name}")
        temporary = path.with_name(f".{path.name}{_FETCHING}")
        begin_s = time.monotonic()
        with os_errors_as(
            StorageError,
            f"{self.url / file.name}: {file.bytes:,} bytes cannot be kept in {self.folder}",
            f"make room on that disk, or give another cache_dir or {CACHE_DIR}",
        ):
            while (opened := _open_to_use(path, file.bytes)) is None:
                alone = _open_alone(temporary)
                if alone is None:
                    self._wait(temporary, begin_s, check)
                    continue
                try:
                    self._fetch(file, part, alone, temporary, path, check)
                finally:
                    unlock(alone)
        return opened

    def forget(self, name: str) -> None:
        """Remove a damaged file, if it is there: it is fetched again when it is needed."""
        with suppress(OSError):
            (self.folder / name).unlink()

    def __reduce__(self) -> Any:
        return CachedFiles, (self.url, self._digest, self.cache)

    def _mark_folder(self) -> None:
        """Make the folder one of the cache; SettingError if it cannot be one."""
        mark = self.folder / _MARK
        with os_errors_as(
            SettingError, f"{self.folder}: cannot be made", f"give another cache_dir, or another {CACHE_DIR}"
        ):
            self.folder.mkdir(parents=True, exist_ok=True)
            if mark.exists():
                return
            others = [name for name in os.listdir(self.folder) if not name.startswith(".")]
            if others and not mark.exists():
                raise SettingError(
                    f"{self.folder}: holds {others[0]}, which was not fetched; move it elsewhere, or give "
                    f"another cache_dir or {CACHE_DIR}"
                )
            with atomic_write(mark) as file:
                file.write(json.dumps({"url": str(self.url)}).encode())

    def _store(self) -> ObjectStore:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), ObjectStore(self.url, self._patience))
        return self._opened[1]

    def _wait(self, path: Path, begin_s: float, check: Check) -> None:
        """Wait a moment for who has locked `path`; StorageError if nothing has come for long."""
        check()
        most_s = 2 * self._patience.total_s
        if time.monotonic() - begin_s > most_s:
            with suppress(FileNotFoundError):  # it is finished
                if time.time() - path.stat().st_mtime > most_s:
                    raise StorageError(
                        f"{path}: another download has been stuck for {most_s:.0f} s; end that process, or "
                        f"wait"
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
        """Fill the file `temporary`, which is locked as `descriptor`, and call it `path`."""
        if _size(path) == file.bytes:  # another process has just fetched it
            temporary.unlink()
            return
        try:
            ranges = [(0, file.bytes)] if part is None else part.ranges()
            if self._excess(sum(count for _, count in ranges)) > 0:  # others would go for it
                self._compare_size(file)
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
        """Write the pieces where they belong, each compared with its checksum."""

        def fetch(number: int) -> None:
            start, count = ranges[number]
            content = self._store().get_range(file.name, start, count, check=check)
            if not part.is_right(number, content):
                raise WrongBytesError(
                    f"{self.url / file.name}: {count:,} bytes from {start:,} on are not the sample that was "
                    f"written (checksum; fetched {FETCHES} times); put the file there again"
                )
            os.pwrite(descriptor, content, start)

        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            pieces = [pool.submit(fetch_right_bytes, partial(fetch, number)) for number in range(len(ranges))]
            try:
                for piece in pieces:
                    piece.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _make_room(
        self, descriptor: int, file_bytes: int, ranges: Sequence[tuple[int, int]], check: Check
    ) -> None:
        """Give an open file its size, and room on the disk for the pieces `ranges` of it.

        So several processes do not count on the same room, and a full disk is found before anything comes.

        Raises:
            OSError: the disk is full, and nothing may go.
        """
        room_lock, begin_s = self.folder.parent / _ROOM_LOCK, time.monotonic()
        while (locked := _open_alone(room_lock)) is None:
            self._wait(room_lock, begin_s, check)
        try:
            victims = self._remove_excess(sum(count for _, count in ranges))
            os.ftruncate(descriptor, 0)  # what a killed process has left
            while (error := _allocate(descriptor, file_bytes, ranges)) is not None:
                os.ftruncate(descriptor, 0)  # gives back what it got
                if error.errno not in DISK_FULL or not _remove_first(victims):
                    raise error
        finally:
            unlock(locked)

    def _remove_excess(self, needed: int) -> "Iterator[_FileInCache]":
        """Remove files until `needed` bytes fit, or nothing may go any more; those that would go next."""
        files = list(_files_in(self.folder.parent))
        victims, excess = self._victims(files), self._excess(needed, files)
        while excess > 0 and (freed := _remove_first(victims)):
            excess -= freed
        return victims

    def _excess(self, needed: int, files: "Sequence[_FileInCache] | None" = None) -> int:
        """How many bytes are lacking so that `needed` ones fit; 0 or less if they do."""
        files = list(_files_in(self.folder.parent)) if files is None else files
        disk = os.statvfs(self.folder)
        reserve = min(disk.f_blocks * disk.f_frsize // _RESERVE_SHARE, _MOST_RESERVE)
        excess = needed - (disk.f_bavail * disk.f_frsize - reserve)
        if self.cache.bytes is not None:
            excess = max(excess, sum(file.bytes for file in files) + needed - self.cache.bytes)
        return excess

    def _compare_size(self, file: WrittenFile) -> None:
        """Raise StorageError unless the object has the size that its dataset says, which may be a lie."""
        found = self._store().find(file.name)
        if found is None or found.bytes != file.bytes:
            got = "nothing" if found is None else f"{found.bytes:,}"
            raise StorageError(
                f"{self.url / file.name}: expected {file.bytes:,} bytes, got {got}; put it there again, or "
                f"remove the dataset if it is a stranger's"
            )

    def _victims(self, files: "Sequence[_FileInCache]") -> "Iterator[_FileInCache]":
        """The files in the order in which they are removed."""
        own: deque[_FileInCache] = deque()
        others: deque[_FileInCache] = deque()
        for file in sorted(files, key=lambda file: file.used_s):
            (own if file.path.parent == self.folder else others).append(file)
        while own or others:
            older = others and (not own or others[0].used_s <= own[0].used_s)
            yield others.popleft() if older else own.pop()


@dataclass(frozen=True, slots=True)
class _FileInCache:
    path: Path
    bytes: int
    used_s: float  # when it was opened last


def is_fetched(path: Path) -> bool:
    """Whether a file lies in the cache, so that it can be fetched again."""
    return path.with_name(_MARK).exists()


def _files_in(cache: Path) -> Iterator[_FileInCache]:
    """All that was fetched into the folders of the cache, or is being fetched."""
    for folder in [entry for entry in os.scandir(cache) if entry.is_dir(follow_symlinks=False)]:
        if not os.path.lexists(os.path.join(folder, _MARK)):
            continue  # not ours
        with suppress(PermissionError, FileNotFoundError):
            for entry in os.scandir(folder):
                if entry.name == _MARK or not entry.is_file(follow_symlinks=False):
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    used = min(status.st_size, status.st_blocks * 512)
                    yield _FileInCache(Path(entry.path), used, status.st_mtime)


def _remove_first(victims: Iterator[_FileInCache]) -> int:
    """Remove the first file that nobody uses; its bytes, or 0 if there is none."""
    for file in victims:
        with suppress(OSError):
            descriptor = open_single(file.path)  # for writing, too: NFS locks nothing else for one alone
            try:
                if lock(descriptor) and is_at(descriptor, file.path):
                    file.path.unlink()
                    return max(1, file.bytes)
            finally:
                unlock(descriptor)
    return 0


def _allocate(descriptor: int, file_bytes: int, ranges: Sequence[tuple[int, int]]) -> OSError | None:
    """Allocate the file's space on disk; the error if there is not enough, or None."""
    try:
        os.ftruncate(descriptor, file_bytes)
        for start, count in ranges if hasattr(os, "posix_fallocate") else ():
            if count:
                os.posix_fallocate(descriptor, start, count)
    except OSError as error:
        if error.errno not in _NO_ALLOCATION:
            return error
    return None


def _open_to_use(path: Path, file_bytes: int) -> FileIO | None:
    """The file at `path`, open, which keeps it from being removed; None unless it is all there."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return None
    lock(file.fileno(), exclusive=False, wait=True)
    if os.fstat(file.fileno()).st_size == file_bytes and is_at(file.fileno(), path):
        with suppress(OSError):  # it is another user's, or the disk is for reading
            os.utime(file.fileno())  # was used last
        return file
    file.close()
    return None


def _open_alone(path: Path) -> int | None:
    """A descriptor of the file at `path`, made if missing, locked exclusively; None: others have a lock."""
    descriptor = open_single(path, os.O_CREAT)
    try:
        if lock(descriptor) and is_at(descriptor, path):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None

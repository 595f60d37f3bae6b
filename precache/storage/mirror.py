"""A dataset at a URL, seen as a folder of this machine: a file is fetched, whole, when it is first asked for.

    CACHE/DIGEST/                           of each dataset, by its manifest, whoever reads it from wherever
        NAME                                a file of the dataset: all of it, compared with its checksum
        .NAME.0123456789abcdef.partial      one that is being fetched
        .NAME.precache-fetch                who fetches it locks this (flock); what was fetched is noted in it

All processes of a machine share the folder. The system takes a lock back when its process ends, however that
ends: who waited for it goes on, and removes what the dead one left. A file that is in use is locked, too, so
that `precache.storage.room` does not remove it; a file without a note is somebody else's, and stays.
"""

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from precache.dataset.files import FileEntry
from precache.errors import PrecacheError, SettingError, StorageError, check_range
from precache.storage.local import (
    crc32c_file,
    open_regular,
    partial_of,
    remove_leftovers,
    temporary_path,
)
from precache.storage.objects import ObjectStore
from precache.storage.retries import Check, Patience, unchecked
from precache.storage.room import Fetched, Room, locked, note_path, read_note, write_note
from precache.storage.urls import Url, locate

if TYPE_CHECKING:
    from precache.formats import StoredSample

CACHE_DIR = "PRECACHE_CACHE_DIR"
"""Environment variable: the folder that keeps what is fetched."""
_AT_A_TIME = 8  # pieces of one file
_TRIES = 3  # of a file that comes with other bytes than the manifest says
_BRIEFLY = Patience(total_s=5.0, stall_s=5.0, connect_s=5.0)  # is asked whether a file may go


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
            check_range("cache_bytes", self.bytes, 1)


class Part(Protocol):
    """Some of a file, which are kept as a file of its size with holes."""

    @property
    def prefix(self) -> str:
        """Of the name in the cache: who asks for the same has the same."""

    def ranges(self) -> list[tuple[int, int]]:
        """First byte and number of bytes of each piece."""

    def is_right(self, number: int, content: bytes) -> bool:
        """Whether that is what piece `number` is to be."""

    def read(self, path: Path) -> "Mapping[int, StoredSample]":
        """Row -> sample, of the file at `path`."""


class Mirror:
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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(
                f"{self.folder}: cannot be made ({error.strerror}); give another cache_dir, or another "
                f"{CACHE_DIR}"
            ) from error

    @contextmanager
    def held(self, file: FileEntry) -> Iterator[Path]:
        """The path of a file, which is fetched if it is not there, and stays until the end of the block.

        Raises:
            StorageError: it cannot be fetched, or the storage has something else.
        """
        descriptor = self.hold(file)
        try:
            yield self.folder / file.name
        finally:
            os.close(descriptor)

    def hold(self, file: FileEntry, check: Check = unchecked, part: Part | None = None) -> int:
        """A descriptor of a file, which is fetched if it is not there, and stays until this is closed.

        Args:
            check: called now and then while it is fetched, by several threads; what it raises ends that.
            part: of the file, instead of all of it; its name is another.

        Raises:
            StorageError: as `held`.
        """
        path = self.folder / (file.name if part is None else f"{part.prefix}{file.name}")
        try:
            while (descriptor := _open_used(path, file.bytes)) is None:
                self._fetch(file, path, check, part)
        except OSError as error:
            raise StorageError(
                f"{self.url / file.name}: {file.bytes:,} bytes cannot be kept in {self.folder} "
                f"({error.strerror}); make room on that disk, or give another cache_dir or {CACHE_DIR}"
            ) from error
        return descriptor

    def forget(self, name: str) -> None:
        """Remove a damaged file, if it is there: it is fetched again when it is needed."""
        path = self.folder / name
        if not os.path.lexists(path):
            return
        with suppress(OSError), locked(note_path(path), self._waiting(path)) as note:
            if os.path.lexists(path):
                self._remove(path, note)

    def __reduce__(self) -> Any:
        return Mirror, (self.url, self._digest, self.cache)

    def _store(self) -> ObjectStore:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), ObjectStore(self.url, self._patience))
        return self._opened[1]

    def _fetch(self, file: FileEntry, path: Path, check: Check, part: Part | None) -> None:
        """Have the file, or the part of it, at `path`, fetched by this process or another one."""
        waiting = self._waiting(path, check)
        with locked(note_path(path), waiting) as note:
            if os.path.lexists(path):
                if path.stat().st_size == file.bytes:
                    return  # another one has fetched it
                self._remove(path, note)
            remove_leftovers(self.folder, (path.name,))
            temporary = temporary_path(path)
            room = Room(self.folder, self.cache.bytes, self._is_at_storage, waiting)
            try:
                ranges = [(0, file.bytes)] if part is None else part.ranges()
                descriptor = room.open_new(temporary, file.bytes, ranges)
                try:
                    if part is None:
                        self._download(file, temporary, descriptor, check)
                    else:
                        self._download_part(file, part, ranges, descriptor, check)
                finally:
                    os.close(descriptor)
                write_note(note, Fetched(path.name, str(self.url / file.name), file.bytes))
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)

    def _download(self, file: FileEntry, path: Path, descriptor: int, check: Check) -> None:
        """Write the file to `path`, and compare it with its checksum."""
        for _ in range(_TRIES):
            self._store().download(file.name, descriptor, file.bytes, check)
            found = crc32c_file(path)
            if found == file.crc32c:
                os.fsync(descriptor)
                return
        raise StorageError(
            f"{self.url / file.name}: its checksum is {found}, expected {file.crc32c} (fetched {_TRIES} "
            f"times); its bytes changed since it was written: put it there again"
        )

    def _download_part(
        self, file: FileEntry, part: Part, ranges: list[tuple[int, int]], descriptor: int, check: Check
    ) -> None:
        """Write the pieces where they belong, each compared with its checksum."""

        def fetch(number: int) -> None:
            start, count = ranges[number]
            for _ in range(_TRIES):
                check()
                content = self._store().get_range(file.name, start, count)
                if part.is_right(number, content):
                    os.pwrite(descriptor, content, start)
                    return
            raise StorageError(
                f"{self.url / file.name}: {count:,} bytes from {start:,} on are not the sample that was "
                f"written (checksum; fetched {_TRIES} times); put the file there again"
            )

        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            pieces = [pool.submit(fetch, number) for number in range(len(ranges))]
            try:
                for piece in pieces:
                    piece.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _remove(self, path: Path, note: int) -> None:
        if read_note(note) is None:
            raise StorageError(
                f"{path}: lies in the cache of {self.url}, and is not from there; give it another name"
            )
        path.unlink()

    def _is_at_storage(self, fetched: Fetched) -> bool:
        """Whether what was fetched, of this dataset or another one, can be fetched again."""
        try:
            url = locate(fetched.url)
            if not isinstance(url, Url):
                return False
            found = ObjectStore(url.parent, _BRIEFLY).find(url.name)
        except PrecacheError:
            return False
        return found is not None and found.bytes == fetched.bytes

    def _waiting(self, path: Path, check: Check = unchecked) -> "_Waiting":
        return _Waiting(path, 2 * self._patience.total_s, check)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Waits for who fetches the file at `path`, as long as there is progress."""

    path: Path
    most_s: float
    check: Check

    def __call__(self, waited_s: float) -> None:
        self.check()
        if waited_s < self.most_s:
            return
        partials = (entry for entry in os.scandir(self.path.parent) if partial_of(entry.name) is not None)
        with suppress(FileNotFoundError):  # it has just been finished
            if any(time.time() - entry.stat().st_mtime < self.most_s for entry in partials):
                return
            raise StorageError(
                f"{self.path}: another process fetches it, and has got nothing for {self.most_s:.0f} s; end "
                f"that process, or wait"
            )


def _open_used(path: Path, file_bytes: int) -> int | None:
    """A descriptor of the file at `path`, which keeps it from being removed; None unless it is all there."""
    import fcntl

    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        status = os.fstat(descriptor)
        if status.st_size == file_bytes and _is_at(descriptor, path):
            with suppress(PermissionError):  # of another user
                os.utime(descriptor)  # was used last: see `precache.storage.room`
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False

"""A dataset at a URL, seen as a folder of this machine: a file is fetched, whole, when it is first asked for.

    CACHE/DIGEST/                           of each dataset, by its manifest, whoever reads it from wherever
        NAME                                a file of the dataset: all of it, compared with its checksum
        .NAME.0123456789abcdef.partial      one that is being fetched
        .NAME.precache-fetch                who fetches it locks this (flock); what was fetched is noted in it

All processes of a machine share the folder. The system takes a lock back when its process ends, however that
ends: who waited for it goes on, and removes what the dead one left. A file that is in use is locked, too, so
that `precache.storage.room` does not remove it; a file without a note is somebody else's, and stays.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precache.errors import SettingError, StorageError, check_range
from precache.files import FileEntry
from precache.storage.local import (
    crc32c_file,
    open_append,
    open_new,
    open_regular,
    read_descriptor_at,
    remove_leftovers,
    temporary_path,
)
from precache.storage.objects import ObjectStore
from precache.storage.retries import Patience
from precache.storage.urls import Url

CACHE_DIR = "PRECACHE_CACHE_DIR"
"""Environment variable: the folder that keeps what is fetched."""
FETCH_SUFFIX = ".precache-fetch"
_TRIES = 3  # of a file that comes with other bytes than the manifest says
_POLL_S = 0.02
_NOTE_BYTES = 1 << 12


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


class Mirror:
    """The files of the dataset at a URL; several threads may use one, and it can be sent to other processes.

    Attributes:
        url: of the dataset.
        folder: where its files are, or will be.
    """

    def __init__(self, url: Url, digest: str, cache: Cache) -> None:
        self.url = url
        self.folder = Path(os.path.abspath(cache.folder)) / digest[:32]
        self._digest, self._cache = digest, cache
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
        path = self.folder / file.name
        while (descriptor := _open_used(path, file.bytes)) is None:
            self._fetch(file)
        try:
            yield path
        finally:
            os.close(descriptor)

    def __reduce__(self) -> Any:
        return Mirror, (self.url, self._digest, self._cache)

    def _store(self) -> ObjectStore:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), ObjectStore(self.url, self._patience))
        return self._opened[1]

    def _fetch(self, file: FileEntry) -> None:
        """Have the file at its path, fetched by this process or another one."""
        path = self.folder / file.name
        with _locked(path) as note:
            if path.exists():
                if path.stat().st_size == file.bytes:
                    return  # another one has fetched it
                self._remove(path, note)
            remove_leftovers(self.folder, (file.name,))
            temporary = temporary_path(path)
            try:
                self._download(file, temporary)
                _write_note(note, {"fetched": file.name, "pid": os.getpid()})
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)

    def _remove(self, path: Path, note: int) -> None:
        if "fetched" not in _read_note(note):
            raise StorageError(
                f"{path}: lies in the cache of {self.url}, and is not from there; give it another name"
            )
        path.unlink()

    def _download(self, file: FileEntry, path: Path) -> None:
        """Write the file to `path`, and compare it with its checksum."""
        store = self._store()
        descriptor = open_new(path)
        try:
            for _ in range(_TRIES):
                store.download(file.name, descriptor, file.bytes)
                found = crc32c_file(path)
                if found == file.crc32c:
                    os.fsync(descriptor)
                    return
        finally:
            os.close(descriptor)
        raise StorageError(
            f"{self.url / file.name}: its checksum is {found}, expected {file.crc32c} (fetched {_TRIES} "
            f"times); its bytes changed since it was written: put it there again"
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
            with suppress(OSError):  # somebody else's; then it does not count
                os.utime(descriptor)  # used last: `precache.storage.room`
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


def note_path(path: Path) -> Path:
    """Of the file that says whether the one at `path` was fetched, and is locked meanwhile."""
    return path.with_name(f".{path.name}{FETCH_SUFFIX}")


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """A descriptor of the note of `path`, locked; who has it is waited for, as long as he lives."""
    import fcntl

    descriptor = open_append(note_path(path), os.O_CREAT)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
        yield descriptor
    finally:
        with suppress(OSError):  # a process that was forked meanwhile may have it open, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _write_note(descriptor: int, content: dict[str, object]) -> None:
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(content).encode())


def _read_note(descriptor: int) -> dict[str, object]:
    """Empty where there is none."""
    try:
        content = json.loads(read_descriptor_at(descriptor, 0, _NOTE_BYTES))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}

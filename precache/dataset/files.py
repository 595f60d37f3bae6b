"""The files of a dataset, as manifest and journal describe them."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TypeAlias

import google_crc32c

from precache.errors import os_reason
from precache.storage import crc32c_file
from precache.storage.objects import PART_BYTES, ObjectStore
from precache.storage.retries import Check, ObjectNotFoundError, call_for_each, unchecked
from precache.storage.shard_cache import CachedFiles

_AT_A_TIME = 8  # parts of objects that are read; so many are in memory
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{,127}")
_CRC32C = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a dataset: its name in the dataset's folder, bytes, and CRC-32C in hex.

    Manifests and journals may be forged, and paths and URLs are made of these names alone.

    Raises:
        ValueError: a value that this project never writes, such as a name that leads elsewhere.
    """

    name: str
    bytes: int
    crc32c: str

    def __post_init__(self) -> None:
        named = isinstance(self.name, str) and _NAME.fullmatch(self.name)
        sized = type(self.bytes) is int and 0 <= self.bytes < 2**63
        if not (named and sized and isinstance(self.crc32c, str) and _CRC32C.fullmatch(self.crc32c)):
            about = f"{self.name!r:.99} of {self.bytes!r:.99} bytes, CRC {self.crc32c!r:.99}"
            raise ValueError(f"file {about}: not as this project writes it")


Held: TypeAlias = Callable[[FileEntry], AbstractContextManager[Path]]
"""Has a file lie on this machine until the end of a block, which gets its path; can be pickled."""


def in_folder(folder: Path) -> Held:
    """A `Held` for files that are in `folder`."""
    return partial(_in_folder, folder)


@contextmanager
def _in_folder(folder: Path, file: FileEntry) -> Iterator[Path]:
    yield folder / file.name


def file_problem(folder: Path, file: FileEntry, *, content: bool = True) -> str | None:
    """What is wrong with a file, as one line, or None; `content=False` looks at its size alone."""
    path = folder / file.name
    try:
        found_bytes = path.stat().st_size
        crc32c = crc32c_file(path) if content and found_bytes == file.bytes else file.crc32c
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return f"{path}: cannot be read ({os_reason(error)})"
    if found_bytes != file.bytes:
        return f"{path}: expected {file.bytes:,} bytes, got {found_bytes:,}"
    if crc32c != file.crc32c:
        return f"{path}: its checksum differs from the manifest's (the bytes changed)"
    return None


def open_checked_file(mirror: CachedFiles, file: FileEntry, check: Check = unchecked) -> FileIO:
    """Hold a file of the cache whose bytes match its checksum; one that is damaged there is fetched again."""
    opened = mirror.open_file(file, check)
    if file_problem(mirror.folder, file) is None:
        return opened
    opened.close()
    mirror.forget(file.name)
    return mirror.open_file(file, check)


def in_cache(mirror: CachedFiles) -> Held:
    """A `Held` for files of a URL, see `open_checked_file`."""
    return partial(_in_cache, mirror)


@contextmanager
def _in_cache(mirror: CachedFiles, file: FileEntry) -> Iterator[Path]:
    with open_checked_file(mirror, file):
        yield mirror.folder / file.name


def first_problem(folder: Path, files: Iterable[FileEntry]) -> str | None:
    """As `file_problem`, of the first that is not there with its size; None if all are."""
    return next(filter(None, (file_problem(folder, file, content=False) for file in files)), None)


def object_problems(store: ObjectStore, files: Iterable[FileEntry]) -> Iterator[str | None]:
    """Of each of the files that lie below a URL in turn, as `file_problem` of one; all bytes are fetched.

    Raises:
        StorageError: the storage refuses or does not answer.
    """
    for file in files:
        yield _check_object(store, file)


def _check_object(store: ObjectStore, file: FileEntry) -> str | None:
    where, found = store.url / file.name, store.find(file.name)
    if found is None:
        return f"{where}: missing"
    if found.bytes != file.bytes:
        return f"{where}: expected {file.bytes:,} bytes, got {found.bytes:,}"
    etag, crc, step = found.etag, 0, _AT_A_TIME * PART_BYTES

    def read(start: int, check: Check) -> bytes:
        return store.get_range(file.name, start, min(PART_BYTES, file.bytes - start), etag, check)

    try:
        for begin in range(0, file.bytes, step):
            starts = range(begin, min(begin + step, file.bytes), PART_BYTES)
            for part in call_for_each(read, starts, _AT_A_TIME):
                crc = google_crc32c.extend(crc, part)
    except ObjectNotFoundError:
        return f"{where}: missing"
    if f"{crc:08x}" != file.crc32c:
        return f"{where}: its checksum differs from the manifest's (the bytes changed)"
    return None

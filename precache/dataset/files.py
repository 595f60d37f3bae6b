"""Files of a dataset as manifest and sidecars describe them: where they lie, and whether they are intact."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Annotated, TypeAlias

import google_crc32c
from msgspec import Meta, Struct

from precache.errors import DatasetError, os_errors_as
from precache.storage import crc32c_file
from precache.storage.objects import PART_BYTES, ObjectStore
from precache.storage.retries import Check, ObjectNotFoundError, call_for_each, no_check
from precache.storage.shard_cache import CachedFiles
from precache.storage.stored_json import Count

READ_REMEDY = "check its permissions and its disk"
"""Remedy for a file of a dataset that cannot be read, and may be intact."""
_AT_A_TIME = 8  # parts of an object that are read, and held in memory, at once
FileName: TypeAlias = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")]
"""Name of a file that leads to no other folder: paths are made of it, and a manifest may be forged."""


class FileEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """File of a dataset: its name in the dataset's folder, size in bytes, and CRC-32C in hex."""

    name: FileName
    bytes: Count
    crc32c: Annotated[str, Meta(pattern=r"\A[0-9a-f]{8}\Z")]


LocalFile: TypeAlias = Callable[[FileEntry], AbstractContextManager[Path]]
"""Function that makes a file of a dataset local: its context manager yields the path of the file.

The file is fetched first if that is needed, and stays at the path until the block ends. Can be pickled.
"""


def local_file_in_folder(folder: Path) -> LocalFile:
    """Make a `LocalFile` for the files in `folder`."""
    return partial(_local_file_in_folder, folder)


@contextmanager
def _local_file_in_folder(folder: Path, file: FileEntry) -> Iterator[Path]:
    yield folder / file.name


def file_problem(folder: Path, file: FileEntry, *, content: bool = True) -> str | None:
    """Describe in one line what is wrong with a file in `folder`; None if it is intact.

    Args:
        folder: folder of the dataset.
        file: the file as it was written.
        content: compare the checksum, too, for which the whole file is read; else the size alone.

    Raises:
        DatasetError: it cannot be read now, which is no damage of the file.
    """
    path = folder / file.name
    with os_errors_as(DatasetError, "cannot be read", READ_REMEDY, path=path):
        try:
            path_bytes = path.stat().st_size
            if path_bytes != file.bytes:
                return f"{path}: expected {file.bytes:,} bytes, got {path_bytes:,}"
            if content and crc32c_file(path) != file.crc32c:
                return f"{path}: its checksum is not the recorded one (the bytes changed)"
        except FileNotFoundError:
            return f"{path}: missing"
    return None


def open_checked_file(mirror: CachedFiles, file: FileEntry, check: Check = no_check) -> FileIO:
    """Open a file of the cache, compared with its checksum; a damaged one is fetched once more.

    The file stays in the cache until it is closed.
    """
    opened = mirror.open_file(file, check)
    if file_problem(mirror.folder, file) is None:
        return opened
    opened.close()
    mirror.forget(file.name)
    return mirror.open_file(file, check)


def local_file_in_cache(mirror: CachedFiles) -> LocalFile:
    """Make a `LocalFile` for the files of a dataset at a URL, see `open_checked_file`."""
    return partial(_local_file_in_cache, mirror)


@contextmanager
def _local_file_in_cache(mirror: CachedFiles, file: FileEntry) -> Iterator[Path]:
    with open_checked_file(mirror, file):
        yield mirror.folder / file.name


def first_problem(folder: Path, files: Iterable[FileEntry]) -> str | None:
    """Describe the first file that is missing or has another size; None if there is none."""
    for file in files:
        if problem := file_problem(folder, file, content=False):
            return problem
    return None


def object_problems(store: ObjectStore, files: Iterable[FileEntry]) -> Iterator[str | None]:
    """Yield what is wrong with each of the files below a URL, None if it is intact; fetches all bytes.

    Raises:
        StorageError: the storage refuses or does not answer.
    """
    for file in files:
        yield _object_problem(store, file)


def _object_problem(store: ObjectStore, file: FileEntry) -> str | None:
    url, info = store.url / file.name, store.find(file.name)
    if info is None:
        return f"{url}: missing"
    if info.bytes != file.bytes:
        return f"{url}: expected {file.bytes:,} bytes, got {info.bytes:,}"
    crc, step = 0, _AT_A_TIME * PART_BYTES

    def read(start: int, check: Check) -> bytes:
        return store.get_range(file.name, start, min(PART_BYTES, file.bytes - start), info.etag, check)

    try:
        for begin in range(0, file.bytes, step):
            starts = range(begin, min(begin + step, file.bytes), PART_BYTES)
            for part in call_for_each(read, starts, _AT_A_TIME):
                crc = google_crc32c.extend(crc, part)
    except ObjectNotFoundError:
        return f"{url}: missing"
    if f"{crc:08x}" != file.crc32c:
        return f"{url}: its checksum is not the recorded one (the bytes changed)"
    return None

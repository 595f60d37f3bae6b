"""Convert into a URL: journal, lock and unfinished shards are on this machine, finished shards at the URL.

    CACHE/conversions/DIGEST/                 CACHE: PRECACHE_CACHE_DIR or ~/.cache/precache; DIGEST: of URL
        journal.jsonl                         the same as for a conversion into a folder
        .train-00003.tar.0123....partial      a shard, until it is written and pushed
        dataset.index, dataset.json           at the end, until they are pushed
    CACHE/conversions/.DIGEST.precache-lock   held while a process of this machine converts
    URL/train-00000.tar ...                   each shard as soon as it is finished
    URL/dataset.index, rejected.csv           at the end
    URL/dataset.json                          last, if there is none yet; it makes the files a dataset

With the engine `ray` each node writes shards into such a folder of its own and pushes them; the journal is on
the machine where the command runs. So the same command continues there; on another machine it starts over.

The lock keeps the processes of one machine apart, and `precache.sharing.publisher` those of several machines.
"""

import hashlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path

from precache.conversion.journal import (
    JOURNAL_NAME,
    Target,
    WrittenShard,
    own_names,
    own_names_in,
    read_header,
)
from precache.dataset.converted import is_converted, open_dataset
from precache.dataset.files import FileEntry
from precache.dataset.manifest import MANIFEST_NAME, Manifest
from precache.errors import DatasetError, WorkerError
from precache.reporting import abridge, quantity, warn
from precache.sharing.publisher import Publisher, dataset_files, difference
from precache.storage import is_leftover, read_regular
from precache.storage.locks import hold_lock
from precache.storage.objects import ObjectInfo, ObjectStore, endpoint_of
from precache.storage.output import OutputFile
from precache.storage.shard_cache import Cache
from precache.storage.urls import Location, Url

_PROBED_OBJECTS = 20  # read first, to see whether somebody else's files are at the URL


def working_folder(url: Url) -> Path:
    """Return the folder of this machine for conversions into `url` at the current endpoint."""
    digest = hashlib.sha256(f"{endpoint_of(url.scheme)} {url}".encode()).hexdigest()[:16]
    return Path(Cache().folder).absolute() / "conversions" / digest


@contextmanager
def locked_working_folder(url: Url) -> Iterator[Path]:
    """Lock the working folder of `url` for the block; remove it at the end if it is empty.

    Raises:
        DatasetError: another process of this machine converts into `url`.
    """
    folder = working_folder(url)
    with hold_lock(folder, shown=url):
        try:
            yield folder
        finally:
            _remove_if_empty(folder)


class FilesAtUrl:
    """The files of a conversion into a URL, with the methods of `journal.FilesInFolder`."""

    def __init__(self, url: Url, folder: Path) -> None:
        self.folder = folder
        self.place: Location = url
        self._url = url
        self._publisher = Publisher(url)

    def check_free(self, names: frozenset[str]) -> None:
        """Raise DatasetError if the URL holds other files than those of this conversion, begun elsewhere.

        The files of a conversion are recognised by name, and by the checksum that precache puts beside each.
        """
        names -= {JOURNAL_NAME, MANIFEST_NAME}
        store = self._publisher.store
        objects = store.list_first(_PROBED_OBJECTS)  # not all, because a bucket may hold millions
        others = [info.name for info in objects if info.name not in names]
        if objects and not others:
            objects = store.list()
            checked = self._publisher.with_checksums(objects)
            others = [name for name, info in checked.items() if name not in names or info.crc32c is None]
        if others:
            raise DatasetError(
                f"is not empty, and holds files that no conversion on this machine wrote ({abridge(others)})",
                path=self._url,
                remedy="choose another DST, or remove them yourself",
            )
        if objects:
            warn(
                f"{self._url}: holds {quantity(len(objects), 'file')} of a conversion whose journal is not "
                f"on this machine, so it starts over; only the machine where it began can continue it"
            )

    def find_problem(self, shard: WrittenShard) -> str | None:
        """Return how an object of a shard differs from what was written, in a phrase; None if none does."""
        for file in shard.entry.files:
            problem = difference(self._initial_objects.get(file.name), file)
            if problem:
                return f"{self._url / file.name}: {problem}"
        return None

    def remove(self, names: frozenset[str]) -> None:
        """Remove the objects with these names; one without a checksum beside it is not ours, and stays."""
        self._publisher.store.delete(_own_objects(self._publisher.find(names)))

    def publish(self, manifest: Manifest) -> None:
        """Push index, list of rejects and, last, the manifest; then remove the working folder.

        Raises:
            DatasetError: a shard was changed after it was pushed, or another process has finished a dataset.
        """
        files = dataset_files(manifest, self.folder)
        for file in files:
            path = self.folder / file.name
            if path.exists():  # index and list of rejects; the shards were pushed before
                self._publisher.send(path, file)
        self._publisher.publish(read_regular(self.folder / MANIFEST_NAME), files)
        remove_working_folder(self.folder)

    @cached_property
    def _initial_objects(self) -> dict[str, ObjectInfo]:
        """The objects at the URL before this run, listed once for all shards."""
        return self._publisher.with_checksums(self._publisher.store.list())


def push_shard(url: Url, written: Sequence[OutputFile], files: Sequence[FileEntry]) -> None:
    """Push the written files of a shard, and remove them here.

    Args:
        written: the shard's files under temporary names.
        files: entries of the files to push; none if every picture of the shard was rejected.

    Raises:
        DatasetError: another process has finished a dataset there.
        StorageError: the storage does not take them.
    """
    publisher, check = _publisher(url), partial(_check_parent, url)
    try:
        for file, entry in zip(written, files, strict=False):
            publisher.send(file.temporary, entry, check)
    finally:
        for file in written:
            file.temporary.unlink(missing_ok=True)


def remove_working_folder(folder: Path) -> None:
    """Remove the files that a conversion into a URL has left on this machine, the journal last."""
    for path in _own_files(folder):
        path.unlink(missing_ok=True)
    _remove_if_empty(folder)


def remove_finished_working_folder(folder: Path, target: Target) -> None:
    """Remove the working folder of a conversion to `target` that was killed after it pushed its manifest."""
    header = read_header(folder / JOURNAL_NAME)
    if header is not None and own_names(header) and not target.differences(header):
        remove_working_folder(folder)


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Objects and files that an unfinished conversion into a URL has left, and no finished dataset needs.

    Attributes:
        url: destination of the conversion.
        objects: names of the objects that it has pushed.
        files: its files on this machine, the journal last.
        bytes: bytes that all of them take.
    """

    url: Url
    objects: tuple[str, ...]
    files: tuple[Path, ...]
    bytes: int

    def remove(self) -> None:
        """Remove the objects and files; raises StorageError or OSError if that fails."""
        ObjectStore(self.url).delete(self.objects)
        remove_working_folder(working_folder(self.url))


@contextmanager
def leftovers(url: Url) -> Iterator[Leftovers]:
    """Find the leftovers of a conversion into `url` that began on this machine, and hold its lock.

    Raises:
        DatasetError: a process is converting into it, or its journal cannot be read.
        StorageError: the storage does not answer.
    """
    with locked_working_folder(url) as folder:
        names = own_names_in(folder)
        if not names and os.path.lexists(folder / JOURNAL_NAME):
            raise DatasetError(
                "not a journal that this release can read, so it is unknown which files are ours",
                path=folder / JOURNAL_NAME,
                remedy="remove what you do not need yourself",
            )
        if names and is_converted(url):
            names -= open_dataset(url).manifest.own_names | {MANIFEST_NAME}
        infos = Publisher(url).find(names) if names else {}
        objects, files = _own_objects(infos), _own_files(folder)
        total_bytes = sum(infos[name].bytes for name in objects) + sum(path.lstat().st_size for path in files)
        yield Leftovers(url, tuple(objects), tuple(files), total_bytes)


def _own_objects(infos: dict[str, ObjectInfo]) -> list[str]:
    """Return the names of the objects that this project has pushed: those with a checksum beside them."""
    return [name for name, info in infos.items() if info.crc32c is not None]


def _own_files(folder: Path) -> list[Path]:
    """Return the files in a working folder that its journal names, the journal last; none without one."""
    names, journal = own_names_in(folder), folder / JOURNAL_NAME
    if not names:
        return []
    files = []
    for path in sorted(folder.iterdir()):
        is_own = path.name in names or is_leftover(path, names)
        if is_own and path != journal and path.is_file() and not path.is_symlink():
            files.append(path)
    return [*files, journal]


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # it is missing, or not empty
        folder.rmdir()


@lru_cache(4)
def _publisher(url: Url) -> Publisher:
    """Return the publisher of this process for `url`, which keeps its connections open."""
    return Publisher(url)


def _check_parent(url: Url) -> None:
    """Raise WorkerError if the parent has ended: the next run may have finished the dataset already."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise WorkerError("nothing more is pushed: the parent process has stopped", path=url)

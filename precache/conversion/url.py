"""A conversion whose destination is a URL: journal, lock and unfinished shards on this machine, shards there.

    CACHE/conversions/DIGEST/                 CACHE: PRECACHE_CACHE_DIR or ~/.cache/precache; DIGEST: of URL
        journal.jsonl                         as of a conversion into a folder
        .train-00003.tar.0123....partial      a shard that is written or pushed; afterwards it is removed
        dataset.index, dataset.json           at the end, until they are pushed
    CACHE/conversions/.DIGEST.precache-lock   held while a process of this machine converts
    URL/train-00000.tar ...                   each shard as soon as it is finished
    URL/dataset.index, rejected.csv           at the end
    URL/dataset.json                          last, if there is none; without it nothing there is a dataset

With the engine `ray` each node writes shards into such a folder of its own and pushes them; the journal is
on the machine where the command runs. So the same command continues there; on another machine it starts over.

The lock keeps the processes of one machine apart, and `precache.sharing.publisher` those of two. A conversion
that is given up is removed by `precache clean`, there and here: see `Leftovers`.
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
from precache.errors import DatasetError, SettingError, WorkerError
from precache.reporting import abridge, quantity, warn
from precache.sharing.publisher import Publisher, difference, files_of
from precache.storage import is_leftover, read_regular
from precache.storage.locks import hold_lock
from precache.storage.objects import ObjectInfo, ObjectStore, endpoint_of
from precache.storage.output import OutputFile
from precache.storage.shard_cache import Cache
from precache.storage.urls import Location, Url

_PROBED = 20  # objects that say whether a prefix is free


def working_folder(url: Url) -> Path:
    """The folder of this machine for conversions into `url`; another one for each endpoint."""
    digest = hashlib.sha256(f"{endpoint_of(url.scheme)} {url}".encode()).hexdigest()[:16]
    return Path(Cache().folder).absolute() / "conversions" / digest


@contextmanager
def locked_working_folder(url: Url) -> Iterator[Path]:
    """`working_folder`, held by this process; an empty one is removed at the end.

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
    """The files of a conversion into a URL, as `precache.conversion.journal.FilesInFolder` has them."""

    def __init__(self, url: Url, folder: Path) -> None:
        self.folder, self.dataset_names = folder, frozenset[str]()
        self.place: Location = url
        self._url = url
        self._publisher = Publisher(url)

    def check_free(self, names: frozenset[str]) -> None:
        """Raise DatasetError if something lies there, unless another machine started this very conversion.

        Such files are recognised by name, and by the checksum that precache puts beside each object.
        """
        names -= {JOURNAL_NAME, MANIFEST_NAME}
        store = self._publisher.store
        there = store.first(_PROBED)  # it may be a bucket of millions
        others = [info.name for info in there if info.name not in names]
        if there and not others:
            there = store.list()
            checked = self._publisher.with_checksums(there)
            others = [name for name, info in checked.items() if name not in names or info.crc32c is None]
        if others:
            raise DatasetError(
                f"{self._url}: is not empty, and holds files that no conversion on this machine wrote "
                f"({abridge(others)}); choose another DST, or remove them yourself"
            )
        if there:
            warn(
                f"{self._url}: holds {quantity(len(there), 'file')} of a conversion whose journal is not on "
                f"this machine, so it starts over; only the machine where it began can continue it"
            )

    def problem_of(self, shard: WrittenShard) -> str | None:
        """See `FilesInFolder`; all shards are looked for at once."""
        for file in shard.entry.files:
            if problem := difference(self._there_at_first.get(file.name), file):
                return f"{self._url / file.name}: {problem}"
        return None

    def remove(self, names: frozenset[str]) -> None:
        """See `FilesInFolder`; what has no checksum beside it is not ours."""
        self._publisher.store.delete(_sent(self._publisher.find(names)))

    def publish(self, manifest: Manifest) -> None:
        """Push what was written here at the end of the conversion, the manifest last, and leave nothing here.

        Raises:
            DatasetError: a shard is not as it was pushed, or another process has finished a dataset there.
        """
        files = files_of(manifest, self.folder)
        for file in files:
            path = self.folder / file.name
            if path.exists():  # index and list of rejects: shards are there
                self._publisher.send(path, file)
        self._publisher.publish(read_regular(self.folder / MANIFEST_NAME), files)
        remove_working_folder(self.folder)

    @cached_property
    def _there_at_first(self) -> dict[str, ObjectInfo]:
        return self._publisher.with_checksums(self._publisher.store.list())


def push_shard(url: Url, written: Sequence[OutputFile], files: Sequence[FileEntry]) -> None:
    """Push the written files of a shard, as far as they are `files`, and remove them here.

    Raises:
        DatasetError: another process has finished a dataset there.
        StorageError: the storage does not take them.
    """
    publisher, check = _publisher(url), partial(_check_parent, url)
    try:
        for file, entry in zip(written, files, strict=False):  # none if every picture was rejected
            publisher.send(file.temporary, entry, check)
    finally:
        for file in written:
            file.temporary.unlink(missing_ok=True)


def refuse_change(url: Url, *, overwrite: bool, update: bool) -> None:
    """Raise SettingError if a finished dataset is to be changed: objects cannot change places in one step."""
    if overwrite:
        raise SettingError(
            f"{url}: holds a finished dataset, which --overwrite cannot replace in one step, as it does "
            f"a folder; choose another URL, or remove that one yourself"
        )
    if update:
        raise SettingError(
            f"{url}: --update works on a folder; fetch the dataset with 'precache pull {url} DIR', update "
            f"DIR, and bring it back with 'precache push DIR {url}'"
        )


def remove_working_folder(folder: Path) -> None:
    """Remove what a conversion into a URL has left on this machine, the journal last."""
    for path in _files_here(folder):
        path.unlink(missing_ok=True)
    _remove_if_empty(folder)


def remove_if_same(folder: Path, target: Target) -> None:
    """Remove the working folder of a conversion to `target` that was killed after its manifest was put."""
    header = read_header(folder / JOURNAL_NAME)
    if header is not None and own_names(header) and not target.differences(header):
        remove_working_folder(folder)


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Objects and files that an unfinished conversion into a URL has left, and no finished dataset needs.

    Attributes:
        url: where it was converted to.
        objects: names of what it has pushed.
        files: on this machine, its journal last.
        bytes: that all of them take.
    """

    url: Url
    objects: tuple[str, ...]
    files: tuple[Path, ...]
    bytes: int

    def remove(self) -> None:
        """Remove them; raises StorageError or OSError where one cannot be."""
        ObjectStore(self.url).delete(self.objects)
        remove_working_folder(working_folder(self.url))


@contextmanager
def leftovers(url: Url) -> Iterator[Leftovers]:
    """Find the leftovers of a conversion into `url` that began on this machine; no other begins meanwhile.

    Raises:
        DatasetError: a process is converting into it, or its journal cannot be read.
        StorageError: the storage does not answer.
    """
    with locked_working_folder(url) as folder:
        names = own_names_in(folder)
        if not names and os.path.lexists(folder / JOURNAL_NAME):
            raise DatasetError(
                f"{folder / JOURNAL_NAME}: not a journal that this release can read, so it is unknown which "
                f"files are ours; remove what you do not need yourself"
            )
        if names and is_converted(url):
            names -= open_dataset(url).manifest.own_names | {MANIFEST_NAME}
        found = Publisher(url).find(names) if names else {}
        objects, files = _sent(found), _files_here(folder)
        taken = sum(found[name].bytes for name in objects) + sum(path.lstat().st_size for path in files)
        yield Leftovers(url, tuple(objects), tuple(files), taken)


def _sent(found: dict[str, ObjectInfo]) -> list[str]:
    """Names of the objects that this project has put there."""
    return [name for name, info in found.items() if info.crc32c is not None]


def _files_here(folder: Path) -> list[Path]:
    """The files in a working folder that its journal names, the journal last; none without one."""
    names, journal = own_names_in(folder), folder / JOURNAL_NAME
    found = []
    for path in sorted(folder.iterdir()) if names else ():
        ours = path.name in names or is_leftover(path, names)
        if ours and path != journal and path.is_file() and not path.is_symlink():
            found.append(path)
    return [*found, journal] if names else []


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # it is not there, or holds something
        folder.rmdir()


@lru_cache(4)
def _publisher(url: Url) -> Publisher:
    """One for each process: its connections are used again."""
    return Publisher(url)


def _check_parent(url: Url) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # the next run may have finished the dataset already
        raise WorkerError(f"{url}: nothing more is pushed: the parent process has stopped")

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

The lock keeps the processes of one machine apart. Of converters on two machines, at most one puts the
manifest; the other finds that manifest, or its own shards replaced, and says so. What cannot be held back are
the bytes of an upload that was under way while the other one finished: `precache verify` finds those.
"""

import hashlib
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache, partial
from pathlib import Path

from precache.conversion.journal import (
    JOURNAL_NAME,
    NOTHING_ELSE_MAY_WRITE,
    Target,
    WrittenShard,
    own_names,
    own_names_in,
    read_header,
)
from precache.dataset.files import FileEntry
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError, SettingError, WorkerError
from precache.reporting import counted, warn
from precache.storage import crc32c_file, is_leftover, read_regular
from precache.storage.locks import hold_lock
from precache.storage.objects import ObjectInfo, ObjectStore, endpoint_of
from precache.storage.output import OutputFile
from precache.storage.shard_cache import Cache
from precache.storage.urls import Location, Url

_AT_A_TIME = 16  # requests
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
            remove_if_empty(folder)


class FilesAtUrl:
    """The files of a conversion into a URL, as `precache.conversion.journal.FilesInFolder` has them."""

    def __init__(self, url: Url, folder: Path) -> None:
        self.folder, self.dataset_names = folder, frozenset[str]()
        self.place: Location = url
        self._url = url
        self._store = ObjectStore(url)

    def check_free(self, names: frozenset[str]) -> None:
        """Raise DatasetError if something lies there, unless another machine started this very conversion.

        Such files are recognised by name, and by the checksum that precache puts beside each object.
        """
        names -= {JOURNAL_NAME, MANIFEST_NAME}
        first = (info.name for info in self._store.first(_PROBED))
        others, there = [name for name in first if name not in names], []
        if not others:  # else it may be a bucket of millions
            there = [info.name for info in self._store.list()]
            with ThreadPoolExecutor(_AT_A_TIME) as pool:
                checksums = [*pool.map(self._store.crc32c_of, there)]
            found = zip(there, checksums, strict=True)
            others = [name for name, crc32c in found if name not in names or crc32c is None]
        if others:
            more = " and others" if len(others) > 3 else ""
            raise DatasetError(
                f"{self._url}: is not empty, and holds files that no conversion on this machine wrote "
                f"({', '.join(others[:3])}{more}); choose another DST, or remove them yourself"
            )
        if there:
            warn(
                f"{self._url}: holds {counted(len(there), 'file')} of a conversion whose journal is not on "
                f"this machine, so it starts over; only the machine where it began can continue it"
            )

    def problem_of(self, shard: WrittenShard) -> str | None:
        """See `FilesInFolder`; of many shards, objects are listed once."""
        return self._why_not_whole(shard, self._there_at_first)

    def remove(self, names: frozenset[str]) -> None:
        """See `FilesInFolder`."""
        self._store.delete([name for name in self._listed() if name in names])

    def check_whole(self, shards: Iterable[WrittenShard]) -> None:
        """Raise DatasetError unless the storage holds what was pushed."""
        found = self._listed()
        for shard in shards:
            if problem := self._why_not_whole(shard, found):
                raise DatasetError(f"{problem}; {NOTHING_ELSE_MAY_WRITE}")

    @cached_property
    def _there_at_first(self) -> dict[str, ObjectInfo]:
        return self._listed()

    def _listed(self) -> dict[str, ObjectInfo]:
        return {info.name: info for info in self._store.list()}

    def _why_not_whole(self, shard: WrittenShard, found: Mapping[str, ObjectInfo]) -> str | None:
        if len(shard.etags) != len(shard.entry.files):
            return f"{self._url}: the journal does not say that {shard.entry.name} was pushed"
        for file, etag in zip(shard.entry.files, shard.etags, strict=True):
            there = found.get(file.name)
            if there is None:
                return f"{self._url / file.name}: missing"
            if there.bytes != file.bytes:
                return f"{self._url / file.name}: expected {file.bytes:,} bytes, got {there.bytes:,}"
            if self._store.is_replaced(there, etag):
                return f"{self._url / file.name}: was replaced after it was pushed"
        return None


def push_shard(url: Url, written: Sequence[OutputFile], files: Sequence[FileEntry]) -> tuple[str, ...]:
    """Push the written files of a shard, as far as they are `files`, and remove them here; their etags.

    Raises:
        DatasetError: another process has finished a dataset there.
        StorageError: the storage does not take them.
    """
    store, check = _store(url), partial(_check_parent, url)
    try:
        if files:  # else every picture was rejected
            _check_unfinished(store)
        return tuple(
            store.upload(file.temporary, entry.name, crc32c=entry.crc32c, check=check) or ""
            for file, entry in zip(written, files, strict=False)
        )
    finally:
        for file in written:
            file.temporary.unlink(missing_ok=True)


def publish(url: Url, folder: Path) -> None:
    """Push what `commit` wrote into `folder`: the manifest last, and only if no other process has put one.

    Raises:
        DatasetError: another process has.
    """
    store = ObjectStore(url)
    _check_unfinished(store)
    names = own_names_in(folder) - {JOURNAL_NAME, MANIFEST_NAME}
    for path in sorted(folder.iterdir()):
        if path.name in names:
            store.upload(path, path.name, crc32c=crc32c_file(path))
    content = read_regular(folder / MANIFEST_NAME)
    if store.put_if(MANIFEST_NAME, content) is None and store.get(MANIFEST_NAME) != content:
        raise _finished_by_another(url)


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
    names = own_names_in(folder)
    for path in unfinished_files(folder):
        path.unlink(missing_ok=True)
    if names:
        (folder / JOURNAL_NAME).unlink()
    remove_if_empty(folder)


def remove_if_same(folder: Path, target: Target) -> None:
    """Remove the working folder of a conversion to `target` that was killed after its manifest was put."""
    header = read_header(folder / JOURNAL_NAME)
    if header is not None and own_names(header) and not target.differences(header):
        remove_working_folder(folder)


def unfinished_files(folder: Path) -> list[Path]:
    """The files in a working folder that its journal names, but for the journal."""
    names = own_names_in(folder) - {JOURNAL_NAME}
    found = filter(is_plain_file, sorted(folder.iterdir()) if folder.is_dir() else ())
    return [path for path in found if path.name in names or is_leftover(path, names | {JOURNAL_NAME})]


def is_plain_file(path: Path) -> bool:
    """Whether it is a file, and no link to one."""
    return path.is_file() and not path.is_symlink()


def remove_if_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with suppress(OSError):  # it is not there, or holds something
        folder.rmdir()


@lru_cache(4)
def _store(url: Url) -> ObjectStore:
    """One for each process: its connections are used again."""
    return ObjectStore(url)


def _check_parent(url: Url) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # the next run may have finished the dataset already
        raise WorkerError(f"{url}: nothing more is pushed: the parent process has stopped")


def _check_unfinished(store: ObjectStore) -> None:
    if store.find(MANIFEST_NAME) is not None:
        raise _finished_by_another(store.url)


def _finished_by_another(url: Url) -> DatasetError:
    return DatasetError(
        f"{url}: another process has finished a dataset there meanwhile; check it with 'precache verify "
        f"{url}', or choose another DST"
    )

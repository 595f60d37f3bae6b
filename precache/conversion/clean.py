"""What killed conversions have left: found by precache's own records, listed, and removed on request.

A record is a journal or a manifest; a name that is in neither is not ours. What a living process writes is
never touched: it holds its lock. The records of a conversion into a URL are on the machine where it began;
it can be cleaned up only there.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from precache.conversion.destination import folders_beside, resolve
from precache.conversion.journal import JOURNAL_NAME, own_names_in
from precache.conversion.url import is_plain_file, locked_working_folder, remove_if_empty, unfinished_files
from precache.dataset.converted import is_converted, open_dataset
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError
from precache.storage import fsync_folder, is_leftover, staging
from precache.storage.locks import hold_lock, lock_path
from precache.storage.objects import ObjectStore
from precache.storage.urls import Location, Url


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Files that may be removed.

    Attributes:
        place: where they were looked for.
        finished: whether a finished dataset lies there, which stays.
        shards: names there of files of an unfinished conversion, or update, that is given up with them.
        others: files on this machine that nothing else uses.
        folders: folders, on this machine, of processes that are gone.
        bytes: that all of them take.
    """

    place: Location
    finished: bool
    shards: tuple[str, ...] = ()
    others: tuple[Path, ...] = ()
    folders: tuple[Path, ...] = ()
    bytes: int = field(default=0, compare=False)

    def __bool__(self) -> bool:
        return bool(self.shards or self.others or self.folders)

    def remove(self) -> None:
        """Remove them; raises StorageError or OSError where one cannot be."""
        files = list(self.others)
        if isinstance(self.place, Url):
            ObjectStore(self.place).delete(self.shards)
        else:
            files[:0] = [self.place / name for name in self.shards]
        for file in files:
            file.unlink(missing_ok=True)
        for folder in {file.parent for file in files}:
            if folder != self.place:  # of an unfinished --overwrite, or of a conversion into a URL
                remove_if_empty(folder)
            elif folder.is_dir():
                fsync_folder(folder)
        for folder in self.folders:
            staging.remove(folder)


@contextmanager
def leftovers(place: Location) -> Iterator[Leftovers]:
    """Those of conversions into `place`, a folder or a URL, and of processes of this machine that are gone.

    Raises:
        DatasetError: a process is converting into it, or a record cannot be read.
        StorageError: the storage does not answer.
    """
    place = place if isinstance(place, Url) else resolve(place)
    staged = tuple(staging.left())
    if isinstance(place, Url):
        with locked_working_folder(place) as folder:
            yield _of_url(place, folder, staged)
    elif folders_beside(place, "new") or any(
        os.path.lexists(path) for path in (place / MANIFEST_NAME, place / JOURNAL_NAME, lock_path(place))
    ):
        with hold_lock(place):
            yield _of_folder(place, staged)
    else:
        yield Leftovers(place, False, folders=staged)


def _of_url(url: Url, folder: Path, staged: tuple[Path, ...]) -> Leftovers:
    store = ObjectStore(url)
    finished = is_converted(url)
    dataset_names = _dataset_names(url) if finished else frozenset()
    ours = _names(folder) - dataset_names
    there = {info.name: info.bytes for info in store.list()} if ours else {}
    shards = tuple(name for name in there if name in ours)
    here = _in_own_folder(folder)
    taken = sum(there[name] for name in shards) + _size_of(here) + _size_of(staged)
    return Leftovers(url, finished, shards, tuple(here), staged, taken)


def _of_folder(folder: Path, staged: tuple[Path, ...]) -> Leftovers:
    finished = is_converted(folder)
    dataset_names = _dataset_names(folder) if finished else frozenset()
    ours = _names(folder)
    shards, others = [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name in ours - dataset_names - {JOURNAL_NAME} and is_plain_file(path):
            shards.append(path.name)
        elif is_leftover(path, ours | dataset_names) or (
            path.name == JOURNAL_NAME and ours and is_plain_file(path)
        ):
            others.append(path)
    for build in folders_beside(folder, "new"):
        others += [] if is_converted(build) else _in_own_folder(build)
    taken = _size_of(folder / name for name in shards) + _size_of((*others, *staged))
    return Leftovers(folder, finished, tuple(shards), tuple(others), staged, taken)


def _in_own_folder(folder: Path) -> list[Path]:
    """The files of an unfinished conversion in a folder that nothing else is in, its journal last."""
    names, journal = _names(folder), folder / JOURNAL_NAME
    return [*unfinished_files(folder), *([journal] if names else [])]


def _dataset_names(place: Location) -> frozenset[str]:
    return open_dataset(place).manifest.own_names | {MANIFEST_NAME}


def _names(folder: Path) -> frozenset[str]:
    """Names of the files that the journal in `folder` mentions; none without a journal.

    Raises:
        DatasetError: there is one that this release cannot read.
    """
    names = own_names_in(folder)
    if not names and os.path.lexists(folder / JOURNAL_NAME):
        raise DatasetError(
            f"{folder / JOURNAL_NAME}: not a journal that this release can read, so it is unknown which "
            f"files are ours; remove what you do not need yourself"
        )
    return names


def _size_of(paths: Iterable[Path]) -> int:
    """Bytes of files, and of all that is in folders."""
    files = (file for path in paths for file in (path.rglob("*") if path.is_dir() else (path,)))
    return sum(file.lstat().st_size for file in files if is_plain_file(file))

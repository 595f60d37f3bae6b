"""What killed conversions have left: found by our own records, listed, and removed if that is wanted.

A record is a journal, a manifest, or a lock; a name that none of them knows is somebody else's. What a living
process is writing is never touched: its lock is held meanwhile.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from precache.conversion.journal_header import JOURNAL_NAME, is_of_this_release, own_names, read_header
from precache.conversion.lock import Lock, hold_lock, lock_path
from precache.dataset.converted import is_converted, open_unchecked
from precache.destination import resolve
from precache.errors import DatasetError
from precache.manifest import MANIFEST_NAME
from precache.sources.kept import is_left, kept_path
from precache.storage import fsync_folder, is_leftover, staging
from precache.storage.objects import ObjectStore
from precache.storage.urls import Location, Url
from precache.uploads import journal, multipart
from precache.uploads.lock import LOCK_NAME
from precache.uploads.lock import hold_lock as hold_url
from precache.uploads.multipart import Unfinished
from precache.uploads.publish import HEADER_NAME


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What may go.

    Attributes:
        place: where they were looked for.
        finished: whether a finished dataset lies there, which stays.
        shards: files of an unfinished conversion, or update, that is given up with them.
        others: paths or names of objects that are of no use to anybody.
        uploads: parts of objects that were never finished.
        folders: staging folders, on this machine, of processes that are gone.
        bytes: that all of them take, but for what is in `uploads`.
    """

    place: Location
    finished: bool
    shards: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    uploads: tuple[Unfinished, ...] = ()
    folders: tuple[Path, ...] = ()
    bytes: int = field(default=0, compare=False)

    def __bool__(self) -> bool:
        return bool(self.shards or self.others or self.uploads or self.folders)

    def remove(self) -> None:
        """Remove them; raises StorageError or OSError where one cannot be."""
        if isinstance(self.place, Url):
            store = ObjectStore(self.place)
            journal.delete_own(store, [*self.shards, *(name for name in self.others if name != LOCK_NAME)])
            multipart.abort(self.place, self.uploads)
        else:
            for name in (*self.shards, *self.others):
                _at(self.place, name).unlink(missing_ok=True)
            beside = {os.path.dirname(name) for name in self.others} - {"", ".."}
            for name in beside:  # of an unfinished --overwrite
                _remove_empty(_at(self.place, name))
            if self.place.is_dir():
                fsync_folder(self.place)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def leftovers(place: Location) -> Iterator[Leftovers]:
    """Those of conversions into `place`, a folder or a URL, and of uploads of this machine.

    Raises:
        DatasetError: a process is converting into it, or a record cannot be read.
        StorageError: the storage does not answer.
    """
    staged = tuple(staging.left())
    place = place if isinstance(place, Url) else resolve(place)
    if isinstance(place, Url):
        with _of_url(place, staged) as found:
            yield found
    elif not any((_is_ours(place), lock_path(place).exists(), kept_path(place).exists())):
        yield Leftovers(place, False, folders=staged)
    else:
        with hold_lock(place) as lock:
            yield _of_folder(place, lock, staged)


@contextmanager
def _of_url(url: Url, staged: tuple[Path, ...]) -> Iterator[Leftovers]:
    store = ObjectStore(url)
    if all(store.find(name) is None for name in (MANIFEST_NAME, HEADER_NAME, LOCK_NAME)):
        yield Leftovers(url, False, folders=staged)
        return
    locked = store.find(LOCK_NAME) is not None
    with hold_url(url):
        finished = is_converted(url)
        kept = open_unchecked(url)[0].manifest.own_names | {MANIFEST_NAME} if finished else frozenset()
        header = journal.read_header(store)
        ours = (frozenset() if header is None else own_names(header)) - kept
        there = {info.name: info.bytes for info in store.list()}
        shards = tuple(name for name in there if name in ours)
        records = tuple(name for name in there if journal.is_own(name))
        others = (*records, *((LOCK_NAME,) if locked else ()))
        uploads = tuple(multipart.unfinished(url, ours | kept))
        taken = sum(there[name] for name in (*shards, *records))
        yield Leftovers(url, finished, shards, others, uploads, staged, taken + _size_of(staged))


def _of_folder(folder: Path, lock: Lock, staged: tuple[Path, ...]) -> Leftovers:
    finished = is_converted(folder)
    kept = open_unchecked(folder)[0].manifest.own_names | {MANIFEST_NAME} if finished else frozenset()
    ours = _names(folder)
    shards, others = [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name in ours - kept and path.name != JOURNAL_NAME and _is_file(path):
            shards.append(path.name)
        elif (path.name == JOURNAL_NAME and ours and _is_file(path)) or is_leftover(path, ours | kept):
            others.append(path.name)
    if lock.swap is not None and not os.path.lexists(folder.with_name(lock.swap.old)):
        build = folder.with_name(lock.swap.build)
        names = _names(build)
        others += [
            os.path.join("..", build.name, path.name)
            for path in (sorted(build.iterdir()) if build.is_dir() else ())
            if (path.name in names and _is_file(path)) or is_leftover(path, names)
        ]
    others += _kept_scan(folder)
    taken = sum(_at(folder, name).lstat().st_size for name in (*shards, *others))
    return Leftovers(folder, finished, tuple(shards), tuple(others), (), staged, taken + _size_of(staged))


def _kept_scan(folder: Path) -> list[str]:
    """Name, relative to the folder, of what a scan that was killed keeps for the next one."""
    path = kept_path(folder)
    return [os.path.relpath(path, folder)] if is_left(path) else []


def _is_ours(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in (MANIFEST_NAME, JOURNAL_NAME))


def _names(folder: Path) -> frozenset[str]:
    """Of the files that the journal in `folder` makes; none without a journal.

    Raises:
        DatasetError: there is one that this release cannot read.
    """
    if not os.path.lexists(folder / JOURNAL_NAME):
        return frozenset()
    header = read_header(folder / JOURNAL_NAME)
    if header is None or not is_of_this_release(header):
        raise DatasetError(
            f"{folder / JOURNAL_NAME}: not a journal that this release can read, so it is unknown which "
            f"files are ours; remove what you do not need yourself"
        )
    return own_names(header)


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _at(folder: Path, name: str) -> Path:
    """Of a name that may begin with `..`, whether there is a folder or not."""
    return Path(os.path.normpath(folder / name))


def _remove_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _size_of(folders: tuple[Path, ...]) -> int:
    files = (path for folder in folders for path in folder.rglob("*") if _is_file(path))
    return sum(path.lstat().st_size for path in files)

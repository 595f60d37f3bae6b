"""A raw image tree: class folders with pictures directly inside them.

    SRC/001.ak47/001_0001.jpg      sample, class '001.ak47'
    SRC/056.dog/greg/              ignored: a folder inside a class folder
    SRC/198.spider/RENAME2         ignored: neither an image extension nor an image signature
    SRC/again -> .                 ignored: a link to a folder that it lies in

A tree whose folders are `train` and `val` (or `valid`, `validation`, `test`), with class folders in
each, keeps these splits: SRC/train/001.ak47/001_0001.jpg.

Class folders may lie N folders deep: then a class is called as its path is, such as 'birds/heron'. With N = 0
there are none: SRC/0001.jpg, a picture without a label.

A file is a picture if its extension says so or, failing that, if its first bytes do: Caltech-101
holds a JPEG named 'tmp'. `precache.pictures.kinds` lists both. Whether a picture can be decoded shows only
when it is decoded.
"""

import hashlib
import os
import stat
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from precache.errors import SourceError, did_you_mean
from precache.pictures.reading import read_picture
from precache.sources import folders
from precache.sources.base import IgnoredPath, SampleRef, Samples, Scan, Source
from precache.sources.folders import Folder, sorted_entries
from precache.sources.kept import keep_scan
from precache.sources.rows import is_table
from precache.sources.walk import ALONE, ClassFolder, LeftOut, Listed, Scanning, list_folders
from precache.storage.urls import Location, Url

SPLIT_FOLDERS = ("train", "val", "valid", "validation", "test")
_MISSED_SHARE = 0.01  # of files that look like pictures: more, and the user hears of it
_NAMED = 5  # files or folders that a warning names


@dataclass(frozen=True, slots=True)
class TreeSource:
    """A tree as a `Source`, whose class folders lie `class_depth` folders deep; as of `scan_tree`."""

    root: Path
    class_depth: int = 1
    how: Scanning = ALONE

    @property
    def paths(self) -> tuple[Path, ...]:
        """The tree."""
        return (self.root,)

    def scan(self) -> Scan:
        """As `scan_tree`."""
        return scan_tree(self.root, self.class_depth, self.how)

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        """The content of the file."""
        # as the scan found it: what is rejected, or converted, must not depend on when
        return read_picture(self.where(ref), max_pixels, (ref.bytes, ref.modified_ns))

    def where(self, ref: SampleRef) -> str:
        """Path of the file."""
        return os.path.join(self.root, ref.path)


def scan_tree(root: str | os.PathLike[str], class_depth: int = 1, how: Scanning = ALONE) -> Scan:
    """List the samples of the tree at `root`, sorted by class folder, then by file name.

    Args:
        class_depth: how many folders deep the class folders lie; 0 for a folder of pictures without labels.
        how: by how many processes, where there are many pictures.

    Raises:
        SourceError: `root` is missing, is not a folder, or has no class folder with a picture; or
            something of it cannot be read: then its `__cause__` is an OSError.
        WorkerError: a process died, again and again.
    """
    root = Path(root)
    try:
        folder = stat.S_ISDIR(os.stat(root).st_mode)
        reason = None if folder else "is not a folder"
    except (FileNotFoundError, NotADirectoryError):
        reason = "does not exist"
    except OSError as error:
        raise SourceError(
            f"{root}: cannot be listed ({error.strerror}); check its permissions and its disk"
        ) from error
    if reason is not None and is_table(root) and root.exists():
        raise SourceError(
            f"{root}: is a table of pictures, expected a folder of class folders; "
            f"only 'precache convert' reads tables"
        )
    if reason is not None:
        remedy = did_you_mean(root) or " ('precache sample' makes one to try, data/raw)"
        raise SourceError(f"{root}: {reason}; expected a folder of class folders with pictures{remedy}")
    return scan_folders(root, TreeSource(root, class_depth), how)


class FolderSource(Source, Protocol):
    """A source whose classes are folders; `class_depth` is as of `scan_tree`."""

    @property
    def class_depth(self) -> int:
        """See the class."""


def scan_folders(top: Folder, source: FolderSource, how: Scanning = ALONE) -> Scan:
    """List the samples of `source`, of which `top` is the outermost folder; raises as `scan_tree`."""
    found, class_depth = _Found(), source.class_depth
    asked: list[ClassFolder | LeftOut] = []
    for split, prefix, folder in _split_folders(top, class_depth):
        found.splits.append(split)
        if class_depth == 0:
            asked.append(_to_list(folder, prefix, split, ""))
        else:
            asked += _class_folders(split, prefix, "", folder, class_depth)
    if how.kept is None or isinstance(source.root, Url):
        found.list(asked, list_folders, how.workers)
    else:
        with keep_scan(how.kept, source.root, class_depth) as kept:
            found.list(asked, kept.list_folders, how.workers)
            found.recalled = kept.recalled > 0
    if not found.pictures:
        raise SourceError(_nothing_found(top, source.root, class_depth))
    return found.scan(source)


def _nothing_found(top: Folder, root: Location, class_depth: int) -> str:
    flat = any(folders.why_not_a_picture(entry) is None for entry in sorted_entries(top))
    if class_depth == 0:
        return f"{root}: has no pictures in it; for pictures in class folders leave out --class-depth 0"
    expected = f"{root}/{'FOLDER/' * (class_depth - 1)}CLASS/picture.jpg"
    if flat:
        return (
            f"{root}: has no class folder with pictures, but pictures; expected {expected} "
            f"(for pictures without labels pass --class-depth 0)"
        )
    return (
        f"{root}: has no class folder with pictures; expected {expected} (where class folders lie deeper, "
        f"pass --class-depth {class_depth + 1}; make a sample tree with 'precache sample DST')"
    )


class _Found:
    """What a scan has found so far; grows by a few dozen bytes per picture."""

    def __init__(self) -> None:
        self.ignored: list[IgnoredPath] = []
        self.splits: list[str] = []  # those without a picture, too
        self.scanned = 0
        self.pictures = 0
        self.recalled = False
        self._missed: list[str] = []  # ignored files that look like pictures
        self._empty: list[str] = []  # class folders without pictures
        self._name_of: dict[tuple[int, int], str] = {}  # a folder's device and number -> its path
        self._twice: list[str] = []
        self._loops: list[str] = []
        self._sizes = array("q")
        self._modified_ns = array("q")
        self._paths = bytearray()
        self._path_ends = array("q")
        self._folders: list[ClassFolder] = []  # those with pictures
        self._counts: list[int] = []  # how many each of them holds
        self._digest = hashlib.sha256()

    def list(
        self,
        asked: Sequence[ClassFolder | LeftOut],
        list_folders: Callable[[Sequence[ClassFolder], int], Generator[Listed, None, None]],
        workers: int,
    ) -> None:
        """Note what was asked for, in its order."""
        to_list = [step for step in asked if isinstance(step, ClassFolder)]
        with closing(list_folders(to_list, workers)) as listed:
            for step in asked:
                if isinstance(step, ClassFolder):
                    self.add(step, next(listed))
                else:
                    self.leave_out(step)

    def add(self, folder: ClassFolder, listed: Listed) -> None:
        """Note what a folder holds."""
        path = folder.path.removesuffix("/")
        if folder.name:
            self._enter(path, listed.state[:2])
        for left_out in listed.left_out:
            self.leave_out(left_out)
        self.scanned += len(listed)
        if len(listed):
            self.pictures += len(listed)
            self._folders.append(folder)
            self._counts.append(len(listed))
            self._sizes.frombytes(listed.file_bytes.tobytes())
            self._modified_ns.frombytes(listed.modified_ns.tobytes())
            self._path_ends.frombytes((len(self._paths) + np.cumsum(listed.lengths)).tobytes())
            self._paths += listed.paths
            self._digest.update(listed.hashed)
        elif folder.name:
            self.leave_out(LeftOut(path, folders.NO_PICTURES))

    def leave_out(self, what: LeftOut) -> None:
        """Note something that is not a picture, or looks like one and is missed."""
        self.scanned += 1
        self.ignored.append(IgnoredPath(what.path, what.reason))
        if what.missed:
            self._missed.append(what.path)
        if what.reason == folders.NO_PICTURES:
            self._empty.append(what.path)
        elif what.reason == folders.LOOP:
            self._loops.append(what.path)

    def _enter(self, path: str, key: tuple[int, int]) -> None:
        """Note a class folder."""
        first = self._name_of.setdefault(key, path)
        if first != path and key[1]:  # 0 where the file system counts none
            self._twice.append(f"{path!r} is {first!r}")

    def warnings(self, root: Location) -> tuple[str, ...]:
        """As `Scan.warnings`."""
        lines = []
        if self._empty:
            lines.append(f"{root}: class folders without a picture: {_names(self._empty)}")
        if len(self._missed) > _MISSED_SHARE * (self.pictures + len(self._missed)):
            lines.append(
                f"{root}: {len(self._missed):,} files that look like pictures are left out: "
                f"{_names(self._missed)}"
            )
        if self._loops:
            lines.append(f"{root}: links to a folder above them are not followed: {_names(self._loops)}")
        if self._twice:
            lines.append(
                f"{root}: class folders that are the same folder, so pictures count twice: "
                f"{', '.join(self._twice[:_NAMED])}"
            )
        return tuple(lines)

    def scan(self, source: FolderSource) -> Scan:
        """All of it."""
        target = "class" if source.class_depth else "none"
        classes = sorted({folder.name for folder in self._folders}) if target == "class" else []
        label_of = {name: label for label, name in enumerate(classes)}
        samples = Samples(
            ids=np.arange(self.pictures),
            labels=np.repeat([label_of.get(folder.name, -1) for folder in self._folders], self._counts),
            file_bytes=np.frombuffer(self._sizes, np.int64),
            modified_ns=np.frombuffer(self._modified_ns, np.int64),
            splits=np.repeat([self.splits.index(folder.split) for folder in self._folders], self._counts),
            split_names=self.splits,
            paths=bytes(self._paths),
            path_ends=np.frombuffer(self._path_ends, np.int64),
        )
        if source.class_depth != 1:  # the same files are other classes
            self._digest.update(b"class depth %d" % source.class_depth)
        digest = self._digest.hexdigest()
        ignored, warnings = tuple(self.ignored), self.warnings(source.root)
        return Scan(
            source,
            tuple(classes),
            samples,
            ignored,
            self.scanned,
            digest,
            warnings,
            target,
            self.recalled,
        )


def _names(paths: Sequence[str]) -> str:
    """The first ones, quoted: they may hold anything."""
    more = len(paths) - _NAMED
    return ", ".join(map(repr, paths[:_NAMED])) + (f" and {more:,} more" if more > 0 else "")


def _split_folders(top: Folder, class_depth: int) -> list[tuple[str, str, Folder]]:
    """(split, its path with a slash, its folder); one without a name for a tree without splits."""
    shown = [entry for entry in sorted_entries(top) if not entry.name.startswith(".")]
    found = [entry for entry in shown if folders.is_folder(entry) and not folders.is_loop(entry)]
    names = {folder.name for folder in found}
    if "train" not in names or not names <= set(SPLIT_FOLDERS):
        return [("", "", top)]
    # with class folders, a class that happens to be called train; without them, pictures beside the folders
    inside = found if class_depth else [top]
    for folder in inside:
        if any(folders.why_not_a_picture(entry) is None for entry in sorted_entries(folder)):
            return [("", "", top)]
    return [(folder.name, f"{folder.name}/", folder) for folder in found]


def _class_folders(
    split: str, path: str, name: str, folder: Folder, depth: int
) -> Iterator[ClassFolder | LeftOut]:
    """The class folders `depth` folders deep in `folder`, and what lies beside them.

    Args:
        path: of the folder, relative to the root, with a slash; so is `name`, without the split's folder.
    """
    for entry in sorted_entries(folder):
        here = f"{path}{entry.name}"
        if not folders.is_folder(entry):
            missed = folders.looks_like_picture(entry)
            yield LeftOut(here, "a file beside the class folders", missed)
        elif entry.name.startswith(".") or folders.is_loop(entry):
            yield LeftOut(here, folders.HIDDEN_FOLDER if entry.name.startswith(".") else folders.LOOP)
        elif depth > 1:
            yield from _class_folders(split, f"{here}/", f"{name}{entry.name}/", entry, depth - 1)
        else:
            yield _to_list(entry, f"{here}/", split, f"{name}{entry.name}")


def _to_list(folder: Folder, path: str, split: str, name: str) -> ClassFolder:
    # as a path where it is on disk: it may be sent to another process
    return ClassFolder(folder.path if isinstance(folder, os.DirEntry) else folder, path, split, name)

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
holds a JPEG named 'tmp'. `precache.kinds` lists both. Whether a picture can be decoded shows only when it
is decoded.
"""

import hashlib
import os
import stat
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from precache import folders
from precache.errors import SourceError, shell_command
from precache.folders import Entry, Folder, sorted_entries
from precache.reading import read_picture
from precache.sources.base import IgnoredPath, SampleRef, Samples, Scan, Source
from precache.sources.rows import is_table
from precache.storage.urls import Location

SPLIT_FOLDERS = ("train", "val", "valid", "validation", "test")
_MISSED_SHARE = 0.01  # of files that look like pictures: more, and the user hears of it
_NAMED = 5  # files or folders that a warning names


@dataclass(frozen=True, slots=True)
class TreeSource:
    """A tree as a `Source`, whose class folders lie `class_depth` folders deep."""

    root: Path
    class_depth: int = 1

    @property
    def paths(self) -> tuple[Path, ...]:
        """The tree."""
        return (self.root,)

    def scan(self) -> Scan:
        """As `scan_tree`."""
        return scan_tree(self.root, self.class_depth)

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        """The content of the file."""
        # as the scan found it: what is rejected, or converted, must not depend on when
        return read_picture(self.where(ref), max_pixels, (ref.bytes, ref.modified_ns))

    def where(self, ref: SampleRef) -> str:
        """Path of the file."""
        return os.path.join(self.root, ref.path)


def scan_tree(root: str | os.PathLike[str], class_depth: int = 1) -> Scan:
    """List the samples of the tree at `root`, sorted by class folder, then by file name.

    Args:
        class_depth: how many folders deep the class folders lie; 0 for a folder of pictures without labels.

    Raises:
        SourceError: `root` is missing, is not a folder, or has no class folder with a picture; or
            something of it cannot be read: then its `__cause__` is an OSError.
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
        raise SourceError(
            f"{root}: {reason}; expected a folder of class folders with pictures "
            f"(make one with: {shell_command('precache sample', root)})"
        )
    return scan_folders(root, TreeSource(root, class_depth))


class FolderSource(Source, Protocol):
    """A source whose classes are folders; `class_depth` is as of `scan_tree`."""

    @property
    def class_depth(self) -> int:
        """See the class."""


def scan_folders(top: Folder, source: FolderSource) -> Scan:
    """List the samples of `source`, of which `top` is the outermost folder; raises as `scan_tree`."""
    found, class_depth = _Found(), source.class_depth
    for split, prefix, folder in _split_folders(top, class_depth):
        if class_depth == 0:
            _scan_pictures(found, split, "", prefix, sorted_entries(folder))
        else:
            _scan_folders(found, split, prefix, "", folder, class_depth)
    if not found.sizes:
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
        self.scanned = 0
        self._missed: list[str] = []  # ignored files that look like pictures
        self._empty: list[str] = []  # class folders without pictures
        self._name_of: dict[tuple[int, int], str] = {}  # a folder's device and number -> its path
        self._twice: list[str] = []
        self._loops: list[str] = []
        self.sizes = array("q")
        self._modified_ns = array("q")
        self._paths = bytearray()
        self._path_ends = array("q")
        self._folders: list[tuple[str, str]] = []  # split and class name
        self._folder_of = array("q")
        self._digest = hashlib.sha256()

    def add(self, split: str, class_name: str, path: str, status: os.stat_result) -> None:
        """Note a picture; those of one folder come after one another."""
        if not self._folders or self._folders[-1] != (split, class_name):
            self._folders.append((split, class_name))
        encoded = os.fsencode(path)
        self._paths += encoded
        self._path_ends.append(len(self._paths))
        self.sizes.append(status.st_size)
        self._modified_ns.append(status.st_mtime_ns)
        self._folder_of.append(len(self._folders) - 1)
        self._digest.update(encoded + b"\0%d\0" % status.st_size)

    def ignore(self, path: str, reason: str, *, missed: bool = False) -> None:
        """Note something that is not a picture, or looks like one and is `missed`."""
        self.ignored.append(IgnoredPath(path, reason))
        if missed:
            self._missed.append(path)
        if reason == folders.NO_PICTURES:
            self._empty.append(path)
        elif reason == folders.LOOP:
            self._loops.append(path)

    def leave_out(self, path: str, reason: str, entry: Entry) -> None:
        """Look at something that is not a picture."""
        self.scanned += 1
        self.ignore(path, reason, missed=folders.looks_like_picture(entry))

    def enter(self, path: str, status: os.stat_result) -> None:
        """Note a class folder."""
        key = (status.st_dev, status.st_ino)
        first = self._name_of.setdefault(key, path)
        if first != path and status.st_ino:  # 0 where the file system counts none
            self._twice.append(f"{path!r} is {first!r}")

    def warnings(self, root: Location) -> tuple[str, ...]:
        """As `Scan.warnings`."""
        lines = []
        if self._empty:
            lines.append(f"{root}: class folders without a picture: {_names(self._empty)}")
        if len(self._missed) > _MISSED_SHARE * (len(self.sizes) + len(self._missed)):
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
        classes = sorted({class_name for _, class_name in self._folders}) if target == "class" else []
        label_of = {name: label for label, name in enumerate(classes)}
        splits = list(dict.fromkeys(split for split, _ in self._folders))
        folder_of = np.frombuffer(self._folder_of, np.int64)
        samples = Samples(
            ids=np.arange(len(self.sizes)),
            labels=np.array([label_of.get(name, -1) for _, name in self._folders])[folder_of],
            file_bytes=np.frombuffer(self.sizes, np.int64),
            modified_ns=np.frombuffer(self._modified_ns, np.int64),
            splits=np.array([splits.index(split) for split, _ in self._folders])[folder_of],
            split_names=splits,
            paths=bytes(self._paths),
            path_ends=np.frombuffer(self._path_ends, np.int64),
        )
        if source.class_depth != 1:  # the same files are other classes
            self._digest.update(b"class depth %d" % source.class_depth)
        digest = self._digest.hexdigest()
        ignored, warnings = tuple(self.ignored), self.warnings(source.root)
        return Scan(source, tuple(classes), samples, ignored, self.scanned, digest, warnings, target)


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


def _scan_folders(found: _Found, split: str, path: str, name: str, folder: Folder, depth: int) -> None:
    """Add the class folders `depth` folders deep in `folder`.

    Args:
        path: of the folder, relative to the root, with a slash; so is `name`, without the split's folder.
    """
    for entry in sorted_entries(folder):
        here = f"{path}{entry.name}"
        if not folders.is_folder(entry):
            found.leave_out(here, "a file beside the class folders", entry)
        elif entry.name.startswith(".") or folders.is_loop(entry):
            found.leave_out(
                here, folders.HIDDEN_FOLDER if entry.name.startswith(".") else folders.LOOP, entry
            )
        elif depth > 1:
            _scan_folders(found, split, f"{here}/", f"{name}{entry.name}/", entry, depth - 1)
        else:
            entries = sorted_entries(entry)
            found.enter(here, folders.status(entry))
            if _scan_pictures(found, split, f"{name}{entry.name}", f"{here}/", entries) == 0:
                found.scanned += 1
                found.ignore(here, folders.NO_PICTURES)


def _scan_pictures(found: _Found, split: str, class_name: str, path: str, entries: Sequence[Entry]) -> int:
    """Add those among what a class folder holds, `path` relative to the root; how many there are."""
    pictures = 0
    for entry in entries:
        reason = folders.why_not_a_picture(entry)
        if reason is None:
            pictures += 1
            found.scanned += 1
            found.add(split, class_name, f"{path}{entry.name}", folders.status(entry))
        else:
            found.leave_out(f"{path}{entry.name}", reason, entry)
    return pictures

"""A raw image tree: class folders with pictures directly inside them.

    SRC/001.ak47/001_0001.jpg      sample, class '001.ak47'
    SRC/056.dog/greg/              ignored: a folder inside a class folder
    SRC/198.spider/RENAME2         ignored: neither an image extension nor an image signature
    SRC/again -> .                 ignored: a link to a folder that it lies in

A tree whose folders are `train` and `val` (or `valid`, `validation`, `test`), with class folders in
each, keeps these splits: SRC/train/001.ak47/001_0001.jpg.

A file is a picture if its extension says so or, failing that, if its first bytes do: Caltech-101
holds a JPEG named 'tmp'. `precache.kinds` lists both. Whether a picture can be decoded shows only when it
is decoded.
"""

import hashlib
import os
import stat
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from precache import folders
from precache.errors import SettingError, SourceError, shell_command
from precache.folders import Entry, sorted_entries

Ints: TypeAlias = npt.NDArray[np.int64]

SPLIT_FOLDERS = ("train", "val", "valid", "validation", "test")
_MISSED_SHARE = 0.01  # of files that look like pictures: more, and the user hears of it
_NAMED = 5  # files or folders that a warning names


@dataclass(frozen=True, slots=True)
class SampleRef:
    """One picture of a tree.

    Attributes:
        id: rank in the sorted scan.
        path: relative to the root, with forward slashes.
        label: index of its class.
        bytes: size of the file.
        split: that the tree puts it in, or "" where it has none.
        modified_ns: when the file was last written, as the file system counts; no part of what it is.
    """

    id: int
    path: str
    label: int
    bytes: int
    split: str = ""
    modified_ns: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class IgnoredPath:
    """Something in the tree that is not a sample; `path` is relative to the root."""

    path: str
    reason: str


class Samples(Sequence[SampleRef]):
    """The samples of a tree, in columns: 1,000,000 of them take some 80 MB, as objects ten times that.

    Attributes:
        ids: int64 [n], ascending.
        labels: int64 [n].
        file_bytes: int64 [n], sizes of the files.
        modified_ns: int64 [n], when they were last written.
        splits: int64 [n], indices of `split_names`.
        split_names: "" alone where the tree has no splits.
        paths: file names relative to the root, as the file system has them, one behind the other.
        path_ends: int64 [n], where each of them ends.
    """

    def __init__(
        self,
        ids: Ints,
        labels: Ints,
        file_bytes: Ints,
        modified_ns: Ints,
        splits: Ints,
        split_names: Sequence[str],
        paths: bytes,
        path_ends: Ints,
    ) -> None:
        self.ids, self.labels, self.splits = ids, labels, splits
        self.file_bytes, self.modified_ns = file_bytes, modified_ns
        self.split_names = tuple(split_names)
        self.paths, self.path_ends = paths, path_ends

    @classmethod
    def of(cls, refs: Sequence[SampleRef]) -> "Samples":
        """The columns of `refs`."""
        names = list(dict.fromkeys(ref.split for ref in refs))
        paths = [os.fsencode(ref.path) for ref in refs]
        return cls(
            np.array([ref.id for ref in refs], np.int64),
            np.array([ref.label for ref in refs], np.int64),
            np.array([ref.bytes for ref in refs], np.int64),
            np.array([ref.modified_ns for ref in refs], np.int64),
            np.array([names.index(ref.split) for ref in refs], np.int64),
            names,
            b"".join(paths),
            np.cumsum([len(path) for path in paths], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> SampleRef:  # type: ignore[override]  # no slices
        index = range(len(self))[index]
        start = int(self.path_ends[index - 1]) if index else 0
        path = self.paths[start : int(self.path_ends[index])]
        return SampleRef(
            int(self.ids[index]),
            os.fsdecode(path),
            int(self.labels[index]),
            int(self.file_bytes[index]),
            self.split_names[self.splits[index]],
            int(self.modified_ns[index]),
        )

    def select(
        self, rows: Ints, splits: Ints | None = None, split_names: Sequence[str] | None = None
    ) -> "Samples":
        """The samples at `rows`, with other splits if they are given."""
        lengths = np.diff(self.path_ends, prepend=0)[rows]
        starts = self.path_ends[rows] - lengths
        paths = b"".join(
            self.paths[a : a + n] for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)
        )
        columns = (self.ids[rows], self.labels[rows], self.file_bytes[rows], self.modified_ns[rows])
        splits = self.splits[rows] if splits is None else splits
        names = self.split_names if split_names is None else split_names
        return Samples(*columns, splits, names, paths, np.cumsum(lengths))


@dataclass(frozen=True, slots=True)
class Scan:
    """What a tree holds.

    Attributes:
        root: of the tree.
        classes: names of the class folders, sorted; labels index them.
        samples: sorted by split, class folder and file name.
        ignored: what is not a sample, and why.
        scanned: files and folders that were looked at; each is a sample or ignored.
        digest: SHA-256 (hex) over the samples' paths and sizes: tells two trees apart without
            reading pictures.
        warnings: what the user may not expect of it, one line each: classes without pictures, files
            left out that look like pictures, one folder under two names.
    """

    root: Path
    classes: tuple[str, ...]
    samples: Samples
    ignored: tuple[IgnoredPath, ...]
    scanned: int
    digest: str
    warnings: tuple[str, ...] = ()


def scan_tree(root: str | os.PathLike[str]) -> Scan:
    """List the samples of the tree at `root`, sorted by class folder, then by file name.

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
    if reason is not None:
        raise SourceError(
            f"{root}: {reason}; expected a folder of class folders with pictures "
            f"(make one with: {shell_command('precache sample', root)})"
        )
    found = _Found()
    for split, prefix in _split_folders(root):
        for entry in sorted_entries(root / prefix):
            found.scanned += _scan_folder(found, split, f"{prefix}{entry.name}", entry)
    if not found.sizes:
        raise SourceError(
            f"{root}: has no class folder with pictures; expected {root}/CLASS/picture.jpg "
            f"(make a sample tree with 'precache sample DST')"
        )
    return found.scan(root)


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

    def enter(self, path: str, status: os.stat_result) -> None:
        """Note a class folder."""
        key = (status.st_dev, status.st_ino)
        first = self._name_of.setdefault(key, path)
        if first != path and status.st_ino:  # 0 where the file system counts none
            self._twice.append(f"{path!r} is {first!r}")

    def warnings(self, root: Path) -> tuple[str, ...]:
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

    def scan(self, root: Path) -> Scan:
        """All of it."""
        classes = sorted({class_name for _, class_name in self._folders})
        label_of = {name: label for label, name in enumerate(classes)}
        splits = list(dict.fromkeys(split for split, _ in self._folders))
        folder_of = np.frombuffer(self._folder_of, np.int64)
        samples = Samples(
            ids=np.arange(len(self.sizes)),
            labels=np.array([label_of[name] for _, name in self._folders])[folder_of],
            file_bytes=np.frombuffer(self.sizes, np.int64),
            modified_ns=np.frombuffer(self._modified_ns, np.int64),
            splits=np.array([splits.index(split) for split, _ in self._folders])[folder_of],
            split_names=splits,
            paths=bytes(self._paths),
            path_ends=np.frombuffer(self._path_ends, np.int64),
        )
        digest = self._digest.hexdigest()
        ignored, warnings = tuple(self.ignored), self.warnings(root)
        return Scan(root, tuple(classes), samples, ignored, self.scanned, digest, warnings)


def _names(paths: Sequence[str]) -> str:
    """The first ones, quoted: they may hold anything."""
    more = len(paths) - _NAMED
    return ", ".join(map(repr, paths[:_NAMED])) + (f" and {more:,} more" if more > 0 else "")


def _split_folders(root: Path) -> list[tuple[str, str]]:
    """(split, its folder's path with a slash); one without a name for a tree without splits."""
    shown = [entry for entry in sorted_entries(root) if not entry.name.startswith(".")]
    found = [entry for entry in shown if folders.is_folder(entry) and not folders.is_loop(entry)]
    names = {folder.name for folder in found}
    if "train" not in names or not names <= set(SPLIT_FOLDERS):
        return [("", "")]
    for folder in found:
        if any(folders.why_not_a_picture(entry) is None for entry in sorted_entries(folder.path)):
            return [("", "")]  # a class that happens to be called train
    return [(folder.name, f"{folder.name}/") for folder in found]


def _scan_folder(found: _Found, split: str, path: str, folder: Entry) -> int:
    """Add what the class folder holds, `path` relative to the root; how much was looked at."""
    if not folders.is_folder(folder):
        found.ignore(path, "a file beside the class folders", missed=folders.looks_like_picture(folder))
        return 1
    if folder.name.startswith(".") or folders.is_loop(folder):
        found.ignore(path, folders.HIDDEN_FOLDER if folder.name.startswith(".") else folders.LOOP)
        return 1
    entries = sorted_entries(folder.path)
    found.enter(path, folders.status(folder))
    pictures = 0
    for entry in entries:
        reason = folders.why_not_a_picture(entry)
        if reason is None:
            pictures += 1
            found.add(split, folder.name, f"{path}/{entry.name}", folders.status(entry))
        else:
            found.ignore(f"{path}/{entry.name}", reason, missed=folders.looks_like_picture(entry))
    if pictures == 0:
        found.ignore(path, folders.NO_PICTURES)
    return len(entries) + (pictures == 0)


def check_apart(source: Path, destination: Path) -> None:
    """Raise SettingError if one folder lies inside the other: the source is never written to."""
    inner, outer = (Path(os.path.realpath(path)) for path in (destination, source))
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise SettingError(
            f"{destination}: and the source tree {source} lie one inside the other; "
            f"choose a DST beside the tree"
        )

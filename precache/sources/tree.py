"""Raw image trees: class folders, each with the pictures of its class at any depth below it.

    SRC/001.ak47/001_0001.jpg        sample, class '001.ak47'
    SRC/056.dog/greg/056_0001.jpg    sample, class '056.dog'
    SRC/198.spider/RENAME2           ignored: neither an image extension nor an image signature
    SRC/cover.jpg                    ignored: a file beside the class folders
    SRC/again -> .                   ignored: a link to a folder that it lies in

Classes, samples and their order are those of torchvision's `ImageFolder`: class by class, in each class
folder by folder (sorted by the whole path), in each folder file by file (sorted by name). The differences:

- Hidden files and folders, and those that systems keep for themselves (`SYSTEM_FOLDERS`), are neither samples
  nor classes: they hold thumbnails and copies, such as '._1.jpg' of macOS, '.ipynb_checkpoints', '@eaDir'.
- Pictures of more kinds are samples, such as GIF and AVIF; and so is a file without any extension that begins
  with a picture's signature: Caltech-101 holds a JPEG named 'tmp'. `precache.pictures.kinds` lists extensions
  and signatures. A warning counts these samples, and `loaders.ImageDataset` leaves them out.
- A link to a folder that contains it is not followed; `ImageFolder` follows it some 40 times. A link to
  nothing is no sample.
- A class without a picture is left out, with a warning; `ImageFolder` refuses the tree.

Folders such as `train` and `val` (`SPLIT_FOLDERS`) that hold class folders are splits:
SRC/train/001.ak47/1.jpg. Files beside the splits, and files of a split outside its class folders, are ignored
and listed as such.

Class folders may lie N folders deep (`class_depth`): then the class is named by its path, such as
'birds/heron'. With N = 0 there are no classes: SRC/0001.jpg is a picture without a label.

Listing a tree needs only names and file types, which reading its folders gives (`list_tree`). Sizes and times
need a call per file, so they are read only when needed, as by a conversion (`scan_tree`).
"""

import errno
import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from precache.errors import (
    NothingFoundError,
    SourceError,
    check_range,
    did_you_mean,
    os_reason,
    shell_command,
)
from precache.pictures import kinds
from precache.pictures.reading import read_picture, read_with_retries, sizes_and_times
from precache.reporting import abridge, quantity
from precache.sources.base import IgnoredPath, SampleList, SampleRef, Samples, Scan
from precache.sources.options import is_table
from precache.storage import open_regular

SPLIT_FOLDERS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Split of each folder name, in lower case; the names are those of Hugging Face's `imagefolder`."""
SYSTEM_FOLDERS = frozenset((
    "__MACOSX", "@eaDir", "@Recycle", "#recycle", "#snapshot", "lost+found", "$RECYCLE.BIN",
    "System Volume Information", "__pycache__",
))  # fmt: skip
"""Folders that operating systems, network storages and programs put among the user's own."""

_PICTURE_FOLDERS = frozenset(
    ("images", "image", "imgs", "img", "jpegimages", "pictures", "photos", "inputs", "input", "rgb")
)
_ANNOTATION_FOLDERS = frozenset((
    "masks", "mask", "annotations", "annotation", "labels", "label", "segmentations", "segmentation",
    "segmentationclass", "segmentationobject", "groundtruth", "ground_truth", "gt", "trimaps",
))  # fmt: skip
"""Names of folders that lie side by side where each picture is labelled by a file, in lower case."""
_HASHED_SAMPLES = 4096  # how many samples are hashed at a time
_SHARD_SUFFIXES = (".parquet", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_LINK_TO_PARENT = "a link to a folder that it lies in"
_BESIDE_CLASSES = "a file beside the class folders"


def split_of(folder: str) -> str | None:
    """Return the split in a folder's name, as `train` for Training, train_set, train2017; else None."""
    return SPLIT_FOLDERS.get(re.sub(r"[-_ ]?set$", "", folder.lower().rstrip("0123456789")))


class Entry:
    """A file or a folder of a tree; an error of the disk raises SourceError."""

    __slots__ = ("_entry", "name")

    def __init__(self, entry: "os.DirEntry[str] | Path") -> None:
        self._entry, self.name = entry, entry.name

    def is_dir(self) -> bool:
        """Return whether this is a folder, or a link to one."""
        return self._test(self._entry.is_dir)

    def is_file(self) -> bool:
        """Return whether this is a file, or a link to one."""
        return self._test(self._entry.is_file)

    @property
    def is_link_to_parent(self) -> bool:
        """Whether this is a link, perhaps over other links, to a folder that contains it."""
        if not self._entry.is_symlink():
            return False
        path = os.path.abspath(self._entry)
        target = os.path.realpath(path)
        folders = (os.path.realpath(folder) for folder in Path(path).parents)
        return any(os.path.commonpath((target, folder)) == target for folder in folders)

    def entries(self) -> "list[Entry]":
        """Return the files and folders in the folder."""

        def list_entries() -> list[Entry]:
            with os.scandir(self._entry) as entries:
                return [Entry(entry) for entry in entries]

        return read_with_retries(list_entries, os.fspath(self._entry))

    def list_pictures(self) -> "tuple[list[str], list[Entry]]":
        """Return the names of the folder's files that have a picture's extension, and all other entries.

        The folder's list has the type of each entry (`d_type`), so that no call per file is needed, except
        for links, and on file systems that do not store the types.
        """

        def list_by_name() -> tuple[list[str], list[Entry]]:
            pictures: list[str] = []
            others: list[Entry] = []
            with os.scandir(self._entry) as entries:
                for entry in entries:
                    if _has_picture_name(entry.name) and entry.is_file(follow_symlinks=False):
                        pictures.append(entry.name)
                    else:
                        others.append(Entry(entry))
            return pictures, others

        return read_with_retries(list_by_name, os.fspath(self._entry))

    def identity(self) -> tuple[int, int] | None:
        """Return device and inode number of the folder; None if the file system has no inode numbers."""
        status = read_with_retries(lambda: os.stat(self._entry), os.fspath(self._entry))
        return (status.st_dev, status.st_ino) if status.st_ino else None

    def first_bytes(self) -> bytes:
        """Return the file's first bytes, at most `kinds.PREFIX_BYTES`."""

        def read_start() -> bytes:
            with open_regular(self._entry) as file:
                # not file.read, which returns None while a slow file system has no bytes yet
                return os.read(file.fileno(), kinds.PREFIX_BYTES)

        return read_with_retries(read_start, os.fspath(self._entry))

    def _test(self, is_kind: Callable[[], bool]) -> bool:
        """Return what `is_kind` returns; False for a link to itself."""

        def test() -> bool:
            try:
                return is_kind()
            except OSError as error:
                if error.errno == errno.ELOOP:  # a link to itself
                    return False
                raise

        return read_with_retries(test, os.fspath(self._entry))


@dataclass(frozen=True, slots=True)
class TreeSource:
    """A tree as a `Source`; its class folders lie `class_depth` folders deep."""

    root: Path
    class_depth: int = 1

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.root,)

    def scan(self) -> Scan:
        return scan_tree(self.root, self.class_depth)

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        # a file that has changed since the scan is an error: a conversion's result must not depend on when
        # each file is read
        return read_picture(self.where(ref), max_pixels, (ref.bytes, ref.modified_ns))

    def where(self, ref: SampleRef) -> str:
        return os.path.join(self.root, ref.path)


def scan_tree(root: str | os.PathLike[str], class_depth: int = 1) -> Scan:
    """List the samples of the tree at `root` with sizes and times: `list_tree`, then `with_sizes`."""
    return with_sizes(list_tree(root, class_depth))


def list_tree(root: str | os.PathLike[str], class_depth: int = 1, *, allow_empty: bool = False) -> Scan:
    """List the samples of the tree at `root`, in the order that the module's docstring says.

    Sizes and times of the files are not read; `Scan.digest` covers the paths alone.

    Args:
        class_depth: how many folders deep the class folders lie; 0 for a folder of pictures without labels.
        allow_empty: keep class folders without a picture as classes, in their order.

    Raises:
        SettingError: `class_depth` is negative.
        NothingFoundError: `root` has no class folder with a picture.
        SourceError: `root` is missing, is not a folder, or has two folders of one split; or something in it
            cannot be read (then `__cause__` is an OSError).
    """
    class_depth = check_range("class_depth", class_depth, 0)
    root = Path(root)
    try:
        reason = None if stat.S_ISDIR(os.stat(root).st_mode) else "is not a folder"
    except (FileNotFoundError, NotADirectoryError):
        reason = "does not exist"
    except OSError as error:
        raise SourceError(
            f"cannot be listed ({os_reason(error)})", path=root, remedy="check its permissions and its disk"
        ) from error
    if reason is not None and is_table(root) and root.exists():
        raise SourceError(
            "is a table of pictures, expected a folder of class folders",
            path=root,
            remedy="only 'precache convert' reads tables",
        )
    if reason is not None:
        hint = did_you_mean(root) or " ('precache sample' makes one to try, data/raw)"
        raise SourceError(f"{reason}; expected a folder of class folders with pictures{hint}", path=root)
    top, lister = Entry(root), _Lister(root, class_depth)
    layout = _find_layout(top, root, class_depth)
    if not layout.splits:
        lister.list_split("", top, "")
    for split, folder in layout.splits:
        lister.list_split(split, folder, folder.name)
    for entry in layout.others:
        lister.leave_out(entry, "in no class folder of a split" if class_depth else "in no folder of a split")
    if not lister.counts and not (allow_empty and lister.empty_classes):
        raise _no_pictures_error(top, root, class_depth)
    return lister.scan(layout.warnings, allow_empty=allow_empty)


def with_sizes(scan: Scan) -> Scan:
    """Return the scan of a tree with sizes and times of its files, which many threads read.

    Raises:
        SourceError: a file is gone, or its size cannot be read.
    """
    assert isinstance(scan.source, TreeSource)
    sizes, times = sizes_and_times(scan.samples.list_paths(f"{scan.root}/"))
    samples = replace(scan.samples, file_bytes=sizes, modified_ns=times)
    return replace(scan, samples=samples, digest=_tree_digest(samples, scan.source.class_depth))


def _tree_digest(samples: Samples, class_depth: int) -> str:
    """Return `Scan.digest` of a tree: over paths and sizes, or over paths alone if it has no sizes."""
    digest = hashlib.sha256()
    if len(samples) and samples.file_bytes.max() < 0:
        digest.update(samples.paths)
        digest.update(samples.path_ends.tobytes())
    else:
        paths = samples.list_paths()
        for start in range(0, len(paths), _HASHED_SAMPLES):
            part = slice(start, start + _HASHED_SAMPLES)
            pairs = zip(paths[part], samples.file_bytes[part].tolist(), strict=True)
            digest.update(os.fsencode("".join([f"{path}\0{size}\0" for path, size in pairs])))
    if class_depth != 1:  # the same files have other classes
        digest.update(b"class depth %d" % class_depth)
    return digest.hexdigest()


def _folder_of_shards(top: Entry) -> str | None:
    """Return the path to name as source if tars or Parquet files lie too deep to be seen; else None."""
    pending = [("", top)]
    while pending:
        path, folder = pending.pop()
        for entry in _sorted_entries(folder):
            if not entry.is_dir():
                if path.count("/") and entry.name.lower().endswith(_SHARD_SUFFIXES):
                    return path.rpartition("/")[0]
            elif _reason_to_skip(entry) is None:
                pending.append((_join(path, entry.name), entry))
    return None


def _no_pictures_error(top: Entry, root: Path, class_depth: int) -> NothingFoundError:
    """Return the error for a tree without samples, which says what to pass if its layout is another."""
    if (folder := _folder_of_shards(top)) is not None:
        return NothingFoundError(
            "has no class folder with pictures, but shards",
            path=root,
            remedy=f"name their folder, {root}/{folder}",
        )
    if class_depth == 0:
        return NothingFoundError(
            "has no pictures in it (make a sample tree with 'precache sample DST')", path=root
        )
    tables = [entry.name for entry in _sorted_entries(top) if _is_stray_table(entry.name)]
    expected = f"expected {root}/{'FOLDER/' * (class_depth - 1)}CLASS/picture.jpg"
    if not _has_picture(top, 0):
        sample = "make a sample tree with 'precache sample DST'"
        return NothingFoundError(f"has no class folder with pictures; {expected} ({sample})", path=root)
    depth = class_depth - 1
    while not _has_picture(top, depth):
        depth -= 1
    contents = "pictures without labels" if depth == 0 else "class folders that lie less deep"
    return NothingFoundError(
        f"has no class folder with pictures, but pictures; {expected} (for {contents} pass "
        f"--class-depth {depth})",
        path=root,
        remedy=_advice_on_tables(root, tables) if tables else "",
    )


def _is_stray_table(path: str) -> bool:
    """Return whether the path in a tree is that of a table beside the class folders."""
    return "/" not in path and is_table(Path(path)) and "submission" not in path.lower()


def _advice_on_tables(root: Path, tables: list[str]) -> str:
    """Return what to run if the pictures have their labels in a table, not by their folders."""
    command = shell_command(
        "precache convert", root / tables[0], "DST --root FOLDER --image COLUMN --label COLUMN"
    )
    return f"if the labels of the pictures are in {abridge(tables)}, run: {command}"


class _Lister:
    """Lists the class folders of a tree, and collects its samples, ignored files and warnings.

    Attributes:
        counts: number of pictures of each class folder that has some.
        empty_classes: name of the class of each class folder without a picture, by the folder's path.
    """

    def __init__(self, root: Path, class_depth: int) -> None:
        self.counts: list[int] = []
        self.empty_classes: dict[str, str] = {}
        self._root, self._class_depth = root, class_depth
        self._split = ""
        self._class_names: list[str] = []  # class of each class folder that has pictures
        self._samples = SampleList()
        self._ignored: list[IgnoredPath] = []
        self._ignored_pictures: list[IgnoredPath] = []  # those of _ignored that look like pictures
        self._deeper = 0  # number of pictures in a folder inside their class folder
        self._subfolders: dict[str, str] = {}  # name of a class -> some of its folders, as text
        self._inner_names = Counter[str]()  # name of a folder -> number of class folders that it lies in
        self._links_to_parents: list[str] = []
        self._first_paths: dict[tuple[int, int], str] = {}  # a folder's device and inode -> its path
        self._repeated_folders: list[str] = []  # lines such as "'b' is 'a'"

    def list_split(self, split: str, folder: Entry, path: str) -> None:
        """List the pictures of the class folders in `folder`, at `path`, as samples of `split`."""
        self._split = split
        self._samples.split_of[split] = len(self._samples.split_of)
        if self._class_depth == 0:
            self._list_class("", path, folder)
            return
        self._check_no_annotations(folder, path)
        class_folders = list(self._class_folders(folder, path, "", self._class_depth))
        class_folders.sort(key=lambda class_folder: class_folder[0])
        for class_name, class_path, class_folder in class_folders:
            identity = class_folder.identity()
            if identity is not None:
                first_path = self._first_paths.setdefault(identity, class_path)
                if first_path != class_path:
                    self._repeated_folders.append(f"{class_path!r} is {first_path!r}")
            self._list_class(class_name, class_path, class_folder)

    def _check_no_annotations(self, folder: Entry, path: str) -> None:
        """Raise SourceError if `folder` has pictures beside the masks or labels of each, and not classes."""
        folders = [entry for entry in _sorted_entries(folder) if entry.is_dir()]
        annotations = [entry.name for entry in folders if _base_name(entry) in _ANNOTATION_FOLDERS]
        pictures = [entry for entry in folders if _base_name(entry) in _PICTURE_FOLDERS]
        if not annotations or not pictures or not _has_picture(pictures[0], 0):
            return
        others = [
            entry for entry in folders if _base_name(entry) not in _ANNOTATION_FOLDERS | _PICTURE_FOLDERS
        ]
        if any(_reason_to_skip(entry) is None and _has_picture(entry, 0) for entry in others):
            return  # classes, two of which happen to have such names
        inner = [entry.name for entry in pictures[0].entries() if entry.is_dir()]
        has_classes = _has_mostly_folders(pictures[0]) and not all(map(split_of, inner))
        flags = () if has_classes else ("--class-depth 0",)
        name = pictures[0].name
        command = shell_command("precache convert", self._root / path / name, "DST", *flags)
        raise SourceError(
            f"{name!r} and {annotations[0]!r} are pictures and what labels them, not classes",
            path=self._root / path,
            remedy=f"for the pictures alone, without these labels, run: {command}",
        )

    def leave_out(self, entry: Entry, reason: str) -> None:
        """Ignore a file, or every file in a folder, for this reason."""
        pending = [(entry.name, entry)]
        while pending:
            path, entry = pending.pop()
            if not entry.is_dir():
                self._ignore_file(path, entry, reason)
            elif (reason_to_skip := _reason_to_skip(entry)) is not None:
                self._ignore_folder(path, reason_to_skip)
            else:
                pending += ((f"{path}/{inner.name}", inner) for inner in reversed(_sorted_entries(entry)))

    def _class_folders(
        self, folder: Entry, path: str, name: str, depth: int
    ) -> Iterator[tuple[str, str, Entry]]:
        """Yield class name, path and folder of the class folders `depth` deep, and ignore files beside them.

        Args:
            name: class name so far, made of the folders between the split's folder and this one.
        """
        for entry in _sorted_entries(folder):
            entry_path = _join(path, entry.name)
            if not entry.is_dir():
                self._ignore_file(entry_path, entry, _BESIDE_CLASSES)
            elif (reason := _reason_to_skip(entry)) is not None:
                self._ignore_folder(entry_path, reason)
            elif depth > 1:
                yield from self._class_folders(entry, entry_path, _join(name, entry.name), depth - 1)
            else:
                yield _join(name, entry.name), entry_path, entry

    def _list_class(self, class_name: str, class_path: str, class_folder: Entry) -> None:
        """List all pictures below a class folder, sorted by their folders' paths and then by name."""
        count_before = len(self._samples)
        # a heap gives the folders sorted by path, since a folder's path sorts before those of its subfolders
        folders = [(class_path, class_folder)]
        subfolders: dict[str, None] = {}  # a set that keeps its order: a class may have very many
        while folders:
            path, folder = heappop(folders)
            pictures, others = folder.list_pictures()
            for entry in _sort_by_name(others):
                entry_path = _join(path, entry.name)
                reason = _reason_not_a_picture(entry)
                if reason is None:
                    pictures.append(entry.name)
                elif not entry.is_dir():
                    self._ignore_file(entry_path, entry, reason)
                elif (reason := _reason_to_skip(entry)) is not None:
                    self._ignore_folder(entry_path, reason)
                else:
                    heappush(folders, (entry_path, entry))
            pictures.sort()
            prefix = _join(path, "")
            paths = [prefix + name for name in pictures]
            self._samples.add_files(paths, self._split)
            if path != class_path and pictures:
                self._deeper += len(pictures)
                subfolder = path[len(class_path) :].strip("/").partition("/")[0]
                subfolders[subfolder] = None
        count = len(self._samples) - count_before
        if count:
            self.counts.append(count)
            self._class_names.append(class_name)
            self._inner_names.update(subfolders.keys())
            if len(subfolders) > 1:
                self._subfolders[class_name] = abridge([repr(_join(class_name, name)) for name in subfolders])
        elif class_name:
            self.empty_classes[class_path] = class_name

    def _ignore_file(self, path: str, entry: Entry, reason: str) -> None:
        self._ignored.append(IgnoredPath(path, reason))
        if _looks_like_picture(entry):
            self._ignored_pictures.append(self._ignored[-1])

    def _ignore_folder(self, path: str, reason: str) -> None:
        self._ignored.append(IgnoredPath(path, reason))
        if reason == _LINK_TO_PARENT:
            self._links_to_parents.append(path)

    def _warnings(self, samples: Samples, class_count: int) -> Iterator[str]:
        """Yield the warnings about what was listed, a line each."""
        root = self._root
        if more := _count_more_kinds(samples):
            yield (
                f"{root}: of its {len(samples):,} pictures torchvision's ImageFolder does not list "
                f"{more}; build and convert take them, ImageDataset does not"
            )
        if self.empty_classes:
            names = abridge([repr(path) for path in self.empty_classes])
            yield f"{root}: class folders without a picture: {names}"
        if self._ignored_pictures:
            files = quantity(
                len(self._ignored_pictures),
                "file that looks like a picture is",
                "files that look like pictures are",
            )
            names = abridge([f"{ignored.path!r} ({ignored.reason})" for ignored in self._ignored_pictures])
            yield f"{root}: {files} left out: {names}"
        if self._links_to_parents:
            names = abridge([repr(path) for path in self._links_to_parents])
            yield f"{root}: links to a folder above them are not followed: {names}"
        if self._repeated_folders:
            names = abridge(self._repeated_folders)
            yield f"{root}: class folders that are the same folder, so pictures count twice: {names}"
        tables = [ignored.path for ignored in self._ignored if _is_stray_table(ignored.path)]
        if tables and self._class_depth:
            yield f"{root}: {_advice_on_tables(root, tables)}"
        all_deeper = self._deeper == len(self._samples)
        if self._class_depth and self._subfolders and all_deeper:
            name, subfolders = next(iter(self._subfolders.items()))
            remedy = f"pass --class-depth {self._class_depth + 1}, or class_depth={self._class_depth + 1}"
            if class_count == 1 and list(self._samples.split_of) == [""]:
                remedy = f"name {root}/{name} instead"
            splits = ""
            if self._class_depth == 1 and max(self._inner_names.values()) > 1:
                splits = (
                    f"; or if folders such as {name!r} are splits, list them in a file, in lines such as "
                    f"'{name},train', and pass it with --splits, or splits="
                )
            yield (
                f"{root}: all pictures lie deeper than their class folders; if {subfolders} are classes, "
                f"{remedy}{splits}"
            )

    def scan(self, warnings: Iterable[str], *, allow_empty: bool) -> Scan:
        """Return the scan of the tree with all that was listed."""
        target = "class" if self._class_depth else "none"
        classes: list[str] = []
        if target == "class":
            names = set(self._class_names)
            if allow_empty:
                names.update(self.empty_classes.values())
            classes = sorted(names)
        label_of = {name: label for label, name in enumerate(classes)}
        labels = np.repeat([label_of.get(name, -1) for name in self._class_names], self.counts)
        samples = self._samples.samples(labels)
        return Scan(
            source=TreeSource(self._root, self._class_depth),
            classes=tuple(classes),
            samples=samples,
            ignored=tuple(self._ignored),
            scanned=len(samples) + len(self._ignored),
            digest=_tree_digest(samples, self._class_depth),
            warnings=(*warnings, *self._warnings(samples, len(classes))),
            target=target,
            is_tree=True,
            deeper=self._deeper if self._class_depth else 0,
        )


@dataclass(frozen=True, slots=True)
class _Layout:
    """Splits of a tree, and the entries beside them.

    Attributes:
        splits: name and folder of each split; empty for a tree without splits.
        others: files and folders beside the splits.
        warnings: one line each.
    """

    splits: tuple[tuple[str, Entry], ...] = ()
    others: tuple[Entry, ...] = ()
    warnings: tuple[str, ...] = ()


def _find_layout(top: Entry, root: Path, class_depth: int) -> _Layout:
    """Find the splits of a tree: folders named as splits that hold class folders, or pictures at depth 0.

    Raises:
        SourceError: two folders are one split, such as val and valid.
    """
    entries = _sorted_entries(top)
    folders = [entry for entry in entries if entry.is_dir() and _reason_to_skip(entry) is None]
    candidates = [folder for folder in folders if split_of(folder.name)]
    non_empty = [folder for folder in candidates if _has_picture(folder, class_depth)]
    others = [folder for folder in folders if folder not in candidates]
    if not non_empty or not _are_splits(top, candidates, non_empty, others, class_depth):
        meant_as_splits = non_empty
        if not non_empty and not others:
            meant_as_splits = candidates
        if not meant_as_splits or class_depth == 0 or not _has_picture(top, 1):
            return _Layout()
        names = abridge([repr(folder.name) for folder in meant_as_splits])
        remedy = f"for splits put other class folders out of {root}"
        if not non_empty:
            remedy = "for splits of pictures without labels pass --class-depth 0, or class_depth=0"
        warning = f"{root}: folders named as splits are taken for classes: {names}; {remedy}"
        return _Layout(warnings=(warning,))
    splits: dict[str, Entry] = {}
    for folder in non_empty:
        split = str(split_of(folder.name))
        first = splits.setdefault(split, folder)
        if first is not folder:
            raise SourceError(
                f"the folders {first.name!r} and {folder.name!r} are both the split {split!r}",
                path=root,
                remedy="merge them, or move one out of the tree",
            )
    for folder in candidates:
        # a folder without any picture is an empty split; one with pictures outside class folders is no split
        if not _has_picture(folder, 0):
            splits.setdefault(str(split_of(folder.name)), folder)
    by_folder = sorted(splits.items(), key=lambda split_and_folder: split_and_folder[1].name)
    return _Layout(tuple(by_folder), tuple(entry for entry in entries if entry not in splits.values()))


def _are_splits(
    top: Entry, candidates: list[Entry], non_empty: list[Entry], others: list[Entry], class_depth: int
) -> bool:
    """Return whether folders that are named as splits are splits, and not classes with such names.

    A class holds its pictures itself, and may hold folders; a split holds class folders, and may hold a stray
    picture. Two splits are enough; a single one must be alone, or lie beside loose pictures only.

    Args:
        candidates: folders of `top` that are named as splits.
        non_empty: the candidates with pictures `class_depth` folders deep.
        others: the other folders of `top`.
    """
    if class_depth == 0:
        has_pictures_beside = any(_is_picture(entry) for entry in top.entries()) or any(
            _has_picture(folder, 0) for folder in others
        )
        return len(non_empty) > 1 or not has_pictures_beside
    if not any(_has_mostly_folders(folder) for folder in non_empty):
        return False
    if len(non_empty) > 1:
        return True
    if any(_has_picture(folder, class_depth) for folder in others):
        return False
    has_pictures_beside = any(_has_picture(folder, 0) for folder in others)
    is_train = split_of(non_empty[0].name) == "train" and _has_mostly_folders(non_empty[0], at_least=2)
    return len(candidates) > 1 or not has_pictures_beside or is_train


def _has_mostly_folders(folder: Entry, at_least: int = 1) -> bool:
    """Return whether a folder holds `at_least` so many folders, and more of them than pictures."""
    folder_count = picture_count = 0
    for entry in folder.entries():
        if entry.is_dir():
            if _reason_to_skip(entry) is None:
                folder_count += 1
        elif _is_picture(entry):
            picture_count += 1
    return folder_count >= at_least and folder_count > picture_count


def _has_picture(folder: Entry, depth: int) -> bool:
    """Return whether a picture lies below `folder`, at least `depth` folders deep."""
    pending = [(folder, depth)]
    while pending:
        folder, depth = pending.pop()
        for entry in folder.entries():
            if depth <= 0 and _is_picture(entry):
                return True
            if entry.is_dir() and _reason_to_skip(entry) is None:
                pending.append((entry, depth - 1))
    return False


def _is_picture(entry: Entry) -> bool:
    return _reason_not_a_picture(entry) is None


def _count_more_kinds(samples: Samples) -> str:
    """Return how many samples ImageFolder does not list, as '2 .gif, 1 without extension', or ""."""
    rows = np.flatnonzero(~samples.path_column.ends_with(kinds.IMAGE_FOLDER_EXTENSIONS))
    counts = Counter(kinds.extension(path) for path in samples.list_paths(rows=rows))
    return ", ".join(f"{count:,} {suffix or 'without extension'}" for suffix, count in sorted(counts.items()))


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _sorted_entries(folder: Entry) -> list[Entry]:
    """Return the entries of `folder` sorted by name; SourceError if it cannot be listed."""
    return _sort_by_name(folder.entries())


def _sort_by_name(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.name)


def _base_name(folder: Entry) -> str:
    """Return the name of a folder without numbers: image_2 is a folder of images."""
    return re.sub(r"[-_0-9]+$", "", folder.name.lower())


def is_skipped_folder(name: str) -> bool:
    """Return whether a folder of this name is hidden or a system's own, so neither a class nor a split."""
    return name.startswith(".") or name in SYSTEM_FOLDERS


def _reason_to_skip(folder: Entry) -> str | None:
    """Return why the files of this folder are ignored; None if they are not."""
    if is_skipped_folder(folder.name):
        return "a hidden folder" if folder.name.startswith(".") else "a folder of the system"
    return _LINK_TO_PARENT if folder.is_link_to_parent else None


def _has_picture_name(name: str) -> bool:
    """Return whether a file's name is that of a picture."""
    return name[name.rfind(".") :].lower() in kinds.IMAGE_EXTENSIONS and name[0] != "."


def _reason_not_a_picture(entry: Entry) -> str | None:
    """Return why this is not a sample; None if it is one."""
    name = entry.name
    if entry.is_dir():
        return "a folder"
    if not entry.is_file():
        return "not a regular file"
    if name.startswith("."):
        return "a hidden file"
    extension = kinds.extension(name)
    if extension in kinds.IMAGE_EXTENSIONS or (
        not extension and kinds.begins_like_picture(entry.first_bytes())
    ):
        return None
    return kinds.skip_reason(name)


def _looks_like_picture(entry: Entry) -> bool:
    """Return whether the user may expect this to be a sample."""
    return not entry.name.startswith(".") and kinds.looks_like_picture(entry.name) and not entry.is_dir()

"""Raw image trees: class folders, each with the pictures of its class at any depth below it.

    TREE                                     SAMPLES IN THEIR ORDER, BY CLASS
    056.dog/greg/2 056.dog/1 001.ak47/3      001.ak47: 001.ak47/3; 056.dog: 056.dog/1 056.dog/greg/2
    a/b/1 a/b-c/2 a/3 a/b.4                  a: a/3 a/b.4 a/b/1 a/b-c/2
    A/1 b/2 B/3                              A: A/1; B: B/3; b: b/2
    cover 198.spider/1                       198.spider: 198.spider/1; ignored: cover
    b/1 a/                                   b: b/1; warning: without a picture: 'a'
    val/b/1 train/b/2 train/a/3              a: train/a/3; b: train/b/2 val/b/1
    a/b/2 a/b/1 d/e/f/1 a/.b/1, depth 2      a/b: a/b/1 a/b/2; d/e: d/e/f/1
    a-b/c/1 a/c/2, depth 2                   a-b/c: a-b/c/1; a/c: a/c/2
    a/b/1 a/b-c/2 a/3, depth 0               no class: a/3 a/b/1 a/b-c/2

Classes, samples and their order are those of torchvision's `ImageFolder`: class by class, in each class
folder by folder (sorted by the whole path), in each folder file by file (sorted by name). The differences:
hidden files, and folders that systems keep for themselves, are neither samples nor classes; files of more
kinds are samples, which a warning counts and `loaders.ImageDataset` leaves out (`entries.py` has a table); a
class without a picture is left out, with a warning, where `ImageFolder` refuses the tree; folders such as
`train` and `val` that hold class folders are splits (`layout.py` has a table).

Class folders may lie N folders deep (`class_depth`): then the class is named by its path, such as
'birds/heron'. With N = 0 there are no classes: SRC/0001.jpg is a picture without a label.

Listing a tree needs only names and file types, which reading its folders gives (`list_tree`). Sizes and times
need a call per file, so they are read only when needed, as by a conversion (`scan_tree`).
"""

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from precache.errors import SourceError, check_range, did_you_mean, os_reason
from precache.pictures import kinds
from precache.pictures.reading import read_picture, sizes_and_times
from precache.reporting import abridge, quantity
from precache.sources.base import IgnoredPath, SampleList, SampleRef, Samples, Scan
from precache.sources.entries import LINK_TO_PARENT, Entry
from precache.sources.layout import (
    advice_on_tables,
    check_no_annotations,
    find_layout,
    no_pictures_error,
)
from precache.sources.options import is_table

_HASHED_SAMPLES = 4096  # how many samples are hashed at a time


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
    layout = find_layout(top, root, class_depth)
    for split, folder in layout.splits or [("", top)]:
        lister.list_split(split, folder, folder.name if layout.splits else "")
    for entry in layout.others:
        lister.leave_out(entry, "in no class folder of a split" if class_depth else "in no folder of a split")
    folders = [folder for folder in lister.folders if folder.count or (allow_empty and folder.name)]
    if not folders:
        raise no_pictures_error(top, root, class_depth)
    classes = sorted({folder.name for folder in folders}) if class_depth else []
    label_of = {name: label for label, name in enumerate(classes)}
    labels = np.repeat(
        [label_of.get(folder.name, -1) for folder in folders], [folder.count for folder in folders]
    )
    samples = lister.samples.samples(labels)
    return Scan(
        source=TreeSource(root, class_depth),
        classes=tuple(classes),
        samples=samples,
        ignored=tuple(lister.ignored),
        scanned=len(samples) + len(lister.ignored),
        digest=_tree_digest(samples, class_depth),
        warnings=(*layout.warnings, *_warnings(lister, samples, len(classes))),
        target="class" if class_depth else "none",
        is_tree=True,
        deeper=lister.deeper,
    )


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


@dataclass(slots=True)
class _ClassFolder:
    """A class folder that was listed; with class depth 0 the folder of a split, whose class has no name.

    Attributes:
        name: name of the class.
        path: path in the tree.
        count: number of pictures at any depth.
        subfolders: names of the folders directly in it that hold some of these.
    """

    name: str
    path: str
    count: int
    subfolders: tuple[str, ...]


class _Lister:
    """Lists the class folders of a tree, and collects its samples and ignored files.

    Attributes:
        folders: the class folders so far, also those without a picture.
        samples: their pictures, in order.
        ignored: files that are no samples, and folders that were not searched.
        deeper: number of pictures in a folder inside their class folder.
        repeated_folders: class folders that are the same folder, in texts such as "'b' is 'a'".
    """

    def __init__(self, root: Path, class_depth: int) -> None:
        self.root, self.class_depth = root, class_depth
        self.folders: list[_ClassFolder] = []
        self.samples = SampleList()
        self.ignored: list[IgnoredPath] = []
        self.deeper = 0
        self.repeated_folders: list[str] = []
        self._first_paths: dict[tuple[int, int], str] = {}  # a folder's device and inode -> its path

    def list_split(self, split: str, folder: Entry, path: str) -> None:
        """List the pictures of the class folders in `folder`, at `path`, as samples of `split`."""
        self.samples.split_of[split] = len(self.samples.split_of)
        if self.class_depth == 0:
            self._list_class(split, "", path, folder)
            return
        check_no_annotations(folder, self.root / path)
        class_folders = list(self._class_folders(folder, path, "", self.class_depth))
        class_folders.sort(key=lambda class_folder: class_folder[0])
        for class_name, class_path, class_folder in class_folders:
            identity = class_folder.identity()
            if identity is not None:
                first_path = self._first_paths.setdefault(identity, class_path)
                if first_path != class_path:
                    self.repeated_folders.append(f"{class_path!r} is {first_path!r}")
            self._list_class(split, class_name, class_path, class_folder)

    def leave_out(self, entry: Entry, reason: str) -> None:
        """Ignore a file, or every file in a folder, for this reason."""
        pending = [(entry.name, entry)]
        while pending:
            path, entry = pending.pop()
            if not entry.is_dir():
                self.ignored.append(IgnoredPath(path, reason))
            elif (reason_to_ignore := entry.reason_to_ignore()) is not None:
                self.ignored.append(IgnoredPath(path, reason_to_ignore))
            else:
                pending += ((f"{path}/{inner.name}", inner) for inner in reversed(entry.entries()))

    def _class_folders(
        self, folder: Entry, path: str, name: str, depth: int
    ) -> Iterator[tuple[str, str, Entry]]:
        """Yield class name, path and folder of the class folders `depth` deep, and ignore files beside them.

        Args:
            name: class name so far, made of the folders between the split's folder and this one.
        """
        for entry in folder.entries():
            entry_path = _join(path, entry.name)
            if not entry.is_dir():
                self.ignored.append(IgnoredPath(entry_path, "a file beside the class folders"))
            elif (reason := entry.reason_to_ignore()) is not None:
                self.ignored.append(IgnoredPath(entry_path, reason))
            elif depth > 1:
                yield from self._class_folders(entry, entry_path, _join(name, entry.name), depth - 1)
            else:
                yield _join(name, entry.name), entry_path, entry

    def _list_class(self, split: str, class_name: str, class_path: str, class_folder: Entry) -> None:
        """List all pictures below a class folder, sorted by their folders' paths and then by name."""
        count_before = len(self.samples)
        # a heap gives the folders sorted by path, since a folder's path sorts before those of its subfolders
        folders = [(class_path, class_folder)]
        subfolders: dict[str, None] = {}  # a set that keeps its order: a class may have very many
        while folders:
            path, folder = heappop(folders)
            pictures, others = folder.list_pictures()
            for entry in others:
                entry_path = _join(path, entry.name)
                if (reason := entry.reason_to_ignore()) is not None:
                    self.ignored.append(IgnoredPath(entry_path, reason))
                elif entry.is_dir():
                    heappush(folders, (entry_path, entry))
                else:
                    pictures.append(entry.name)
            pictures.sort()
            prefix = _join(path, "")
            paths = [prefix + name for name in pictures]
            self.samples.add_files(paths, split)
            if path != class_path and pictures and self.class_depth:
                self.deeper += len(pictures)
                subfolders[path[len(class_path) + 1 :].partition("/")[0]] = None
        count = len(self.samples) - count_before
        self.folders.append(_ClassFolder(class_name, class_path, count, tuple(subfolders)))


def _warnings(lister: _Lister, samples: Samples, class_count: int) -> Iterator[str]:
    """Yield the warnings about what was listed, a line each."""
    root = lister.root
    if more := _count_more_kinds(samples):
        yield (
            f"{root}: of its {len(samples):,} pictures torchvision's ImageFolder does not list "
            f"{more}; build and convert take them, ImageDataset does not"
        )
    if empty := [repr(folder.path) for folder in lister.folders if folder.name and not folder.count]:
        yield f"{root}: class folders without a picture: {abridge(empty)}"
    links = [ignored for ignored in lister.ignored if ignored.reason == LINK_TO_PARENT]
    missed = [
        f"{ignored.path!r} ({ignored.reason})"
        for ignored in lister.ignored
        if ignored.reason != LINK_TO_PARENT and _looks_like_picture(ignored.path)
    ]
    if missed:
        files = quantity(
            len(missed), "file that looks like a picture is", "files that look like pictures are"
        )
        yield f"{root}: {files} left out: {abridge(missed)}"
    if links:
        names = abridge([repr(ignored.path) for ignored in links])
        yield f"{root}: links to a folder above them are not followed: {names}"
    if lister.repeated_folders:
        names = abridge(lister.repeated_folders)
        yield f"{root}: class folders that are the same folder, so pictures count twice: {names}"
    if lister.class_depth and (
        advice := advice_on_tables(root, [ignored.path for ignored in lister.ignored])
    ):
        yield f"{root}: {advice}"
    if len(samples) == lister.deeper:
        yield from _advise_depth(lister, class_count)


def _advise_depth(lister: _Lister, class_count: int) -> Iterator[str]:
    """Yield a warning if there are folders inside class folders that may be classes or splits."""
    folder = next((folder for folder in lister.folders if len(folder.subfolders) > 1), None)
    if folder is None:
        return
    subfolders = abridge([repr(_join(folder.name, name)) for name in folder.subfolders])
    depth = lister.class_depth
    remedy = f"pass --class-depth {depth + 1}, or class_depth={depth + 1}"
    if class_count == 1 and list(lister.samples.split_of) == [""]:
        remedy = f"name {lister.root}/{folder.name} instead"
    splits = ""
    inner_names = Counter(name for folder in lister.folders for name in folder.subfolders)
    if depth == 1 and max(inner_names.values()) > 1:
        splits = (
            f"; or if folders such as {folder.name!r} are splits, list them in a file, in lines such as "
            f"'{folder.name},train', and pass it with --splits, or splits="
        )
    yield (
        f"{lister.root}: all pictures lie deeper than their class folders; if {subfolders} are classes, "
        f"{remedy}{splits}"
    )


def _count_more_kinds(samples: Samples) -> str:
    """Return how many samples ImageFolder does not list, as '2 .gif, 1 without extension', or ""."""
    rows = np.flatnonzero(~samples.path_column.ends_with(kinds.IMAGE_FOLDER_EXTENSIONS))
    counts = Counter(kinds.extension(path) for path in samples.list_paths(rows=rows))
    return ", ".join(f"{count:,} {suffix or 'without extension'}" for suffix, count in sorted(counts.items()))


def _looks_like_picture(path: str) -> bool:
    """Return whether the user may expect an ignored file to be a sample."""
    name = path.rpartition("/")[2]
    return not name.startswith(".") and kinds.looks_like_picture(name)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name

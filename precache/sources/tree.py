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

Two more tables are in `Entry` (which entries are pictures) and `find_layout` (what is a split, what a class).

Classes, samples and their order are those of torchvision's `ImageFolder`: class by class, in each class
folder by folder (sorted by the whole path), in each folder file by file (sorted by name). The differences:
hidden files, and folders that systems keep for themselves, are neither samples nor classes; files of more
kinds are samples, which a warning counts and `loaders.ImageDataset` leaves out; a class without a picture is
left out, with a warning, where `ImageFolder` refuses the tree; folders such as `train` and `val` that hold
class folders are splits.

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

SYSTEM_FOLDERS = frozenset((
    "__MACOSX", "@eaDir", "@Recycle", "#recycle", "#snapshot", "lost+found", "$RECYCLE.BIN",
    "System Volume Information", "__pycache__",
))  # fmt: skip
"""Folders that operating systems, network storages and programs put among the user's own."""
SPLIT_FOLDERS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Split of each folder name, in lower case; the names are those of Hugging Face's `imagefolder`."""
_PICTURE_FOLDERS = frozenset(
    ("images", "image", "imgs", "img", "jpegimages", "pictures", "photos", "inputs", "input", "rgb")
)
_ANNOTATION_FOLDERS = frozenset((
    "masks", "mask", "annotations", "annotation", "labels", "label", "segmentations", "segmentation",
    "segmentationclass", "segmentationobject", "groundtruth", "ground_truth", "gt", "trimaps",
))  # fmt: skip
"""Names of folders that lie side by side where each picture is labelled by a file, in lower case."""
_SHARD_SUFFIXES = (".parquet", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_LINK_TO_PARENT = "a link to a folder that it lies in"
_HASHED_SAMPLES = 4096  # how many samples are hashed at a time


class Entry:
    """A file or a folder of a tree; an error of the disk raises SourceError.

        ENTRY OF A FOLDER                      WHAT COMES
        1.jpg, 2.JPEG, 3.gif, 4.avif           a picture
        tmp (a JPEG)                           a picture
        RENAME2 (text)                         neither an image extension nor an image signature
        notes.txt                              no image extension
        drawing.svg                            SVG: a drawing, not a picture; render it first
        5.jxl                                  an unsupported kind of picture
        ._1.jpg, .hidden.jpg                   a hidden file
        6.jpg -> ../dog/1.jpg                  a picture
        gone.jpg -> gone.jpg, 7.jpg -> none    not a regular file
        greg/, x.jpg/                          a folder that is searched
        dogs -> ../dog                         a folder that is searched
        again -> ., above -> .., b/up -> ..    a link to a folder that it lies in
        .git/, .ipynb_checkpoints/             a hidden folder
        @eaDir/, lost+found/, __MACOSX/        a folder of the system

    Torchvision's `ImageFolder` decides by the extension alone, and takes fewer kinds; it follows a link to a
    folder above some 40 times. `precache.pictures.kinds` lists extensions and signatures.
    """

    __slots__ = ("_entry", "name")

    def __init__(self, entry: "os.DirEntry[str] | Path") -> None:
        self._entry, self.name = entry, entry.name

    def is_dir(self) -> bool:
        """Return whether this is a folder, or a link to one."""
        return self._test(self._entry.is_dir)

    def reason_to_ignore(self) -> str | None:
        """Return why this is neither a picture nor a folder that is searched; None if it is one of these."""
        is_hidden = self.name.startswith(".")
        if self.is_dir():
            if is_hidden or self.name in SYSTEM_FOLDERS:
                return "a hidden folder" if is_hidden else "a folder of the system"
            return _LINK_TO_PARENT if self._is_link_to_parent() else None
        if not self._test(self._entry.is_file):
            return "not a regular file"
        if is_hidden:
            return "a hidden file"
        extension = kinds.extension(self.name)
        has_signature = not extension and kinds.begins_like_picture(self._first_bytes())
        if has_signature or extension in kinds.IMAGE_EXTENSIONS:
            return None
        return kinds.skip_reason(self.name)

    def entries(self) -> "list[Entry]":
        """Return the files and folders in the folder, sorted by name."""

        def list_entries() -> list[Entry]:
            with os.scandir(self._entry) as entries:
                return [Entry(entry) for entry in entries]

        return _sorted_by_name(read_with_retries(list_entries, os.fspath(self._entry)))

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

        pictures, others = read_with_retries(list_by_name, os.fspath(self._entry))
        return pictures, _sorted_by_name(others)

    def identity(self) -> tuple[int, int] | None:
        """Return device and inode number of the folder; None if the file system has no inode numbers."""
        status = read_with_retries(lambda: os.stat(self._entry), os.fspath(self._entry))
        return (status.st_dev, status.st_ino) if status.st_ino else None

    def _is_link_to_parent(self) -> bool:
        """Return whether this is a link, perhaps over other links, to a folder that contains it."""
        if not self._entry.is_symlink():
            return False
        path = os.path.abspath(self._entry)
        target = os.path.realpath(path)
        folders = (os.path.realpath(folder) for folder in Path(path).parents)
        return any(os.path.commonpath((target, folder)) == target for folder in folders)

    def _first_bytes(self) -> bytes:
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


def _has_picture(folder: Entry, depth: int = 0) -> bool:
    """Return whether a picture lies below `folder`, at least `depth` folders deep."""
    pending = [(folder, depth)]
    while pending:
        folder, depth = pending.pop()
        for entry in folder.entries():
            if entry.is_dir():
                if entry.reason_to_ignore() is None:
                    pending.append((entry, depth - 1))
            elif depth <= 0 and entry.reason_to_ignore() is None:
                return True
    return False


def _has_picture_name(name: str) -> bool:
    """Return whether a file's name is that of a picture."""
    return name[name.rfind(".") :].lower() in kinds.IMAGE_EXTENSIONS and name[0] != "."


def _sorted_by_name(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.name)


def split_of(folder: str) -> str | None:
    """Return the split in a folder's name, as `train` for Training, train_set, train2017; else None."""
    return SPLIT_FOLDERS.get(re.sub(r"[-_ ]?set$", "", folder.lower().rstrip("0123456789")))


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


def find_layout(top: Entry, root: Path, class_depth: int) -> _Layout:
    """Find the splits of a tree: folders named as splits that hold class folders, or pictures at depth 0.

    A folder is a split if it has the usual name of one (`SPLIT_FOLDERS`) and holds class folders; a class
    holds its pictures itself. Names without an extension are those of pictures, 1 of 1.jpg. What comes are
    the classes of each split, the pictures that are ignored, and words of each warning or of the error.

        TREE                                               WHAT COMES
        bus/1 cat/2                                        bus cat
        train/b/1 train/c/2 val/a/3                        train: b c; val: a
        Train/b/1 VALID/b/2                                train: b; val: b
        Testing/b/1 Training/b/2                           test: b; train: b
        dev/b/1 evaluation/b/2 train_set/b/3               val: b; test: b; train: b
        train2017/b/1 val2017/b/2                          train: b; val: b
        train/n1/images/1 val/n1/images/2                  train: n1; val: n1
        __MACOSX/train/b/1 lost+found/2 train/b/3          train: b
        steam_train/1 test_tube/2                          steam_train test_tube
        steam_train/a/1 train_station/a/2                  steam_train train_station

    A single split is alone, or lies beside pictures that are in no class folder; what is in no class folder
    of a split is ignored. A folder without any picture is an empty split.

        train/b/1 val/a/3 val/x                            train: b; val: a; ignored: val/x
        train/b/1 train/c/2 train/x                        train: b c; ignored: train/x
        train/b/1 test/3 test/4 x                          train: b; ignored: test/3 test/4 x
        train/b/1 train/c/2 some/3                         train: b c; ignored: some/3
        train/b/1 val/b/2 more/b/3                         train: b; val: b; ignored: more/b/3
        train/a/1 val/a/2 valid/                           train: a; val: a
        train/a/1 val/a/2 valid/a/3                        error: 'val' and 'valid'

    Otherwise a class has the name of a split.

        bus/1 train/2 train/3 train/old/4                  bus train; warning: taken for classes: 'train'
        bus/a/1 train/a/2                                  bus train; warning: 'train'
        test/1 train/2                                     test train; warning: --class-depth 0

    Class folders may lie deeper, or there are none.

        a/b/1 a/x d/e/2 above, depth 2                     a/b d/e; ignored: a/x above
        train/a/b/1 test/a/b/2, depth 2                    test: a/b; train: a/b
        test/1 train/2, depth 0                            test: no classes; train: no classes
        1 train/2, depth 0                                 no classes
        birds/heron/1 birds/owl/2 pets/dog/3               birds pets; warning: --class-depth 2
        photos/heron/1 photos/owl/2                        photos; warning: photos/photos instead
        train/x/heron/1 train/x/owl/2 val/x/heron/3        train: x; val: x; warning: --class-depth 2
        n1/images/1 n2/images/2                            n1 n2
        heron/1 heron/2023/2 heron/2024/3                  heron
        a/b/1, depth 3                                     error: --class-depth 2
        1                                                  error: --class-depth 0
        notes/                                             error: precache sample
        default/a/b/0.tar                                  error: /default/a

    Labels may be in a table, or in a file for each picture.

        1 labels.csv                                       error: labels.csv DST --root FOLDER
        train/1 labels.csv sample_submission.csv           train; warning: 'train'; warning: are in labels.csv
        a/1 b/2 labels.csv                                 a b; warning: labels.csv DST --root
        images/1 masks/1                                   error: images DST --class-depth 0
        train/images/1 train/masks/1 val/images/2          error: train/images DST --class-depth 0
        images/train/1 images/val/2 masks/train/1          error: images DST --class-depth 0
        JPEGImages/1 SegmentationClass/1                   error: JPEGImages DST --class-depth 0
        image_2/1 gt_2/1                                   error: image_2 DST --class-depth 0
        images/cat/1 images/dog/2 annotations/trimaps/1    error: images DST
        images/1 cat/2                                     cat images
        masks/1 hats/2                                     hats masks
        photos/1 labels/2 maps/3                           labels maps photos

    Raises:
        SourceError: two folders are one split, such as val and valid.
    """
    entries = top.entries()
    folders = [entry for entry in entries if entry.is_dir() and entry.reason_to_ignore() is None]
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
        if not _has_picture(folder):
            splits.setdefault(str(split_of(folder.name)), folder)
    by_folder = sorted(splits.items(), key=lambda split_and_folder: split_and_folder[1].name)
    return _Layout(tuple(by_folder), tuple(entry for entry in entries if entry not in splits.values()))


def _are_splits(
    top: Entry, candidates: list[Entry], non_empty: list[Entry], others: list[Entry], class_depth: int
) -> bool:
    """Return whether folders that are named as splits are splits, and not classes with such names.

    Args:
        candidates: folders of `top` that are named as splits.
        non_empty: the candidates with pictures `class_depth` folders deep.
        others: the other folders of `top`.
    """
    if class_depth == 0:
        has_pictures_beside = any(_is_picture(entry) for entry in top.entries()) or any(
            map(_has_picture, others)
        )
        return len(non_empty) > 1 or not has_pictures_beside
    if not any(_has_mostly_folders(folder) for folder in non_empty):
        return False
    if len(non_empty) > 1:
        return True
    if any(_has_picture(folder, class_depth) for folder in others):
        return False
    is_train = split_of(non_empty[0].name) == "train" and _has_mostly_folders(non_empty[0], at_least=2)
    return len(candidates) > 1 or is_train or not any(map(_has_picture, others))


def _has_mostly_folders(folder: Entry, at_least: int = 1) -> bool:
    """Return whether a folder holds `at_least` so many folders, and more of them than pictures."""
    used = [entry for entry in folder.entries() if entry.reason_to_ignore() is None]
    folder_count = sum(entry.is_dir() for entry in used)
    return folder_count >= at_least and folder_count > len(used) - folder_count


def _is_picture(entry: Entry) -> bool:
    return not entry.is_dir() and entry.reason_to_ignore() is None


def _check_no_annotations(folder: Entry, path: Path) -> None:
    """Raise SourceError if the folder at `path` has pictures beside the masks or labels of each."""
    folders = [entry for entry in folder.entries() if entry.is_dir()]
    annotations = [entry.name for entry in folders if _base_name(entry) in _ANNOTATION_FOLDERS]
    pictures = [entry for entry in folders if _base_name(entry) in _PICTURE_FOLDERS]
    if not annotations or not pictures or not _has_picture(pictures[0]):
        return
    others = [entry for entry in folders if _base_name(entry) not in _ANNOTATION_FOLDERS | _PICTURE_FOLDERS]
    if any(entry.reason_to_ignore() is None and _has_picture(entry) for entry in others):
        return  # classes, two of which happen to have such names
    inner = [entry.name for entry in pictures[0].entries() if entry.is_dir()]
    has_classes = _has_mostly_folders(pictures[0]) and not all(map(split_of, inner))
    flags = () if has_classes else ("--class-depth", "0")
    command = shell_command("precache convert", path / pictures[0].name, "DST", *flags)
    raise SourceError(
        f"{pictures[0].name!r} and {annotations[0]!r} are pictures and what labels them, not classes",
        path=path,
        remedy=f"for the pictures alone, without these labels, run: {command}",
    )


def _base_name(folder: Entry) -> str:
    """Return the name of a folder without numbers: image_2 is a folder of images."""
    return re.sub(r"[-_0-9]+$", "", folder.name.lower())


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
    expected = f"expected {root}/{'FOLDER/' * (class_depth - 1)}CLASS/picture.jpg"
    if not _has_picture(top):
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
        remedy=_advice_on_tables(root, [entry.name for entry in top.entries()]),
    )


def _folder_of_shards(top: Entry) -> str | None:
    """Return the path to name as source if tars or Parquet files lie too deep to be seen; else None."""
    pending = [("", top)]
    while pending:
        path, folder = pending.pop()
        for entry in folder.entries():
            if not entry.is_dir():
                if path.count("/") > 1 and entry.name.lower().endswith(_SHARD_SUFFIXES):
                    return path.strip("/").rpartition("/")[0]
            elif entry.reason_to_ignore() is None:
                pending.append((f"{path}/{entry.name}", entry))
    return None


def _advice_on_tables(root: Path, paths: list[str]) -> str:
    """Return what to run if tables beside the class folders have the labels of the pictures; else "".

    Args:
        paths: paths in the tree of files, some of which may be such tables.
    """
    tables = [path for path in paths if "/" not in path and is_table(Path(path))]
    tables = [path for path in tables if "submission" not in path.lower()]
    if not tables:
        return ""
    command = shell_command(
        "precache convert", root / tables[0], "DST --root FOLDER --image COLUMN --label COLUMN"
    )
    return f"if the labels of the pictures are in {abridge(tables)}, run: {command}"


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
        raise _no_pictures_error(top, root, class_depth)
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
        _check_no_annotations(folder, self.root / path)
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
    links = [ignored for ignored in lister.ignored if ignored.reason == _LINK_TO_PARENT]
    missed = [
        f"{ignored.path!r} ({ignored.reason})"
        for ignored in lister.ignored
        if ignored.reason != _LINK_TO_PARENT and _looks_like_picture(ignored.path)
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
        advice := _advice_on_tables(root, [ignored.path for ignored in lister.ignored])
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

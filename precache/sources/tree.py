"""A raw image tree: class folders, and every picture below one belongs to its class, at any depth.

    SRC/001.ak47/001_0001.jpg        sample, class '001.ak47'
    SRC/056.dog/greg/056_0001.jpg    sample, class '056.dog'
    SRC/198.spider/RENAME2           ignored: neither an image extension nor an image signature
    SRC/cover.jpg                    ignored: a file beside the class folders
    SRC/again -> .                   ignored: a link to a folder that it lies in

Classes, samples and their order are those of torchvision's `ImageFolder`: class by class, in each the folders
by their whole paths, in each of these the files by name. Where this differs, the user gains by it:

- Hidden files and folders, and those that systems keep for themselves (`SYSTEM_FOLDERS`), hold thumbnails and
  copies: '._1.jpg' of macOS, '.ipynb_checkpoints', '@eaDir'. They are no samples and no classes.
- A picture without an extension of its kind is one by its first bytes: Caltech-101 holds a JPEG named 'tmp'.
  `precache.pictures.kinds` lists both. Whether it can be decoded is only known when it is decoded.
- A link that leads in a circle is not followed; `ImageFolder` follows it some 40 times. One that leads to
  nothing is no sample.
- A class without a picture is left out, with a warning; `ImageFolder` refuses the tree.

Where class folders lie in folders such as `train` and `val`, these are splits: SRC/train/001.ak47/1.jpg, see
`SPLIT_FOLDERS`. What lies beside them, or in one of them but in no class folder, is left out by name.

Class folders may lie N folders deep: then the class is named by its path, such as 'birds/heron'. With N = 0
there are none: SRC/0001.jpg, a picture without a label.

A tree on disk is listed by names and kinds, which its folders say (`list_tree`); sizes and times are asked of
each file only for who needs them, such as a conversion (`scan_tree`).

The folders are on disk, in an archive (`precache.sources.archive`) or in an object storage, where they are
prefixes: s3://BUCKET/photos/heron/1.jpg. What is a sample, its id and the digest are the same.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import repeat
from pathlib import Path
from typing import TypeAlias

import numpy as np
import xxhash

from precache.errors import NothingFoundError, SourceError, check_range, did_you_mean, os_reason
from precache.pictures import kinds
from precache.pictures.reading import check_bytes, read_picture, read_with_retries, sizes_and_times
from precache.reporting import abridge, quantity
from precache.sources.base import IgnoredPath, SampleList, SampleRef, Samples, Scan, Source
from precache.sources.options import is_table
from precache.storage import open_regular
from precache.storage.objects import ObjectInfo, ObjectStore
from precache.storage.retries import ObjectNotFoundError
from precache.storage.urls import Location, Url

SPLIT_FOLDERS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Names of folders, in lower case, and the split that each is; those of Hugging Face's `imagefolder`."""
SYSTEM_FOLDERS = frozenset((
    "__MACOSX", "@eaDir", "@Recycle", "#recycle", "#snapshot", "lost+found", "$RECYCLE.BIN",
    "System Volume Information", "__pycache__",
))  # fmt: skip
"""Folders that operating systems, network storages and programs put among the user's own."""

_HASHED = 4096  # samples at a time
_SHARD_SUFFIXES = (".parquet", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_LOOP = "a link to a folder that it lies in"
_BESIDE_CLASSES = "a file beside the class folders"


def split_of(folder: str) -> str | None:
    """The split that a folder of this name is: `train` for Training, train_set, train2017; None: of none."""
    return SPLIT_FOLDERS.get(re.sub(r"[-_ ]?set$", "", folder.lower().rstrip("0123456789")))


class Node:
    """A file or a folder in an archive or an object storage.

    Attributes:
        name: without those of its folders.
        path: the names from the outermost folder to it.
        children: of a folder, by name; None for a file.
        bytes: size of the content; -1 for what cannot be read, such as a device.
        modified_ns: when it was last written.
        place: see `SampleRef.place`.
    """

    __slots__ = ("_first_bytes", "bytes", "children", "modified_ns", "name", "path", "place")

    def __init__(self, first_bytes: "Callable[[Node], bytes]", name: str = "", path: str = "") -> None:
        self.name, self.path, self._first_bytes = name, path, first_bytes
        self.children: dict[str, Node] | None = None
        self.bytes, self.modified_ns, self.place = -1, 0, 0

    def child(self, name: str) -> "Node":
        """What the folder holds under this name, made where there is nothing; a file becomes a folder."""
        if self.children is None:
            self.children = {}
        if name not in self.children:
            path = f"{self.path}/{name}" if self.path else name
            self.children[name] = Node(self._first_bytes, name, path)
        return self.children[name]

    def is_dir(self) -> bool:
        """Whether it is a folder."""
        return self.children is not None

    def is_file(self) -> bool:
        """Whether it is a file that can be read."""
        return self.children is None and self.bytes >= 0

    @property
    def is_loop(self) -> bool:
        """Whether it is a link to a folder that it lies in; there are no such links here."""
        return False

    def entries(self) -> "Iterable[Node]":
        """What the folder holds; nothing for a file."""
        return self.children.values() if self.children is not None else ()

    def list_pictures(self) -> "tuple[list[str], list[Node]]":
        """Names of the files in the folder that are named as pictures, and all else that it holds."""
        pictures: list[str] = []
        others: list[Node] = []
        for node in self.entries():
            if _is_named_as_picture(node.name) and node.is_file():
                pictures.append(node.name)
            else:
                others.append(node)
        return pictures, others

    def statuses(self, names: Sequence[str]) -> list[tuple[int, int, int]]:
        """Size in bytes, time of the last write and place of each of these files of the folder."""
        files = map((self.children or {}).__getitem__, names)
        return [(file.bytes, file.modified_ns, file.place) for file in files]

    def identity(self) -> tuple[int, int] | None:
        """What tells a folder on disk from others, under whatever name it is found; None elsewhere."""
        return None

    def find(self, parts: Iterable[str]) -> "Node | None":
        """What lies below it at the path of these names; None if there is nothing."""
        node: Node | None = self
        for part in parts:
            node = (node.children or {}).get(part) if node is not None else None
        return node

    def first_bytes(self) -> bytes:
        """As many of its first bytes as `kinds.PREFIX_BYTES`."""
        return self._first_bytes(self)


class DiskEntry:
    """A file or a folder on disk, with the methods of `Node`; an error of the disk is a SourceError."""

    __slots__ = ("_entry", "name")

    def __init__(self, entry: "os.DirEntry[str] | Path") -> None:
        self._entry, self.name = entry, entry.name

    def is_dir(self) -> bool:
        """Whether it is a folder, or a link to one."""
        return self._ask(self._entry.is_dir)

    def is_file(self) -> bool:
        """Whether it is a file, or a link to one."""
        return self._ask(self._entry.is_file)

    @property
    def is_loop(self) -> bool:
        """Whether it is a link to a folder that it lies in, itself or by other links: it leads here again."""
        if not self._entry.is_symlink():
            return False
        path = os.path.abspath(self._entry)
        target = os.path.realpath(path)
        folders = (os.path.realpath(folder) for folder in Path(path).parents)
        return any(os.path.commonpath((target, folder)) == target for folder in folders)

    def entries(self) -> "Iterable[DiskEntry]":
        """What the folder holds."""

        def listed() -> list[DiskEntry]:
            with os.scandir(self._entry) as found:
                return [DiskEntry(entry) for entry in found]

        return read_with_retries(listed, os.fspath(self._entry))

    def list_pictures(self) -> "tuple[list[str], list[DiskEntry]]":
        """Names of the files in the folder that are named as pictures, and all else that it holds.

        The list of a folder says what each is (`d_type`), so that no file is asked about; only links are left
        to be looked at, and everything where a file system says nothing of kinds.
        """

        def listed() -> tuple[list[str], list[DiskEntry]]:
            pictures: list[str] = []
            others: list[DiskEntry] = []
            with os.scandir(self._entry) as found:
                for entry in found:
                    if _is_named_as_picture(entry.name) and entry.is_file(follow_symlinks=False):
                        pictures.append(entry.name)
                    else:
                        others.append(DiskEntry(entry))
            return pictures, others

        return read_with_retries(listed, os.fspath(self._entry))

    def statuses(self, names: Sequence[str]) -> Iterable[tuple[int, int, int]]:
        """Placeholders for sizes, times and places of these files, for nobody has asked; see `with_sizes`."""
        return repeat((-1, 0, 0), len(names))

    def identity(self) -> tuple[int, int] | None:
        """Device and number of the folder; None where the file system counts none."""
        status = read_with_retries(lambda: os.stat(self._entry), os.fspath(self._entry))
        return (status.st_dev, status.st_ino) if status.st_ino else None

    def first_bytes(self) -> bytes:
        """As many of its first bytes as `kinds.PREFIX_BYTES`."""

        def start() -> bytes:
            with open_regular(self._entry) as file:  # whose own `read` gives None where there is nothing yet
                return os.read(file.fileno(), kinds.PREFIX_BYTES)

        return read_with_retries(start, os.fspath(self._entry))

    def _ask(self, question: Callable[[], bool]) -> bool:
        def answer() -> bool:
            try:
                return question()
            except OSError as error:
                if error.errno == errno.ELOOP:  # a link to itself
                    return False
                raise

        return read_with_retries(answer, os.fspath(self._entry))


Entry: TypeAlias = DiskEntry | Node


@dataclass(frozen=True, slots=True)
class TreeSource:
    """A tree on disk as a `Source`, whose class folders lie `class_depth` folders deep."""

    root: Path
    class_depth: int = 1

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.root,)

    def scan(self) -> Scan:
        return scan_tree(self.root, self.class_depth)

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        # as the scan found it: what is rejected, or converted, must not depend on when
        return read_picture(self.where(ref), max_pixels, (ref.bytes, ref.modified_ns))

    def where(self, ref: SampleRef) -> str:
        return os.path.join(self.root, ref.path)


@dataclass(frozen=True, slots=True)
class ObjectTree:
    """A tree of objects as a `Source`, whose class prefixes lie `class_depth` levels deep.

    An object is the one that was listed as long as size and etag are.
    """

    root: Url
    class_depth: int = 1

    reads_at_a_time = 16
    """Pictures that are requested at a time: each waits for the network."""

    @property
    def paths(self) -> tuple[Url, ...]:
        return (self.root,)

    def scan(self) -> Scan:
        return scan_folders(_tree_of(_store(self.root)), self, self.class_depth)

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        listed = (ref.bytes, ref.place)
        return read_object(
            self.root, ref.path, ref.bytes, max_pixels, lambda it: (it.bytes, _version_of(it)) == listed
        )

    def where(self, ref: SampleRef) -> str:
        return f"{self.root}/{ref.path}"


def read_object(
    url: Url, name: str, size: int, max_pixels: int, is_same: Callable[[ObjectInfo], bool]
) -> bytes:
    """The content of the picture `name` below `url`, which had `size` bytes when it was listed.

    Args:
        is_same: whether an object is the one that was listed.

    Raises:
        ImageError: it is larger than a picture of `max_pixels` can be.
        SourceError: it is gone, or is another one.
        StorageError: the storage does not give it.
    """
    check_bytes(str(url / name), size, max_pixels)
    try:
        content, info = _store(url).get_with_info(name)
    except ObjectNotFoundError as error:
        raise SourceError(
            f"{url / name}: disappeared after the tree was listed; run the same command again"
        ) from error
    if not is_same(info):
        raise SourceError(
            f"{url / name}: changed while it was converted (expected {size:,} bytes, got {info.bytes:,}, "
            f"or written since); leave it alone, and convert with --overwrite"
        )
    return content


def _tree_of(store: ObjectStore) -> Node:
    """All objects below the store's URL; `Node.place` is what `_version_of` says."""

    def first_bytes(node: Node) -> bytes:
        return store.get_range(node.path, 0, min(node.bytes, kinds.PREFIX_BYTES))

    top = Node(first_bytes)
    for info in store.list():
        node = top
        for part in info.name.split("/"):
            node = node.child(part)
        node.bytes, node.modified_ns, node.place = info.bytes, info.modified_ns, _version_of(info)
    return top


def _version_of(info: ObjectInfo) -> int:
    """63 bits that change with the object's content, as far as the storage says."""
    said = info.etag.strip('"') if info.etag else f"{info.bytes} {info.modified_ns}"
    return xxhash.xxh3_64_intdigest(said.encode()) >> 1


@lru_cache(4)
def _store(url: Url) -> ObjectStore:
    return ObjectStore(url)


def scan_tree(root: str | os.PathLike[str], class_depth: int = 1) -> Scan:
    """List the samples of the tree at `root` as `list_tree`, and their sizes and times as `with_sizes`."""
    return with_sizes(list_tree(root, class_depth))


def list_tree(root: str | os.PathLike[str], class_depth: int = 1, *, allow_empty: bool = False) -> Scan:
    """List the samples of the tree at `root`, in the order that the module's docstring says.

    No file is asked for its size or time; `digest` goes by the names alone.

    Args:
        class_depth: how many folders deep the class folders lie; 0 for a folder of pictures without labels.
        allow_empty: keep class folders without a picture as classes, in their order.

    Raises:
        SettingError: `class_depth` is negative.
        NothingFoundError: `root` has no class folder with a picture.
        SourceError: `root` is missing, is not a folder, or has two folders of one split; or something of it
            cannot be read: then its `__cause__` is an OSError.
    """
    class_depth = check_range("class_depth", class_depth, 0)
    root = Path(root)
    try:
        reason = None if stat.S_ISDIR(os.stat(root).st_mode) else "is not a folder"
    except (FileNotFoundError, NotADirectoryError):
        reason = "does not exist"
    except OSError as error:
        raise SourceError(
            f"{root}: cannot be listed ({os_reason(error)}); check its permissions and its disk"
        ) from error
    if reason is not None and is_table(root) and root.exists():
        raise SourceError(
            f"{root}: is a table of pictures, expected a folder of class folders; "
            f"only 'precache convert' reads tables"
        )
    if reason is not None:
        remedy = did_you_mean(root) or " ('precache sample' makes one to try, data/raw)"
        raise SourceError(f"{root}: {reason}; expected a folder of class folders with pictures{remedy}")
    return scan_folders(DiskEntry(root), TreeSource(root, class_depth), class_depth, allow_empty=allow_empty)


def with_sizes(scan: Scan) -> Scan:
    """The scan of a tree on disk with the sizes and times of its files, which many threads ask for.

    Raises:
        SourceError: a file cannot be asked, or is gone.
    """
    assert isinstance(scan.source, TreeSource)
    sizes, times = sizes_and_times(scan.samples.list_paths(f"{scan.root}/"))
    samples = replace(scan.samples, file_bytes=sizes, modified_ns=times)
    return replace(scan, samples=samples, digest=_digest_of(samples, scan.source.class_depth))


def _digest_of(samples: Samples, class_depth: int) -> str:
    """`Scan.digest` of a tree: of paths and sizes, or of paths alone where no sizes were asked for."""
    digest = hashlib.sha256()
    if len(samples) and samples.file_bytes.max() < 0:
        digest.update(samples.paths)
        digest.update(samples.path_ends.tobytes())
    else:
        paths = samples.list_paths()
        for start in range(0, len(paths), _HASHED):
            part = slice(start, start + _HASHED)
            named = zip(paths[part], samples.file_bytes[part].tolist(), strict=True)
            digest.update(os.fsencode("".join([f"{path}\0{size}\0" for path, size in named])))
    if class_depth != 1:  # the same files are other classes
        digest.update(b"class depth %d" % class_depth)
    return digest.hexdigest()


def scan_folders(top: Entry, source: Source, class_depth: int, *, allow_empty: bool = False) -> Scan:
    """List the samples of `source`, of which `top` is the outermost folder; arguments as of `scan_tree`."""
    lister = _Lister(source.root, class_depth)
    layout = _find_layout(top, source.root, class_depth)
    if not layout.splits:
        lister.list_split("", top, "")
    for split, folder in layout.splits:
        lister.list_split(split, folder, folder.name)
    for entry in layout.beside:
        lister.leave_out(entry, "in no class folder of a split" if class_depth else "in no folder of a split")
    if not lister.counts and not (allow_empty and lister.empty):
        raise NothingFoundError(_nothing_found(top, source, class_depth))
    return lister.scan(source, layout.warnings, allow_empty=allow_empty)


def _has_paths(source: Source) -> bool:
    """Whether a folder in a tree can be named as a source itself: in an archive it cannot."""
    return isinstance(source, TreeSource | ObjectTree)


def _folder_of_shards(top: Entry) -> str | None:
    """The folder to name where tars or Parquet files lie deeper than they are looked for; None: nowhere."""
    waiting = [("", top)]
    while waiting:
        path, folder = waiting.pop()
        for entry in _sorted_entries(folder):
            here = _joined(path, entry.name)
            if not entry.is_dir():
                if path.count("/") and entry.name.lower().endswith(_SHARD_SUFFIXES):
                    return path.rpartition("/")[0]
            elif _why_not_entered(entry) is None:
                waiting.append((here, entry))
    return None


def _nothing_found(top: Entry, source: Source, class_depth: int) -> str:
    root = source.root
    if _has_paths(source) and (folder := _folder_of_shards(top)) is not None:
        return f"{root}: has no class folder with pictures, but shards; name their folder, {root}/{folder}"
    if class_depth == 0:
        return f"{root}: has no pictures in it (make a sample tree with 'precache sample DST')"
    expected = f"expected {root}/{'FOLDER/' * (class_depth - 1)}CLASS/picture.jpg"
    if _holds_picture(top, 0):
        depth = next(depth for depth in range(class_depth - 1, -1, -1) if _holds_picture(top, depth))
        what = "pictures without labels" if depth == 0 else "class folders that lie less deep"
        return (
            f"{root}: has no class folder with pictures, but pictures; {expected} (for {what} pass "
            f"--class-depth {depth})"
        )
    sample = "make a sample tree with 'precache sample DST'"
    return f"{root}: has no class folder with pictures; {expected} ({sample})"


class _Lister:
    """Lists folders, and holds what was found.

    Attributes:
        counts: pictures of each class folder that has some.
        empty: class folders without a picture: path -> name of the class.
    """

    def __init__(self, root: Location, class_depth: int) -> None:
        self.counts: list[int] = []
        self.empty: dict[str, str] = {}
        self._root, self._class_depth = root, class_depth
        self._split = ""
        self._class_of: list[str] = []  # of each class folder that has pictures
        self._listed = SampleList()
        self._ignored: list[IgnoredPath] = []
        self._missed: list[IgnoredPath] = []  # of these, files that look like pictures
        self._deeper = 0  # pictures that do not lie directly in their class folder
        self._subfolders: dict[str, str] = {}  # name of a class -> two of its folders, in words
        self._loops: list[str] = []
        self._name_of: dict[tuple[int, int], str] = {}  # a folder's device and number -> its path
        self._twice: list[str] = []

    def list_split(self, split: str, folder: Entry, path: str) -> None:
        """List the class folders in `folder`, at `path`, as those of `split`, which may have none."""
        self._split = split
        self._listed.split_of[split] = len(self._listed.split_of)
        if self._class_depth == 0:
            self._list_class("", path, folder)
            return
        found = self._class_folders(folder, path, "", self._class_depth)
        for name, here, class_folder in sorted(found, key=lambda it: it[0]):
            self._note_twice(class_folder, here)
            self._list_class(name, here, class_folder)

    def leave_out(self, entry: Entry, reason: str) -> None:
        """Ignore a file, or every file in a folder, for this reason."""
        waiting = [(entry.name, entry)]
        while waiting:
            path, entry = waiting.pop()
            if not entry.is_dir():
                self._ignore(path, reason, missed=_looks_like_picture(entry))
            elif (skipped := _why_not_entered(entry)) is not None:
                self._ignore_folder(path, skipped)
            else:
                waiting += ((f"{path}/{inner.name}", inner) for inner in reversed(_sorted_entries(entry)))

    def _class_folders(
        self, folder: Entry, path: str, name: str, depth: int
    ) -> Iterator[tuple[str, str, Entry]]:
        """Yield class name, path and folder of those `depth` folders deep; ignore what lies beside them."""
        for entry in _sorted_entries(folder):
            here = _joined(path, entry.name)
            if not entry.is_dir():
                self._ignore(here, _BESIDE_CLASSES, missed=_looks_like_picture(entry))
            elif (reason := _why_not_entered(entry)) is not None:
                self._ignore_folder(here, reason)
            elif depth > 1:
                yield from self._class_folders(entry, here, _joined(name, entry.name), depth - 1)
            else:
                yield _joined(name, entry.name), here, entry

    def _list_class(self, class_name: str, class_path: str, class_folder: Entry) -> None:
        """List all pictures below a class folder, by their folders' paths and then by name."""
        before = len(self._listed)
        # a heap: what lies in a folder has a path that sorts behind the folder's own
        folders = [(class_path, class_folder)]
        subfolders: dict[str, None] = {}
        while folders:
            path, folder = heappop(folders)
            pictures, others = folder.list_pictures()
            for entry in _by_name(others):
                here = _joined(path, entry.name)
                reason = _why_not_a_picture(entry)
                if reason is None:
                    pictures.append(entry.name)
                elif not entry.is_dir():
                    self._ignore(here, reason, missed=_looks_like_picture(entry))
                elif (reason := _why_not_entered(entry)) is not None:
                    self._ignore_folder(here, reason)
                else:
                    heappush(folders, (here, entry))
            pictures.sort()
            above = _joined(path, "")
            self._listed.add_listed(
                [above + name for name in pictures], folder.statuses(pictures), self._split
            )
            if path != class_path and pictures:
                self._deeper += len(pictures)
                subfolders[path[len(class_path) :].strip("/").partition("/")[0]] = None
        count = len(self._listed) - before
        if count:
            self.counts.append(count)
            self._class_of.append(class_name)
            if len(subfolders) > 1:
                self._subfolders[class_name] = abridge(
                    [repr(_joined(class_name, name)) for name in subfolders]
                )
        elif class_name:
            self.empty[class_path] = class_name

    def _ignore(self, path: str, reason: str, *, missed: bool = False) -> None:
        self._ignored.append(IgnoredPath(path, reason))
        if missed:
            self._missed.append(self._ignored[-1])

    def _ignore_folder(self, path: str, reason: str) -> None:
        self._ignore(path, reason)
        if reason == _LOOP:
            self._loops.append(path)

    def _note_twice(self, folder: Entry, path: str) -> None:
        identity = folder.identity()
        first = path if identity is None else self._name_of.setdefault(identity, path)
        if first != path:
            self._twice.append(f"{path!r} is {first!r}")

    def _warnings(self, classes: int, *, is_plain: bool) -> Iterator[str]:
        root = self._root
        if self.empty:
            yield f"{root}: class folders without a picture: {abridge([*map(repr, self.empty)])}"
        if self._missed:
            what = quantity(
                len(self._missed), "file that looks like a picture is", "files that look like pictures are"
            )
            yield f"{root}: {what} left out: {abridge([f'{it.path!r} ({it.reason})' for it in self._missed])}"
        if self._loops:
            loops = abridge([*map(repr, self._loops)])
            yield f"{root}: links to a folder above them are not followed: {loops}"
        if self._twice:
            twice = "class folders that are the same folder, so pictures count twice"
            yield f"{root}: {twice}: {abridge(self._twice)}"
        # none lies directly in its class folder
        if self._class_depth and self._subfolders and self._deeper == len(self._listed):
            name, inner = next(iter(self._subfolders.items()))
            remedy = f"pass --class-depth {self._class_depth + 1}, or class_depth={self._class_depth + 1}"
            if classes == 1 and is_plain and list(self._listed.split_of) == [""]:
                remedy = f"name {root}/{name} instead"
            deeper = "all pictures lie deeper than their class folders"
            yield f"{root}: {deeper}; if {inner} are classes, {remedy}"

    def scan(self, source: Source, warnings: Iterable[str], *, allow_empty: bool) -> Scan:
        """The scan: all that was listed."""
        target = "class" if self._class_depth else "none"
        names = {*self._class_of, *(self.empty.values() if allow_empty else ())}
        classes = sorted(names) if target == "class" else []
        label_of = {name: label for label, name in enumerate(classes)}
        labels = np.repeat([label_of.get(name, -1) for name in self._class_of], self.counts)
        samples = self._listed.samples(labels)
        return Scan(
            source=source,
            classes=tuple(classes),
            samples=samples,
            ignored=tuple(self._ignored),
            scanned=len(samples) + len(self._ignored),
            digest=_digest_of(samples, self._class_depth),
            warnings=(*warnings, *self._warnings(len(classes), is_plain=_has_paths(source))),
            target=target,
            deeper=self._deeper if self._class_depth else 0,
        )


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the splits of a tree are.

    Attributes:
        splits: name and folder of each; none for a tree without splits.
        beside: what lies beside them.
        warnings: one line each.
    """

    splits: tuple[tuple[str, Entry], ...] = ()
    beside: tuple[Entry, ...] = ()
    warnings: tuple[str, ...] = ()


def _find_layout(top: Entry, root: Location, class_depth: int) -> _Layout:
    """The splits of a tree: folders named so that hold class folders, or, where there are none, pictures.

    Raises:
        SourceError: two folders are one split, such as val and valid.
    """
    entries = _sorted_entries(top)
    folders = [entry for entry in entries if entry.is_dir() and _why_not_entered(entry) is None]
    named = [folder for folder in folders if split_of(folder.name)]
    filled = [folder for folder in named if _holds_picture(folder, class_depth)]
    others = [folder for folder in folders if folder not in named]
    if not filled or not _are_splits(top, named, filled, others, class_depth):
        taken = filled or (named if not others else [])  # that the user may have meant as splits
        if not taken or class_depth == 0 or not _holds_picture(top, 1):
            return _Layout()
        names = abridge([repr(folder.name) for folder in taken])
        remedy = f"for splits put other class folders out of {root}"
        if not filled:
            remedy = "for splits of pictures without labels pass --class-depth 0, or class_depth=0"
        warning = f"{root}: folders named as splits are taken for classes: {names}; {remedy}"
        return _Layout(warnings=(warning,))
    splits: dict[str, Entry] = {}
    for folder in filled:
        split = str(split_of(folder.name))
        first = splits.setdefault(split, folder)
        if first is not folder:
            raise SourceError(
                f"{root}: the folders {first.name!r} and {folder.name!r} are both the split {split!r}; merge "
                f"them, or move one out of the tree"
            )
    for folder in named:
        if not _holds_picture(folder, 0):  # a split without a picture; one with loose pictures is none
            splits.setdefault(str(split_of(folder.name)), folder)
    in_order = sorted(splits.items(), key=lambda it: it[1].name)
    return _Layout(tuple(in_order), tuple(entry for entry in entries if entry not in splits.values()))


def _are_splits(
    top: Entry, named: list[Entry], filled: list[Entry], others: list[Entry], class_depth: int
) -> bool:
    """Whether folders named as splits are that, or classes that happen to be called so.

    A class holds its pictures itself, and may hold folders; a split holds class folders, and may hold a stray
    picture. Two splits are enough; one must be alone, or lie beside loose pictures only.
    """
    if class_depth == 0:
        pictures_beside = any(map(_is_loose, top.entries())) or any(_holds_picture(it, 0) for it in others)
        return len(filled) > 1 or not pictures_beside
    if not any(map(_holds_mostly_folders, filled)):
        return False
    if len(filled) > 1:
        return True
    if any(_holds_picture(folder, class_depth) for folder in others):
        return False
    loose_beside = any(_holds_picture(folder, 0) for folder in others)
    is_train = split_of(filled[0].name) == "train" and _holds_mostly_folders(filled[0], least=2)
    return len(named) > 1 or not loose_beside or is_train


def _holds_mostly_folders(folder: Entry, least: int = 1) -> bool:
    """Whether a folder holds more folders than pictures, and at least so many."""
    entries: list[Entry] = list(folder.entries())
    folders = sum(entry.is_dir() and _why_not_entered(entry) is None for entry in entries)
    return folders >= least and folders > sum(map(_is_loose, entries))


def _holds_picture(folder: Entry, depth: int) -> bool:
    """Whether a picture lies below `folder`, at least `depth` folders deep."""
    waiting = [(folder, depth)]
    while waiting:
        folder, depth = waiting.pop()
        for entry in folder.entries():
            if depth <= 0 and _is_loose(entry):
                return True
            if entry.is_dir() and _why_not_entered(entry) is None:
                waiting.append((entry, depth - 1))
    return False


def _is_loose(entry: Entry) -> bool:
    """Whether this is a picture; files whose names say that they are none are not opened to know it."""
    return kinds.may_be_picture(entry.name) and _why_not_a_picture(entry) is None


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _sorted_entries(folder: Entry) -> list[Entry]:
    """What `folder` holds, by name; SourceError if it cannot be listed."""
    return _by_name(folder.entries())


def _by_name(entries: Iterable[Entry]) -> list[Entry]:
    """Sort what a folder holds."""
    return sorted(entries, key=lambda entry: entry.name)


def is_left_alone(folder: str) -> bool:
    """Whether a folder of this name is hidden, or a system's own: it is neither class nor split."""
    return folder.startswith(".") or folder in SYSTEM_FOLDERS


def _why_not_entered(folder: Entry) -> str | None:
    """Why what this folder holds is not looked at; None if it is."""
    if is_left_alone(folder.name):
        return "a hidden folder" if folder.name.startswith(".") else "a folder of the system"
    return _LOOP if folder.is_loop else None


def _is_named_as_picture(name: str) -> bool:
    """Whether a file of this name is a picture, whatever it holds."""
    return name[name.rfind(".") :].lower() in kinds.IMAGE_EXTENSIONS and name[0] != "."


def _why_not_a_picture(entry: Entry) -> str | None:
    """Why this is not a sample; None if it is one."""
    name = entry.name
    if entry.is_dir():
        return "a folder"
    if not entry.is_file():
        return "not a regular file"
    if name.startswith("."):
        return "a hidden file"
    if kinds.extension(name) in kinds.IMAGE_EXTENSIONS:
        return None
    return None if kinds.is_picture(name, entry.first_bytes()) else kinds.skip_reason(name)


def _looks_like_picture(entry: Entry) -> bool:
    """Whether the user may have taken it for a sample."""
    return not entry.name.startswith(".") and kinds.looks_like_picture(entry.name) and not entry.is_dir()

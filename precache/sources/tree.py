"""A raw image tree: class folders with pictures directly inside them.

    SRC/001.ak47/001_0001.jpg      sample, class '001.ak47'
    SRC/056.dog/greg/              ignored: a folder inside a class folder
    SRC/198.spider/RENAME2         ignored: neither an image extension nor an image signature
    SRC/again -> .                 ignored: a link to a folder that it lies in

A tree whose folders are `train` and `val` (or `valid`, `validation`, `test`), with class folders in
each, keeps these splits: SRC/train/001.ak47/001_0001.jpg.

Class folders may lie N folders deep: then the class is named by its path, such as 'birds/heron'. With N = 0
there are none: SRC/0001.jpg, a picture without a label.

A file is a picture if its extension says so or, failing that, if its first bytes do: Caltech-101
holds a JPEG named 'tmp'. `precache.pictures.kinds` lists both. Whether it can be decoded is only known
when it is decoded.

The folders are on disk, in an archive (`precache.sources.archive`) or in an object storage, where they are
prefixes: s3://BUCKET/photos/heron/1.jpg. What is a sample, its id and the digest are the same.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import xxhash

from precache.errors import SourceError, did_you_mean
from precache.pictures import kinds
from precache.pictures.reading import check_bytes, read_picture, steadily
from precache.reporting import some
from precache.sources.base import IgnoredPath, SampleList, SampleRef, Scan, Source
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
_MISSED_SHARE = 0.01  # of files that look like pictures: if more are left out, there is a warning

_LOOP = "a link to a folder that it lies in"
_NO_PICTURES = "a folder without pictures"


def split_of(folder: str) -> str | None:
    """The split that a folder of this name is: `train` for Training and train_set; None: of none."""
    return SPLIT_FOLDERS.get(re.sub(r"[-_ ]?set$", "", folder.lower()))


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
    def is_plain_file(self) -> bool:
        """Whether it is a file, and no link."""
        return self.is_file()

    @property
    def is_loop(self) -> bool:
        """Whether it is a link to a folder that it lies in; there are no such links here."""
        return False

    def entries(self) -> "Iterable[Node]":
        """What the folder holds; nothing for a file."""
        return self.children.values() if self.children is not None else ()

    def status(self) -> tuple[int, int, int]:
        """Size in bytes, time of the last write, and place."""
        return self.bytes, self.modified_ns, self.place

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
    def is_plain_file(self) -> bool:
        """Whether the list of its folder says that it is a file, and no link."""
        try:
            return isinstance(self._entry, os.DirEntry) and self._entry.is_file(follow_symlinks=False)
        except OSError:  # such a list says nothing of kinds, and asking failed: `is_file` tries again
            return False

    @property
    def is_loop(self) -> bool:
        """Whether it is a link to a folder that it lies in: following it leads here again."""
        if not self._entry.is_symlink():
            return False
        path = os.fspath(self._entry)
        target, here = os.path.realpath(path), os.path.realpath(os.path.dirname(path))
        return os.path.commonpath((target, here)) == target

    def entries(self) -> "Iterable[DiskEntry]":
        """What the folder holds."""

        def listed() -> list[DiskEntry]:
            with os.scandir(self._entry) as found:
                return [DiskEntry(entry) for entry in found]

        return steadily(listed, os.fspath(self._entry))

    def status(self) -> tuple[int, int, int]:
        """Size in bytes and time of the last write of what it leads to, and 0."""
        try:  # first without the overhead of retries: a tree may hold 10,000,000 files
            status = os.stat(self._entry)
        except OSError:
            status = steadily(lambda: os.stat(self._entry), os.fspath(self._entry))
        return status.st_size, status.st_mtime_ns, 0

    def identity(self) -> tuple[int, int] | None:
        """Device and number of the folder; None where the file system counts none."""
        status = steadily(lambda: os.stat(self._entry), os.fspath(self._entry))
        return (status.st_dev, status.st_ino) if status.st_ino else None

    def first_bytes(self) -> bytes:
        """As many of its first bytes as `kinds.PREFIX_BYTES`."""

        def start() -> bytes:
            with open_regular(self._entry) as file:  # whose own `read` gives None where there is nothing yet
                return os.read(file.fileno(), kinds.PREFIX_BYTES)

        return steadily(start, os.fspath(self._entry))

    def _ask(self, question: Callable[[], bool]) -> bool:
        def answer() -> bool:
            try:
                return question()
            except OSError as error:
                if error.errno == errno.ELOOP:  # a link to itself
                    return False
                raise

        return steadily(answer, os.fspath(self._entry))


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
        content, info = _store(url).get_as_found(name)
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
    """List the samples of the tree at `root`, sorted by class folder, then by file name.

    Args:
        class_depth: how many folders deep the class folders lie; 0 for a folder of pictures without labels.

    Raises:
        SourceError: `root` is missing, is not a folder, or has no class folder with a picture; or
            something of it cannot be read: then its `__cause__` is an OSError.
    """
    root = Path(root)
    try:
        reason = None if stat.S_ISDIR(os.stat(root).st_mode) else "is not a folder"
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
    return scan_folders(DiskEntry(root), TreeSource(root, class_depth), class_depth)


def scan_folders(top: Entry, source: Source, class_depth: int) -> Scan:
    """List the samples of `source`, of which `top` is the outermost folder; raises as `scan_tree`."""
    lister = _Lister()
    for split, prefix, folder in _split_folders(top, class_depth):
        lister.begin(split)
        if class_depth == 0:
            lister.list_pictures(folder, prefix, "")
        else:
            lister.list_class_folders(folder, prefix, "", class_depth)
    if not lister.counts:
        raise SourceError(_nothing_found(top, source.root, class_depth))
    return lister.scan(source, class_depth)


def _nothing_found(top: Entry, root: Location, class_depth: int) -> str:
    if class_depth == 0:
        return f"{root}: has no pictures in it; for pictures in class folders leave out --class-depth 0"
    expected = f"{root}/{'FOLDER/' * (class_depth - 1)}CLASS/picture.jpg"
    if _holds_pictures(top):
        return (
            f"{root}: has no class folder with pictures, but pictures; expected {expected} "
            f"(for pictures without labels pass --class-depth 0)"
        )
    return (
        f"{root}: has no class folder with pictures; expected {expected} (where class folders lie deeper, "
        f"pass --class-depth {class_depth + 1}; make a sample tree with 'precache sample DST')"
    )


class _Lister:
    """Lists folders, and holds what was found.

    Attributes:
        split: that what is listed belongs to.
        counts: pictures of each folder that has some.
    """

    def __init__(self) -> None:
        self.split = ""
        self.counts: list[int] = []
        self._class_of: list[str] = []  # of each of these folders
        self._listed = SampleList()
        self._ignored: list[IgnoredPath] = []
        self._digest = hashlib.sha256()
        self._missed: list[str] = []  # ignored files that look like pictures
        self._empty: list[str] = []  # class folders without pictures
        self._loops: list[str] = []
        self._name_of: dict[tuple[int, int], str] = {}  # a folder's device and number -> its path
        self._twice: list[str] = []

    def begin(self, split: str) -> None:
        """Let what is listed from now on belong to `split`; one without a picture is a split, too."""
        self.split = split
        self._listed.split_of[split] = len(self._listed.split_of)

    def list_class_folders(self, folder: Entry, path: str, name: str, depth: int) -> None:
        """List the class folders that lie `depth` folders deep in `folder`, and what lies beside them.

        Args:
            path: of the folder, relative to the root, with a slash.
            name: the same without the split's folder: that of a class begins so.
        """
        for entry in _sorted_entries(folder):
            here = f"{path}{entry.name}"
            if not entry.is_dir():
                self._ignore(here, "a file beside the class folders", missed=_looks_like_picture(entry))
            elif entry.name.startswith("."):
                self._ignore(here, "a hidden folder")
            elif entry.is_loop:
                self._ignore(here, _LOOP)
                self._loops.append(here)
            elif depth > 1:
                self.list_class_folders(entry, f"{here}/", f"{name}{entry.name}/", depth - 1)
            else:
                self._note_twice(entry, here)
                if not self.list_pictures(entry, f"{here}/", f"{name}{entry.name}"):
                    self._ignore(here, _NO_PICTURES)
                    self._empty.append(here)

    def list_pictures(self, folder: Entry, path: str, class_name: str) -> int:
        """List the pictures in `folder`, all of one class; how many there are."""
        before, hashed = len(self._listed), bytearray()
        entries = _sorted_entries(folder)
        entries.reverse()
        while entries:
            entry = entries.pop()  # and forget it: there may be 10,000,000
            here = path + entry.name
            reason = _why_not_a_picture(entry)
            if reason is not None:
                self._ignore(here, reason, missed=_looks_like_picture(entry))
                continue
            size, modified_ns, place = entry.status()
            self._listed.add(here, size, modified_ns, place, self.split)
            hashed += b"%b\0%d\0" % (os.fsencode(here), size)
        self._digest.update(hashed)
        count = len(self._listed) - before
        if count:
            self.counts.append(count)
            self._class_of.append(class_name)
        return count

    def _ignore(self, path: str, reason: str, *, missed: bool = False) -> None:
        self._ignored.append(IgnoredPath(path, reason))
        if missed:
            self._missed.append(path)

    def _note_twice(self, folder: Entry, path: str) -> None:
        identity = folder.identity()
        first = path if identity is None else self._name_of.setdefault(identity, path)
        if first != path:
            self._twice.append(f"{path!r} is {first!r}")

    def _warnings(self, root: Location) -> tuple[str, ...]:
        lines = []
        if self._empty:
            lines.append(f"{root}: class folders without a picture: {some([*map(repr, self._empty)])}")
        if len(self._missed) > _MISSED_SHARE * (len(self._listed) + len(self._missed)):
            lines.append(
                f"{root}: {len(self._missed):,} files that look like pictures are left out: "
                f"{some([*map(repr, self._missed)])}"
            )
        if self._loops:
            lines.append(
                f"{root}: links to a folder above them are not followed: {some([*map(repr, self._loops)])}"
            )
        if self._twice:
            lines.append(
                f"{root}: class folders that are the same folder, so pictures count twice: "
                f"{some(self._twice)}"
            )
        return tuple(lines)

    def scan(self, source: Source, class_depth: int) -> Scan:
        """The scan: all that was listed."""
        target = "class" if class_depth else "none"
        classes = sorted(set(self._class_of)) if target == "class" else []
        label_of = {name: label for label, name in enumerate(classes)}
        labels = np.repeat([label_of.get(name, -1) for name in self._class_of], self.counts)
        samples = self._listed.samples(labels)
        if class_depth != 1:  # the same files are other classes
            self._digest.update(b"class depth %d" % class_depth)
        return Scan(
            source=source,
            classes=tuple(classes),
            samples=samples,
            ignored=tuple(self._ignored),
            scanned=len(samples) + len(self._ignored),
            digest=self._digest.hexdigest(),
            warnings=self._warnings(source.root),
            target=target,
        )


def _split_folders(top: Entry, class_depth: int) -> list[tuple[str, str, Entry]]:
    """(split, its path with a slash, its folder); one without a name for a tree without splits."""
    shown = [entry for entry in _sorted_entries(top) if not entry.name.startswith(".")]
    found = [entry for entry in shown if entry.is_dir() and not entry.is_loop]
    names = {folder.name for folder in found}
    if "train" not in names or not names <= set(SPLIT_FOLDERS):
        return [("", "", top)]
    # with class folders, a class that happens to be called train; without them, pictures beside the folders
    if any(map(_holds_pictures, found if class_depth else [top])):
        return [("", "", top)]
    return [(folder.name, f"{folder.name}/", folder) for folder in found]


def _holds_pictures(folder: Entry) -> bool:
    return any(_why_not_a_picture(entry) is None for entry in _sorted_entries(folder))


def _sorted_entries(folder: Entry) -> list[Entry]:
    """What `folder` holds, by name; SourceError if it cannot be listed."""
    return sorted(folder.entries(), key=lambda entry: entry.name)


def _why_not_a_picture(entry: Entry) -> str | None:
    """Why this, in a class folder, is not a sample; None if it is one."""
    name, is_hidden = entry.name, entry.name.startswith(".")
    if not is_hidden and name[name.rfind(".") :].lower() in kinds.IMAGE_EXTENSIONS and entry.is_plain_file:
        return None  # as usual
    if entry.is_dir():
        return "a folder inside a class folder"
    if not entry.is_file():
        return "not a regular file"
    if is_hidden:
        return "a hidden file"
    if kinds.extension(name) in kinds.IMAGE_EXTENSIONS:
        return None
    return None if kinds.is_picture(name, entry.first_bytes()) else kinds.why_not_read(name)


def _looks_like_picture(entry: Entry) -> bool:
    """Whether the user may have taken it for a sample."""
    return not entry.name.startswith(".") and kinds.looks_like_picture(entry.name) and not entry.is_dir()

"""A tree of pictures in an object storage: s3://BUCKET/photos/heron/1.jpg is a sample of class 'heron'.

What is a sample, its id and label, and the digest are as of the same tree on disk, whose folders are prefixes
here, see `precache.sources.tree`. An object is the one that was listed as long as size and etag are.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash

from precache.errors import SourceError
from precache.pictures import kinds
from precache.pictures.reading import check_bytes
from precache.sources.base import SampleRef, Scan
from precache.sources.tree import scan_folders
from precache.storage.objects import ObjectInfo, ObjectStore
from precache.storage.retries import ObjectNotFoundError
from precache.storage.urls import Url


class ObjectNode:
    """An object, or a prefix, see `precache.sources.folders.Inside`.

    Attributes:
        children: of a prefix, by name; None of an object.
        mark: of the object's etag, see `mark_of`.
    """

    __slots__ = ("bytes", "children", "mark", "modified_ns", "name", "path", "store")

    def __init__(self, name: str, path: str, store: ObjectStore) -> None:
        self.name, self.path, self.store = name, path, store
        self.children: dict[str, ObjectNode] | None = None
        self.bytes = self.modified_ns = self.mark = 0

    def is_dir(self) -> bool:
        """Whether it is a prefix of others."""
        return self.children is not None

    def is_file(self) -> bool:
        """Whether it is an object."""
        return self.children is None

    def entries(self) -> Iterable["ObjectNode"]:
        """What has it as a prefix, one level deep."""
        return self.children.values() if self.children is not None else ()

    def status(self) -> os.stat_result:
        """Its size, and when it was written."""
        times = {"st_mtime_ns": self.modified_ns}
        return os.stat_result((0, 0, 0, 1, 0, 0, self.bytes, 0, 0, 0), times)

    def start(self) -> bytes:
        """Its first bytes."""
        return self.store.get_range(self.path, 0, min(self.bytes, kinds.PREFIX_BYTES))


@dataclass(frozen=True, slots=True)
class ObjectTree:
    """A tree of objects as a `Source`, whose class prefixes lie `class_depth` levels deep."""

    root: Url
    class_depth: int = 1

    ahead = 16
    """So many pictures are asked for at a time: each takes as long as the way there and back."""

    @property
    def paths(self) -> tuple[Url, ...]:
        """The tree."""
        return (self.root,)

    def scan(self) -> Scan:
        """See `precache.sources.base.Source`."""
        store = _store(self.root)
        top = tree_of(store)
        scan = scan_folders(top, self)
        marks = (_find(top, ref.path).mark for ref in scan.samples)
        scan.samples.places = np.fromiter(marks, np.int64, len(scan.samples))
        return scan

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        """The content of the object."""
        listed = (ref.bytes, ref.place)
        return read_object(
            self.root, ref.path, ref.bytes, max_pixels, lambda it: (it.bytes, mark_of(it)) == listed
        )

    def where(self, ref: SampleRef) -> str:
        """URL of the object."""
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


def tree_of(store: ObjectStore) -> ObjectNode:
    """All objects below the store's URL."""
    top = ObjectNode("", "", store)
    top.children = {}
    for info in store.list():
        node, parts = top, info.name.split("/")
        for depth, part in enumerate(parts):
            if node.children is None:  # an object of this name marks the folder, or lies beside it
                node.children = {}
            node = node.children.setdefault(part, ObjectNode(part, "/".join(parts[: depth + 1]), store))
        node.bytes, node.modified_ns, node.mark = info.bytes, info.modified_ns, mark_of(info)
    return top


def mark_of(info: ObjectInfo) -> int:
    """63 bits that change with the object's content, as far as the storage says."""
    said = info.etag.strip('"') if info.etag else f"{info.bytes} {info.modified_ns}"
    return xxhash.xxh3_64_intdigest(said.encode()) >> 1


def _find(top: ObjectNode, path: str) -> ObjectNode:
    node = top
    for part in path.split("/"):
        assert node.children is not None
        node = node.children[part]
    return node


@lru_cache(4)
def _store(url: Url) -> ObjectStore:
    return ObjectStore(url)

"""A tree of pictures in an object storage: s3://BUCKET/photos/heron/1.jpg is a sample of class 'heron'.

What is a sample, its id and label, and the digest are as of the same tree on disk, whose folders are prefixes
here, see `precache.sources.tree`. An object is the one that was listed as long as size and etag are.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import TypeAlias

import xxhash
from PIL import Image

from precache.errors import SourceError
from precache.pictures import kinds
from precache.pictures.reading import check_bytes
from precache.sources.base import SampleRef, Scan, Source
from precache.sources.tree import Node, scan_folders
from precache.storage.objects import ObjectInfo, ObjectStore
from precache.storage.retries import ObjectNotFoundError
from precache.storage.urls import Url

Read: TypeAlias = Callable[[], "bytes | Image.Image"]
"""As `Source.read` of one picture."""


@dataclass(frozen=True, slots=True)
class ObjectTree:
    """A tree of objects as a `Source`, whose class prefixes lie `class_depth` levels deep."""

    root: Url
    class_depth: int = 1

    reads_at_a_time = 16
    """So many pictures are asked for at a time: each takes as long as the way there and back."""

    @property
    def paths(self) -> tuple[Url, ...]:
        """The tree."""
        return (self.root,)

    def scan(self) -> Scan:
        """See `precache.sources.base.Source`."""
        return scan_folders(_tree_of(_store(self.root)), self)

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        """The content of the object."""
        listed = (ref.bytes, ref.place)
        return read_object(
            self.root, ref.path, ref.bytes, max_pixels, lambda it: (it.bytes, _version_of(it)) == listed
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


def reads_of(source: Source, refs: Sequence[SampleRef], max_pixels: int) -> Iterator[Read]:
    """A `Read` of each picture in turn; of a source with `reads_at_a_time` so many of them are under way."""
    at_a_time = getattr(source, "reads_at_a_time", 0)
    if not at_a_time:
        yield from (partial(source.read, ref, max_pixels) for ref in refs)
        return
    with ThreadPoolExecutor(at_a_time) as pool:
        waiting = iter(refs)
        under_way = deque(pool.submit(source.read, ref, max_pixels) for ref in islice(waiting, at_a_time))
        try:
            while under_way:
                yield under_way.popleft().result
                under_way.extend(pool.submit(source.read, ref, max_pixels) for ref in islice(waiting, 1))
        finally:
            pool.shutdown(cancel_futures=True)


def _tree_of(store: ObjectStore) -> Node:
    """All objects below the store's URL; `Node.place` is what `_version_of` says."""

    def first_bytes(node: Node) -> bytes:
        return store.get_range(node.path, 0, min(node.bytes, kinds.PREFIX_BYTES))

    top = Node("", "", first_bytes)
    top.children = {}
    for info in store.list():
        node, parts = top, info.name.split("/")
        for depth, part in enumerate(parts):
            if node.children is None:  # an object of this name marks the folder, or lies beside it
                node.children = {}
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = Node(part, "/".join(parts[: depth + 1]), first_bytes)
            node = child
        node.bytes, node.modified_ns, node.place = info.bytes, info.modified_ns, _version_of(info)
    return top


def _version_of(info: ObjectInfo) -> int:
    """63 bits that change with the object's content, as far as the storage says."""
    said = info.etag.strip('"') if info.etag else f"{info.bytes} {info.modified_ns}"
    return xxhash.xxh3_64_intdigest(said.encode()) >> 1


@lru_cache(4)
def _store(url: Url) -> ObjectStore:
    return ObjectStore(url)

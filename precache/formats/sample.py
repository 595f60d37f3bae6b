"""What goes into a format, what comes out of it, and what a format is."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from precache.jpeg import Pixels, decode_jpeg, encode_jpeg
from precache.output import OutputFile
from precache.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Sample:
    """One picture on its way into a shard.

    Attributes:
        id: rank in the sorted scan of the source tree.
        label: index of its class.
        data: uint8 [size, size, 3], RGB, or the bytes of a JPEG that is stored as it is.
        path: in the source tree, relative to its root.
        original_size: (width, height) of the upright source picture, in pixels.
    """

    id: int
    label: int
    data: bytes | Pixels
    path: str
    original_size: tuple[int, int]

    def jpeg(self, quality: int) -> bytes:
        """The bytes of its JPEG, encoded if need be."""
        return self.data if isinstance(self.data, bytes) else encode_jpeg(self.data, quality)


@dataclass(frozen=True, slots=True)
class StoredSample:
    """One picture as a shard stores it: JPEG bytes, or the pixels themselves."""

    id: int
    label: int
    data: bytes | Pixels

    def pixels(self, path: str) -> Pixels:
        """uint8 [height, width, 3], RGB; `path` names the shard if the JPEG is damaged."""
        if isinstance(self.data, bytes):
            return decode_jpeg(self.data, f"{path}: sample {self.id}")
        return self.data


@dataclass(frozen=True, slots=True)
class Format:
    """The writer and the reader of one format.

    Attributes:
        suffix: of the shard files, with its dot.
        index_suffix: of the index file beside each shard, or None.
        write_shard: `(path without suffix, samples, count, recipe) -> files`, shard first. At most
            `count` samples come, and are consumed one at a time. The files are not at their paths
            before `output.publish` is called on them.
        read_shard: `path -> samples` in stored order; a damaged file raises DatasetError.
    """

    suffix: str
    index_suffix: str | None
    write_shard: Callable[[Path, Iterable[Sample], int, Recipe], list[OutputFile]]
    read_shard: Callable[[Path], Iterator[StoredSample]]

"""What goes into a format, what comes out of it, and what a format is."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from precache.errors import DatasetError, ImageError, shell_command
from precache.jpeg import Pixels, decode_jpeg
from precache.output import OutputFile
from precache.storage import read_regular

Places: TypeAlias = npt.NDArray[np.int64]
"""int64 [n, 2]: first byte and number of bytes of each of n samples in their shard."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One picture on its way into a shard.

    Attributes:
        id: rank in the sorted scan of the source tree.
        label: index of its class.
        data: what is stored: uint8 [size, size, 3], RGB, contiguous, or the bytes of a JPEG.
        path: in the source tree, relative to its root.
        original_size: (width, height) of the upright source picture, in pixels.
    """

    id: int
    label: int
    data: bytes | Pixels
    path: str
    original_size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredSample:
    """One picture as a shard stores it: JPEG bytes, or the pixels themselves.

    Attributes:
        damage: why nothing else here is to be trusted, where the format's own checksum says so; else empty.
    """

    id: int
    label: int
    data: bytes | Pixels
    damage: str = ""

    def pixels(self, path: str) -> Pixels:
        """uint8 [height, width, 3], RGB; ImageError names the shard, `path`, if the sample is damaged."""
        if self.damage:
            raise ImageError(f"{path}: sample {self.id}", self.damage)
        if isinstance(self.data, bytes):
            return decode_jpeg(self.data, f"{path}: sample {self.id}")
        return self.data


def read_index(path: Path, parse: Callable[[bytes], Iterable[tuple[int, int]]]) -> Places:
    """The places that the index at `path` names; `parse` raises ValueError or KeyError for what is none.

    Raises:
        DatasetError: it cannot be read, or is damaged.
    """
    try:
        places = np.array([*parse(read_regular(path))], np.int64).reshape(-1, 2)
        if np.any(places < 0):
            raise ValueError("a negative number")
    except (OSError, ValueError, KeyError, OverflowError) as error:
        raise DatasetError(f"{path}: cannot be read as an index ({error}); {remedy(path)}") from error
    return places


def remedy(shard: Path) -> str:
    """What to do about a shard that cannot be read: commands to paste into a shell."""
    command = shell_command("precache verify", shard.parent)
    return f"run: {command}; it prints the command that rewrites the dataset"


@dataclass(frozen=True, slots=True)
class Format:
    """The writer and the reader of one format.

    Attributes:
        suffix: of the shard files, with its dot.
        index_suffix: of the index file beside each shard, or None.
        write_shard: `(path without suffix, samples, count, size) -> files`, shard first. At most
            `count` samples come, squares of `size` pixels, and are consumed one at a time. The files are
            not at their paths before `output.publish` is called on them.
        read_shard: `path -> samples` in stored order. A damaged file raises DatasetError; where one sample
            alone is damaged, and the format tells, the sample says so.
        find_samples: `path -> int64 [n, 2]`, where in the shard the samples lie, in stored order: first byte
            and number of bytes, as the index beside it says where the format has one. DatasetError as above.
        read_sample: what these bytes hold; of `shards` without id and label, as uint8 [bytes].
        holds_pixels: whether it stores decoded pixels; else JPEGs.
        bytes_per_sample: what a sample takes besides its pixels or its JPEG.
        bytes_per_shard: what a shard takes besides its samples, on average.
    """

    suffix: str
    index_suffix: str | None
    write_shard: Callable[[Path, Iterable[Sample], int, int], list[OutputFile]]
    read_shard: Callable[[Path], Iterator[StoredSample]]
    find_samples: Callable[[Path], Places]
    read_sample: Callable[[bytes], StoredSample]
    holds_pixels: bool
    bytes_per_sample: int
    bytes_per_shard: int

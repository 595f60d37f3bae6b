"""What every format has: its writer, its reader, and the samples that go in and come out."""

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from precache.errors import DatasetError, ImageError, os_reason, shell_command
from precache.pictures.jpeg import Pixels, decode_jpeg
from precache.pictures.sizes import Size
from precache.storage import open_regular, read_descriptor_at, read_regular
from precache.storage.output import OutputFile
from precache.storage.shard_cache import is_fetched

Places: TypeAlias = npt.NDArray[np.int64]
"""int64 [n, 2]: first byte and number of bytes of each of n samples in their shard."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One picture as it is to be written into a shard.

    Attributes:
        id: rank in the sorted scan of the source tree.
        label: index of its class; -1 where it has not just one.
        data: what is stored: uint8 [height, width, channels], contiguous, or the bytes of a JPEG.
        path: in the source tree, relative to its root.
        original_size: (width, height) of the upright source picture, in pixels.
        target: its label where that is not one class: a list of class indices, or numbers, as JSON has
            them; else None.
        fields: its other columns or attributes, as JSON has them.
        mask: uint8 [height, width] of `data`, see `precache.pictures.masks`; of all samples or of none.
    """

    id: int
    label: int
    data: bytes | Pixels
    path: str
    original_size: tuple[int, int]
    target: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    mask: Pixels | None = None


@dataclass(frozen=True, slots=True)
class StoredSample:
    """One picture as a shard stores it: JPEG bytes, or the pixels themselves.

    Attributes:
        label: index of its class; -1 where it has not just one.
        damage: why the rest must not be used, where the format's own checksum does not match; else empty.
        annotations: the bytes that `Format.annotations` made.
        mask: a PNG, or uint8 [height, width]; None if it has none.
    """

    id: int
    label: int
    data: bytes | Pixels
    damage: str = ""
    annotations: bytes = b""
    mask: bytes | Pixels | None = None

    def pixels(self, path: str, channels: int = 3) -> Pixels:
        """uint8 [height, width, channels]; ImageError names the shard, `path`, if the sample is damaged.

        `channels` are those of its dataset: a grey JPEG may have been kept in one of RGB.
        """
        if self.damage:
            raise ImageError(f"{path}: sample {self.id}", self.damage)
        if isinstance(self.data, bytes):
            return decode_jpeg(self.data, f"{path}: sample {self.id}", channels)
        return self.data


def read_index(path: Path, parse: Callable[[list[list[str]]], Iterable[tuple[int, int]]]) -> Places:
    """The places in the index at `path`, by the words of its lines.

    Args:
        parse: raises ValueError or KeyError where they are damaged.

    Raises:
        DatasetError: it cannot be read, or is damaged.
    """
    try:
        lines = [line.split() for line in read_regular(path).decode("ascii").splitlines()]
        places = np.array([*parse(lines)], np.int64).reshape(-1, 2)
        if np.any(places < 0):
            raise ValueError("a negative number")
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({os_reason(error)}); {shard_remedy(path)}") from error
    except (ValueError, KeyError, OverflowError) as error:
        raise DatasetError(f"{path}: cannot be read as an index ({error}); {shard_remedy(path)}") from error
    return places


class ShardWriter(Protocol):
    """One shard that is being written; its files have no names before `output.publish` gives them.

    `Format.writer` makes one of the shard's path without suffix; of the most samples that come; and of the
    size of all pictures, None where each has its own.
    """

    def __init__(self, base: Path, count: int, size: Size | None) -> None: ...

    def add(self, sample: Sample) -> None:
        """Write one more sample."""

    def finish(self) -> list[OutputFile]:
        """Complete and close the files, the shard first; they are not durable yet."""

    def abandon(self) -> None:
        """Remove what was written; after `finish` raised, too."""


class MaskFile(Protocol):
    """The masks of an open shard; several threads may read at a time."""

    def read_mask(self, row: int) -> bytes | Pixels:
        """The mask of the sample at `row`: as of `StoredSample`.

        Raises:
            DatasetError: it cannot be read.
        """

    def close(self) -> None:
        """Close the file; idempotent."""


class EncodedMasks:
    """Masks that lie in a file as PNGs, or in records with other things.

    Args:
        places: (first byte, bytes) of each of them, or of its record.
        extract: the PNG from the bytes there; ValueError if there is none.
    """

    def __init__(
        self,
        path: Path,
        places: Sequence[tuple[int, int]],
        extract: Callable[[bytes], bytes] = lambda stored: stored,
    ) -> None:
        self._path, self._places, self._extract = path, places, extract
        self._file = open_shard(path)

    def read_mask(self, row: int) -> bytes:
        """See `MaskFile`."""
        try:
            first, length = self._places[row]
            if not 0 <= first <= first + length <= os.fstat(self._file.fileno()).st_size:
                raise ValueError(f"its index says {length:,} bytes from {first:,} on")
            return self._extract(read_descriptor_at(self._file.fileno(), first, length))
        except (OSError, LookupError, ValueError, struct.error) as error:
            reason = f"cannot be read ({os_reason(error)}); {shard_remedy(self._path)}"
            raise DatasetError(f"{self._path}: the mask in row {row:,} {reason}") from error

    def close(self) -> None:
        """See `MaskFile`."""
        self._file.close()


def open_shard(path: Path) -> FileIO:
    """The file at `path`, unbuffered; DatasetError if it cannot be opened."""
    try:
        return open_regular(path)
    except OSError as error:
        raise DatasetError(f"{path}: cannot be opened ({os_reason(error)}); {shard_remedy(path)}") from error


def shard_remedy(shard: Path) -> str:
    """What to do about a shard that cannot be read: commands to paste into a shell."""
    if is_fetched(shard):
        return f"it was fetched from a URL; to have it fetched again, run: {shell_command('rm', shard)}"
    command = shell_command("precache verify", shard.parent)
    return f"run: {command}; it prints the command that rewrites the dataset"


@dataclass(frozen=True, slots=True)
class Format:
    """The writer and the reader of one format.

    Attributes:
        suffix: of the shard files, with its dot.
        index_suffix: of the index file beside each shard, or None.
        writer: makes a `ShardWriter`.
        read_shard: `path -> samples` in stored order. A damaged file raises DatasetError; where one sample
            alone is damaged, and the format tells, the sample says so.
        find_samples: `path -> int64 [n, 2]`, where in the shard the samples lie, in stored order: first byte
            and number of bytes; from the index beside it, where the format has one. DatasetError as above.
        read_sample: the sample of these bytes; of `shards` without id and label, as uint8 [bytes].
        open_masks: of a shard that has masks; raises DatasetError if its file, or its index, is damaged.
        annotations: what a shard stores of a sample beside its picture, id, label and mask, as bytes: the
            path of its source, its target and its fields; nothing where only the index has them.
        holds_pixels: whether it stores decoded pixels; else JPEGs.
        bytes_per_sample: bytes of a sample in addition to its pixels or its JPEG.
        bytes_per_shard: bytes of a shard in addition to its samples, on average.
    """

    suffix: str
    index_suffix: str | None
    writer: type[ShardWriter]
    read_shard: Callable[[Path], Iterator[StoredSample]]
    find_samples: Callable[[Path], Places]
    read_sample: Callable[[bytes], StoredSample]
    open_masks: Callable[[Path], MaskFile]
    annotations: Callable[[Sample], bytes]
    holds_pixels: bool
    bytes_per_sample: int
    bytes_per_shard: int

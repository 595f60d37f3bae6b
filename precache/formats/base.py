"""Parts that all formats share: samples as they are written and read, protocols of writers, and errors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias

from precache.errors import DatasetError, ImageError, shell_command
from precache.pictures.images import Size
from precache.pictures.jpeg import Pixels, decode_jpeg
from precache.storage.output import OutputFile
from precache.storage.shard_cache import is_fetched

ByteRange: TypeAlias = tuple[int, int]
"""First byte and number of bytes of a sample in its shard."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample as it is handed to a writer.

    Attributes:
        id: rank in the sorted scan of the source tree.
        label: index of the class; -1 where the sample has no class, or several.
        data: pixels to store, uint8 [height, width, channels], contiguous; or the bytes of a JPEG.
        path: path in the source tree, relative to its root.
        original_size: (width, height) of the upright source picture, in pixels.
        target: label that is not one class, as JSON has it: a list of class indices, a number, or a list of
            numbers; else None.
        fields: name -> value of the sample's fields, as JSON has them.
    """

    id: int
    label: int
    data: bytes | Pixels
    path: str
    original_size: tuple[int, int]
    target: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredSample:
    """Sample as it is read from a shard.

    Attributes:
        id: id of the sample; -1 where the format does not store it beside the sample.
        label: index of the class; -1 where the sample has no class, or several, or it is stored elsewhere.
        data: bytes of a JPEG, or pixels, uint8 [height, width, channels].
        damage: what is wrong, if the format's own checksum does not match; then no other value may be used.
    """

    id: int
    label: int
    data: bytes | Pixels
    damage: str = ""

    def pixels(self, path: str, channels: int = 3) -> Pixels:
        """Decode the picture to uint8 [height, width, channels].

        Args:
            path: path of the shard, for messages.
            channels: number of channels of the dataset; a grey JPEG in a dataset of RGB is decoded to RGB.

        Raises:
            ImageError: the sample is damaged.
        """
        if self.damage:
            raise ImageError(f"{path}: sample {self.id}", self.damage)
        if isinstance(self.data, bytes):
            return decode_jpeg(self.data, f"{path}: sample {self.id}", channels)
        return self.data


class ShardWriter(Protocol):
    """Shard that is being written, under temporary names until `precache.storage.output.publish` renames it.

    Args:
        base: path of the shard, without suffix.
        count: maximal number of samples that are added.
        size: size of all pictures; None if each has its own.
    """

    def __init__(self, base: Path, count: int, size: Size | None) -> None: ...

    def add(self, sample: Sample) -> ByteRange:
        """Write one more sample, and return the range that `Format.read_sample` parses, or (0, 0).

        The dataset's index has it, so that a sample is found without its shard being read.
        """

    def finish(self) -> list[OutputFile]:
        """Complete and close the files, and return them, the shard first; they are not durable yet."""

    def abandon(self) -> None:
        """Remove what was written; also after `finish` has raised."""


def shard_remedy(shard: Path) -> str:
    """Remedy for a shard that cannot be read, with a command to paste into a shell."""
    if is_fetched(shard):
        return f"it was fetched from a URL; to have it fetched again, run: {shell_command('rm', shard)}"
    command = shell_command("precache verify", shard.parent)
    return f"run: {command}; it says what is wrong, and what to do"


def _refuse_single_samples(shard: Any) -> NoReturn:
    reason = "its format has no byte ranges, so that samples cannot be read one by one"
    raise DatasetError(reason, path=shard, remedy="serve it by loaders.build, which reads shards whole")


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """Writer and readers of a format, and all that the project asks of it beside its name in `FORMATS`.

    Attributes:
        suffix: suffix of the shard files, with its dot.
        index_suffix: suffix of the index file beside each shard; None if there is none.
        writer: class that writes a shard.
        read_shard: yields the samples of the shard at a path, in stored order. Raises DatasetError if the
            file is damaged; if the format detects damage of a single sample, `StoredSample.damage` says so.
        holds_pixels: whether shards hold decoded pixels; else they hold JPEGs, which are decoded when read.
        backend: name of the backend of `loaders` that reads the format, unless another one is chosen.
        bytes_per_sample: bytes of a sample in addition to its pixels or its JPEG.
        bytes_per_shard: bytes of a shard in addition to its samples, on average.
        read_sample: parses the bytes of one sample, ValueError if they are none; of `shards` these are uint8
            [bytes] without id and label. A format whose samples are no byte ranges leaves this out.
    """

    suffix: str
    index_suffix: str | None
    writer: type[ShardWriter]
    read_shard: Callable[[Path], Iterator[StoredSample]]
    holds_pixels: bool
    backend: str
    bytes_per_sample: int
    bytes_per_shard: int
    read_sample: Callable[[bytes], StoredSample] = _refuse_single_samples

    @property
    def has_byte_ranges(self) -> bool:
        """Whether a sample is a byte range of its shard, by which it is read or fetched alone."""
        return self.read_sample is not _refuse_single_samples

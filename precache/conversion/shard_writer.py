"""What a worker does: read, decode and resize the pictures of one shard, and write it."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from precache.conversion.finished import FinishedShard
from precache.conversion.url import push_shard, working_folder
from precache.dataset.files import FileEntry
from precache.dataset.index import checksum_of
from precache.dataset.left_out import Rejected
from precache.dataset.shard_table import ShardEntry
from precache.dataset.statistics import NO_PIXELS, PixelSums
from precache.engines import KILLED, Ticks
from precache.errors import ImageError
from precache.formats import FORMATS, Sample
from precache.pictures import images, jpeg
from precache.pictures.jpeg import Pixels
from precache.pictures.reading import MAX_PIXELS
from precache.recipe import Recipe
from precache.sources.base import SampleRef, Source, picture_checksum, reads_of
from precache.sources.masks import render_mask
from precache.storage.output import OutputFile, publish
from precache.storage.urls import Url


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One shard to write.

    Attributes:
        name: without suffix.
        samples: in the order of their rows.
        destination: the folder of the dataset; or its URL, to which the shard is pushed once it is written.
    """

    name: str
    split: str
    samples: tuple[SampleRef, ...]
    destination: Path | Url
    recipe: Recipe

    def unit_name(self, unit: int) -> str:
        """The name for error messages of the picture over which a worker died."""
        return self.samples[unit].path


@dataclass(slots=True)
class WrittenShard:
    """A shard whose files are written, but neither durable nor under their names yet.

    Attributes:
        sizes, checksums: of the samples, in stored order.
        mask_checksums: likewise; none where there are no masks.
        source_checksums: of the pictures of `task`, in its order.
        sums: of the pixels of the samples.
    """

    task: ShardTask
    files: list[OutputFile] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    mask_checksums: list[int] = field(default_factory=list)
    source_checksums: list[int] = field(default_factory=list)
    sums: PixelSums = NO_PIXELS


def write_shard(source: Source, task: ShardTask, tick: Ticks) -> WrittenShard:
    """Decode, resize and write the pictures of `task`, of `source`: the part that needs the CPU."""
    written = WrittenShard(task)
    folder = task.destination
    if isinstance(folder, Url):
        folder = working_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)  # on another node of a cluster it may be missing
    samples = _samples(source, task, written, tick)
    write = FORMATS[task.recipe.format].write_shard
    written.files = write(folder / task.name, samples, len(task.samples), task.recipe.stored_size)
    return written


def read_first(source: Source, refs: Sequence[SampleRef]) -> None:
    """Raise SourceError if the source cannot be read; damaged pictures among `refs` do not matter."""
    for ref in refs:
        with suppress(ImageError):
            source.read(ref, MAX_PIXELS)


def finish_shard(written: WrittenShard) -> FinishedShard:
    """Make the files durable and give them their names: the part that waits for the disk, or the storage."""
    task = written.task
    published = written.files if written.sizes else []  # else every picture was rejected
    files = tuple(FileEntry(file.path.name, file.bytes, file.crc32c) for file in published)
    shard = FinishedShard(
        ShardEntry(task.name, task.split, len(written.sizes), files),
        tuple(written.rejected),
        np.array(written.sizes, np.int32).reshape(-1, 2),
        np.array(written.checksums, np.uint64),
        np.array([ref.modified_ns for ref in task.samples], np.int64),
        np.array(written.source_checksums, np.uint64),
        np.array(written.mask_checksums, np.uint64),
        written.sums,
    )
    if isinstance(task.destination, Url):
        return push_shard(task.destination, written.files, shard)
    publish(written.files)
    for file in written.files[len(published) :]:
        file.path.unlink()
    return shard


def store(
    data: bytes | Image.Image, path: str, recipe: Recipe
) -> tuple[bytes | Pixels, tuple[int, int], Pixels]:
    """What `recipe` stores of a picture, the picture's upright (width, height), and the pixels stored.

    For a JPEG these are the pixels that it was made of; or its own, where that of the source is stored as it
    is, byte for byte: it has the size already, and any decoder makes these pixels of it.

    `data` is what `Source.read` gives.

    Raises:
        ImageError: it cannot be decoded; names `path`.
    """
    pixels, size, may_be_copied = images.render_or_copy(data, path, recipe.rendering)
    if FORMATS[recipe.format].holds_pixels:
        pixels = np.ascontiguousarray(pixels)
        return pixels, size, pixels
    if may_be_copied:
        assert isinstance(data, bytes)
        return data, size, pixels
    return jpeg.encode_jpeg(pixels, recipe.quality), size, pixels


def _samples(source: Source, task: ShardTask, written: WrittenShard, tick: Ticks) -> Iterator[Sample]:
    reads = reads_of(source, task.samples, task.recipe.max_pixels)
    for unit, (ref, read) in enumerate(zip(task.samples, reads, strict=True)):
        path = source.where(ref)
        tick.begin(unit)
        written.source_checksums.append(0)  # of one that is too large to be read
        try:
            data = read()
            written.source_checksums[-1] = picture_checksum(data)
            if unit in tick.fatal:
                raise ImageError(path, KILLED)
            stored, size, pixels = store(data, path, task.recipe)
            mask = render_mask(source, ref, size, task.recipe.rendering)
        except ImageError as error:
            written.rejected.append(Rejected(ref.path, error.reason, ref.id))
        else:
            size = ref.original_size or size
            written.sizes.append(size)
            written.checksums.append(checksum_of(stored))
            written.sums += PixelSums.of(pixels)
            if mask is not None:
                written.mask_checksums.append(checksum_of(mask))
            yield Sample(ref.id, ref.label, stored, ref.path, size, ref.target, ref.fields, mask)
        tick()

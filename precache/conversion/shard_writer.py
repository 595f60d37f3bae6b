"""What a worker does: read, decode and resize the pictures of one shard, and write it.

SampleRef       a picture as scanned
WrittenShard    the shard as written: a row for each of its pictures, in columns; the journal has the same
SampleIndex     samples as indexed: what the scan and all written shards say of them
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from PIL import Image

from precache.conversion.journal import MODIFIED_NS, SOURCE_CHECKSUMS, WrittenShard, column_of
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
from precache.sources.base import SampleRef, Source, picture_checksum
from precache.sources.masks import render_mask
from precache.sources.objects import reads_of
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
class _Unfinished:
    """A shard whose files are written, but neither durable nor under their names yet; a row a picture."""

    task: ShardTask
    files: list[OutputFile] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    mask_checksums: list[int] = field(default_factory=list)
    source_checksums: list[int] = field(default_factory=list)
    sums: PixelSums = NO_PIXELS


def write_shard(source: Source, task: ShardTask, tick: Ticks) -> _Unfinished:
    """Decode, resize and write the pictures of `task`, of `source`: the part that needs the CPU."""
    shard = _Unfinished(task)
    folder = task.destination
    if isinstance(folder, Url):
        folder = working_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)  # on another node of a cluster it may be missing
    samples = _samples(source, task, shard, tick)
    write = FORMATS[task.recipe.format].write_shard
    shard.files = write(folder / task.name, samples, len(task.samples), task.recipe.stored_size)
    return shard


def read_first(source: Source, refs: Sequence[SampleRef]) -> None:
    """Raise SourceError if the source cannot be read; damaged pictures among `refs` do not matter."""
    for ref in refs:
        with suppress(ImageError):
            source.read(ref, MAX_PIXELS)


def finish_shard(shard: _Unfinished) -> WrittenShard:
    """Make the files durable and give them their names: the part that waits for the disk, or the storage."""
    task = shard.task
    published = shard.files if shard.sizes else []  # else every picture was rejected
    columns: dict[str, Sequence[Any]] = {
        "source_sizes": shard.sizes,
        "checksums": shard.checksums,
        "mask_checksums": shard.mask_checksums,
        MODIFIED_NS: [ref.modified_ns for ref in task.samples],
        SOURCE_CHECKSUMS: shard.source_checksums,
    }
    files = tuple(FileEntry(file.path.name, file.bytes, file.crc32c) for file in published)
    written = WrittenShard(
        ShardEntry(task.name, task.split, len(shard.sizes), files),
        tuple(shard.rejected),
        {name: column_of(name, values) for name, values in columns.items()},
        shard.sums,
    )
    if isinstance(task.destination, Url):
        return replace(written, etags=push_shard(task.destination, shard.files, files))
    publish(shard.files)
    for file in shard.files[len(published) :]:
        file.path.unlink()
    return written


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


def _samples(source: Source, task: ShardTask, shard: _Unfinished, tick: Ticks) -> Iterator[Sample]:
    reads = reads_of(source, task.samples, task.recipe.max_pixels)
    for unit, (ref, read) in enumerate(zip(task.samples, reads, strict=True)):
        path = source.where(ref)
        tick.begin(unit)
        shard.source_checksums.append(0)  # of one that is too large to be read
        try:
            data = read()
            shard.source_checksums[-1] = picture_checksum(data)
            if unit in tick.fatal:
                raise ImageError(path, KILLED)
            stored, size, pixels = store(data, path, task.recipe)
            mask = render_mask(source, ref, size, task.recipe.rendering)
        except ImageError as error:
            shard.rejected.append(Rejected(ref.path, error.reason, ref.id))
        else:
            size = ref.original_size or size
            shard.sizes.append(size)
            shard.checksums.append(checksum_of(stored))
            shard.sums += PixelSums.of(pixels)
            if mask is not None:
                shard.mask_checksums.append(checksum_of(mask))
            yield Sample(ref.id, ref.label, stored, ref.path, size, ref.target, ref.fields, mask)
        tick()

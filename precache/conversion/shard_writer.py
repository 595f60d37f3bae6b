"""What a worker does: read, decode and resize the pictures of one shard, and write it; and how large that is.

SampleRef       a picture as scanned
WrittenShard    the shard as written: a row for each of its pictures, in columns; the journal has the same
SampleIndex     samples as indexed: what the scan and all written shards say of them
"""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from precache.conversion.journal import MODIFIED_NS, SOURCE_CHECKSUMS, WrittenShard, column_of
from precache.conversion.url import push_shard, working_folder
from precache.dataset.files import FileEntry
from precache.dataset.index import Rejected, checksum_of
from precache.dataset.shard_table import ShardEntry
from precache.dataset.statistics import NO_PIXELS, PixelSums
from precache.engines import KILLED, Ticks
from precache.errors import DatasetError, ImageError
from precache.formats import FORMATS, Sample
from precache.pictures import images, jpeg, masks
from precache.pictures.jpeg import Pixels
from precache.pictures.reading import MAX_PIXELS
from precache.plan import ShardPlan
from precache.recipe import Recipe
from precache.sources.base import SampleRef, Scan, Source, picture_checksum, reads_of
from precache.sources.masks import reader_of, render_mask
from precache.storage.output import OutputFile, publish
from precache.storage.shard_cache import CACHE_DIR
from precache.storage.urls import Url

_MEASURED = 24  # pictures


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


@dataclass(slots=True)
class _Unfinished:
    """A shard whose files are written under temporary names, and not yet durable; a row for each picture."""

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
        push_shard(task.destination, shard.files, files)
        return written
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


def predict_bytes(scan: Scan, recipe: Recipe, pictures: int = _MEASURED) -> int:
    """Bytes that `scan` will take in `recipe`'s format.

    Args:
        pictures: about so many are converted, evenly over the tree, where their size varies.
    """
    form = FORMATS[recipe.format]
    has_masks = reader_of(scan.source) is not None
    known = form.holds_pixels and recipe.stored_size is not None and not has_masks
    picture = recipe.picture_bytes if known else _mean_bytes(scan, recipe, pictures)
    shards = math.ceil(len(scan.samples) / recipe.samples_per_shard)
    return round(len(scan.samples) * (picture + form.bytes_per_sample) + shards * form.bytes_per_shard)


def check_disk_space(
    scan: Scan,
    recipe: Recipe,
    waiting: Sequence[ShardPlan],
    folder: Path,
    on_start: Callable[[int, int], None],
    pushed_at_a_time: int | None = None,
) -> None:
    """Raise DatasetError if the disk of `folder` cannot take what is still to be written.

    Args:
        waiting: shards that are not written yet.
        on_start: called with what the dataset will take, and what is free, in bytes.
        pushed_at_a_time: so many shards lie in `folder` at most, as each is pushed to a URL.
    """
    predicted, pictures = predict_bytes(scan, recipe), len(scan.samples)
    missing = sum(len(shard.rows) for shard in waiting) / pictures
    what, remedy = "the dataset needs", "make room, or choose a DST on another disk or a smaller --size"
    if pushed_at_a_time is not None:
        largest = max((len(shard.rows) for shard in waiting), default=0)
        missing = min(missing, max(pushed_at_a_time, 1) * largest / pictures)
        what = "shards need, until they are pushed,"
        remedy = f"make room, or set {CACHE_DIR} to a folder on a larger disk"
    free = shutil.disk_usage(folder).free
    on_start(predicted, free)
    if predicted * missing > free:
        raise DatasetError(
            f"{folder}: {what} about {predicted * missing:,.0f} bytes, and {free:,} are free; {remedy}"
        )


def _mean_bytes(scan: Scan, recipe: Recipe, pictures: int) -> float:
    """Of a few of its pictures, as they will be stored; 0 if none of these can be decoded."""
    sizes = []
    for row in range(0, len(scan.samples), max(1, len(scan.samples) // pictures)):
        ref = scan.samples[row]
        try:
            stored, size, *_ = store(scan.source.read(ref, recipe.max_pixels), scan.source.where(ref), recipe)
            mask = render_mask(scan.source, ref, size, recipe.rendering)
        except ImageError:
            continue  # the conversion says what is wrong with it
        if isinstance(stored, bytes):
            sizes.append(len(stored) + (0 if mask is None else len(masks.encode(mask))))
        else:
            sizes.append(stored.nbytes + (0 if mask is None else mask.nbytes))
    return sum(sizes) / len(sizes) if sizes else 0

"""What a worker does: read, decode and resize the pictures of one shard, and write it; and how large that is.

SampleRef       a picture as scanned
WrittenShard    the shard as written: a row for each of its pictures, in columns; the journal has the same
SampleIndex     samples as indexed: what the scan and all written shards say of them
"""

import math
import shutil
from collections.abc import Callable, Sequence
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
from precache.pictures import images, jpeg
from precache.pictures.images import Rendering
from precache.pictures.jpeg import Pixels
from precache.pictures.reading import MAX_PIXELS
from precache.plan import ShardPlan
from precache.recipe import Recipe
from precache.reporting import warn
from precache.sources.base import SampleRef, Scan, Source, picture_checksum, reads_of
from precache.sources.masks import reader_of, render_mask
from precache.storage.output import OutputFile, publish
from precache.storage.shard_cache import CACHE_DIR
from precache.storage.urls import Url

_LOOKED_AT = 100  # pictures whose headers say how large all are
_JPEG_BYTES_PER_PIXEL = {1: 0.05, 50: 0.17, 75: 0.24, 90: 0.37, 94: 0.46, 95: 0.58, 100: 1.2}
"""Quality -> bytes of a JPEG per pixel: photographs of Caltech-101, 128 pixels the shorter side."""
_MASK_BYTES_PER_PIXEL = 0.05  # of a PNG


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
    recipe, how, has_masks = task.recipe, task.recipe.rendering, reader_of(source) is not None
    folder = task.destination
    if isinstance(folder, Url):
        folder = working_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)  # on another node of a cluster it may be missing
    shard = _Unfinished(task)
    writer = FORMATS[recipe.format].writer(folder / task.name, len(task.samples), recipe.stored_size)
    try:
        reads = reads_of(source, task.samples, recipe.max_pixels)
        for unit, (ref, read) in enumerate(zip(task.samples, reads, strict=True)):
            path = source.where(ref)
            tick.begin(unit)
            shard.source_checksums.append(0)  # of one that is not read
            try:
                if unit in tick.fatal:
                    raise ImageError(path, KILLED)
                data = read()
                shard.source_checksums[-1] = picture_checksum(data)
                stored, size, pixels = make_stored_picture(data, path, recipe, how)
                mask = render_mask(source, ref, size, how) if has_masks else None
            except ImageError as error:
                shard.rejected.append(Rejected(ref.path, error.reason, ref.id))
            else:
                size = ref.original_size or size
                shard.sizes.append(size)
                shard.checksums.append(checksum_of(stored))
                shard.sums += PixelSums.of(pixels)
                if mask is not None:
                    shard.mask_checksums.append(checksum_of(mask))
                writer.add(Sample(ref.id, ref.label, stored, ref.path, size, ref.target, ref.fields, mask))
            tick()
        shard.files = writer.finish()
    except BaseException:
        writer.abandon()
        raise
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


def make_stored_picture(
    data: bytes | Image.Image, path: str, recipe: Recipe, how: Rendering
) -> tuple[bytes | Pixels, tuple[int, int], Pixels]:
    """Make what `recipe` stores of a picture: (that, the upright picture's width and height, the pixels).

    The pixels of a JPEG are those that it was made of; or its own, where that of the source is stored as it
    is, byte for byte: it has the size already, and any decoder makes these pixels of it.

    Args:
        data: what `Source.read` gives.
        how: `recipe.rendering`.

    Raises:
        ImageError: it cannot be decoded; names `path`.
    """
    pixels, size, may_be_copied = images.render_or_copy(data, path, how)
    if FORMATS[recipe.format].holds_pixels:
        pixels = np.ascontiguousarray(pixels)
        return pixels, size, pixels
    if may_be_copied:
        assert isinstance(data, bytes)
        return data, size, pixels
    return jpeg.encode_jpeg(pixels, recipe.quality), size, pixels


def predict_bytes(scan: Scan, recipe: Recipe) -> int:
    """Predict how many bytes `scan` will take in `recipe`'s format.

    Where pictures vary in size, pixels are counted by the headers of a hundred, evenly over the source. A
    JPEG is taken to have as many bytes per pixel as a usual photograph of its quality; a drawing has less,
    and noise more.
    """
    holds_pixels, size = FORMATS[recipe.format].holds_pixels, recipe.stored_size
    if holds_pixels and size is not None:
        picture_bytes: float = recipe.picture_bytes
    else:
        refs, sizes = sample_evenly(scan, _LOOKED_AT), []
        for ref, read in zip(refs, reads_of(scan.source, refs, recipe.max_pixels), strict=True):
            with suppress(ImageError):  # the conversion says what is wrong with it
                sizes.append(_predict_picture_bytes(read(), scan.source.where(ref), recipe))
        picture_bytes = sum(sizes) / len(sizes) if sizes else 0
    if reader_of(scan.source) is not None:
        pixels = picture_bytes / _bytes_per_pixel(recipe)
        picture_bytes += pixels * (1 if holds_pixels else _MASK_BYTES_PER_PIXEL)
    return dataset_bytes(scan, recipe, picture_bytes)


def sample_evenly(scan: Scan, count: int) -> list[SampleRef]:
    """At most `count` samples, evenly over the scan."""
    rows = np.unique(np.linspace(0, len(scan.samples) - 1, count).astype(int)).tolist()
    return [scan.samples[row] for row in rows]


def dataset_bytes(scan: Scan, recipe: Recipe, picture_bytes: float) -> int:
    """Bytes that `scan` takes in `recipe`'s format, where a picture takes `picture_bytes` in the mean."""
    form = FORMATS[recipe.format]
    shards = math.ceil(len(scan.samples) / recipe.samples_per_shard)
    return round(len(scan.samples) * (picture_bytes + form.bytes_per_sample) + shards * form.bytes_per_shard)


def _predict_picture_bytes(data: bytes | Image.Image, path: str, recipe: Recipe) -> float:
    width, height = data.size if isinstance(data, Image.Image) else images.upright_shape(data, path)[::-1]
    fitted = images.fitted_size(width, height, recipe.rendering)
    is_copied = not FORMATS[recipe.format].holds_pixels and fitted == (width, height)
    if is_copied and isinstance(data, bytes) and data.startswith(jpeg.START):
        return len(data)
    return math.prod(fitted) * _bytes_per_pixel(recipe)


def _bytes_per_pixel(recipe: Recipe) -> float:
    if FORMATS[recipe.format].holds_pixels:
        return recipe.pixel_bytes
    return float(np.interp(recipe.quality, [*_JPEG_BYTES_PER_PIXEL], [*_JPEG_BYTES_PER_PIXEL.values()]))


def check_disk_space(
    scan: Scan,
    recipe: Recipe,
    waiting: Sequence[ShardPlan],
    folder: Path,
    on_start: Callable[[int, int], None],
    pushed_at_a_time: int | None = None,
) -> None:
    """Raise DatasetError if the disk of `folder` cannot take what is still to be written.

    JPEGs may turn out smaller than predicted: then it is a warning.

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
    if predicted * missing <= free:
        return
    problem = f"{folder}: {what} about {predicted * missing:,.0f} bytes, and {free:,} are free"
    if FORMATS[recipe.format].holds_pixels:
        raise DatasetError(f"{problem}; {remedy}")
    warn(f"{problem}; if the disk fills up, {remedy}")

"""Write one shard, which is a worker's job: read, decode and resize its pictures; and predict its size.

A picture's record has three forms:

SampleRef       a picture as scanned
Sidecar         the pictures of a shard as written, in columns with a row for each
SampleIndex     all samples as indexed, from the scan and the sidecars
"""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from precache.dataset.files import FileEntry
from precache.dataset.statistics import NO_PIXELS, PixelSums
from precache.dataset.unfinished import (
    MODIFIED_NS,
    SOURCE_CHECKSUMS,
    Sidecar,
    encode_columns,
    read_conversion,
    sidecar_path,
)
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
from precache.sources.base import UNREADABLE, SampleRef, Scan, Source, picture_checksum
from precache.storage import atomic_write, checksum_of
from precache.storage.output import publish

_PROBED_PICTURES = 100  # pictures whose headers are read to predict the size of all
_JPEG_BYTES_PER_PIXEL = {1: 0.05, 50: 0.17, 75: 0.24, 90: 0.37, 94: 0.46, 95: 0.58, 100: 1.2}
"""JPEG quality -> bytes per pixel, of photographs of Caltech-101 whose shorter side is 128 pixels."""


@dataclass(frozen=True, slots=True)
class ShardTask:
    """A shard to write.

    Attributes:
        name: its files' name without suffix.
        samples: its pictures, in the order of their rows.
        folder: the folder of the dataset.
        recipe: settings of the conversion.
        inputs_digest: digest of the inputs of the conversion.
    """

    name: str
    samples: tuple[SampleRef, ...]
    folder: Path
    recipe: Recipe
    inputs_digest: str


def write_shard(source: Source, task: ShardTask, tick: Ticks) -> str:
    """Write a shard: decode, resize and store the pictures of `task` from `source`.

    Its files get their names once they are durable, its sidecar last.

    Returns:
        Name of the shard.
    """
    recipe, rendering = task.recipe, task.recipe.rendering
    sizes, shapes, checksums, byte_ranges, source_checksums, rejected = [], [], [], [], [], []
    sums = NO_PIXELS
    writer = FORMATS[recipe.format].writer(task.folder / task.name, len(task.samples), recipe.stored_size)
    try:
        for unit, ref in enumerate(task.samples):
            path = source.where(ref)
            tick.begin(unit)
            source_checksums.append(UNREADABLE)  # until it has been read
            try:
                if unit in tick.fatal:
                    raise ImageError(path, KILLED)
                data = source.read(ref, recipe.max_pixels)
                source_checksums[-1] = picture_checksum(data)
                stored, size, pixels = make_stored_picture(data, path, recipe, rendering)
            except ImageError as error:
                rejected.append((unit, error.reason_and_remedy))
            else:
                size = ref.original_size or size
                sizes.append(size)
                shapes.append(pixels.shape[:2])
                checksums.append(checksum_of(stored))
                sums += PixelSums.from_picture(pixels)
                sample = Sample(ref.id, ref.label, stored, ref.path, size, ref.target, ref.fields)
                byte_ranges.append(writer.add(sample))
            tick()
        tick.begin(None)  # what follows waits for the disk, and is no picture's fault
        files = writer.finish()
    except BaseException:
        writer.abandon()
        raise
    columns = {
        "source_sizes": sizes,
        "shapes": shapes,
        "checksums": checksums,
        "byte_ranges": byte_ranges,
        MODIFIED_NS: [ref.modified_ns for ref in task.samples],
        SOURCE_CHECKSUMS: source_checksums,
    }
    sidecar = Sidecar(
        shard=task.name,
        inputs_digest=task.inputs_digest,
        files=tuple(FileEntry(file.path.name, file.bytes, file.crc32c) for file in files if sizes),
        rejected=tuple(rejected),
        sums=sums,
        columns=encode_columns(columns),
    )
    if sizes:
        publish(files)
    else:  # every picture was rejected
        for file in files:
            file.abandon()
            file.path.unlink(missing_ok=True)  # an earlier run may have written it
    with atomic_write(sidecar_path(task.folder, task.name)) as opened:
        opened.write(sidecar.to_json())
    return task.name


def check_node(folder: Path, inputs_digest: str, source: Source, refs: Sequence[SampleRef]) -> None:
    """Check that a node sees the `folder` of a conversion, and can read the pictures `refs`.

    Args:
        inputs_digest: digest of the inputs of the conversion.

    Raises:
        DatasetError: the folder is missing, or another one.
        SourceError: the source cannot be read. Damaged pictures are no error.
    """
    description = read_conversion(folder)
    if description is None or description.inputs.digest != inputs_digest:
        raise DatasetError("is missing there, or another folder", path=folder)
    for ref in refs:
        with suppress(ImageError):
            source.read(ref, MAX_PIXELS)


def make_stored_picture(
    data: bytes | Image.Image, path: str, recipe: Recipe, rendering: Rendering
) -> tuple[bytes | Pixels, tuple[int, int], Pixels]:
    """Make the form in which `recipe` stores a picture: pixels, or a JPEG.

    A JPEG of the source is stored byte for byte where it has the size already and all decoders agree on it.

    Args:
        data: picture as `Source.read` gives it.
        rendering: `recipe.rendering`, which callers compute once for many pictures.

    Returns:
        What is stored, the width and height of the upright original, and the pixels: those that the JPEG was
        encoded from, or those of a copied JPEG.

    Raises:
        ImageError: the picture cannot be decoded; names `path`.
    """
    pixels, size, may_be_copied = images.render_or_copy(data, path, rendering)
    if FORMATS[recipe.format].holds_pixels:
        pixels = np.ascontiguousarray(pixels)
        return pixels, size, pixels
    if may_be_copied:
        assert isinstance(data, bytes)
        return data, size, pixels
    return jpeg.encode_jpeg(pixels, recipe.quality), size, pixels


def predict_bytes(scan: Scan, recipe: Recipe) -> int:
    """Predict how many bytes the pictures of `scan` will take in `recipe`'s format.

    Where pictures vary in size, their pixels are estimated from the headers of a hundred, evenly over the
    source. A JPEG is assumed to have as many bytes per pixel as a usual photograph of its quality; a drawing
    has less, and noise more.
    """
    holds_pixels, size = FORMATS[recipe.format].holds_pixels, recipe.stored_size
    if holds_pixels and size is not None:
        picture_bytes: float = recipe.picture_bytes
    else:
        sizes, rendering = [], recipe.rendering
        for ref in _sample_evenly(scan, _PROBED_PICTURES):
            with suppress(ImageError):  # the conversion reports it
                data = scan.source.read(ref, recipe.max_pixels)
                sizes.append(_predict_picture_bytes(data, scan.source.where(ref), recipe, rendering))
        picture_bytes = sum(sizes) / len(sizes) if sizes else 0
    return _dataset_bytes(scan, recipe, picture_bytes)


def predict_seconds(scan: Scan, recipe: Recipe) -> float:
    """Predict how many seconds one process works to convert `scan`, by a hundred pictures, evenly over it."""
    samples, rendering = _sample_evenly(scan, _PROBED_PICTURES), recipe.rendering
    start_s = time.perf_counter()
    for ref in samples:
        with suppress(ImageError):  # the conversion reports it
            data = scan.source.read(ref, recipe.max_pixels)
            picture_checksum(data)
            stored, _, pixels = make_stored_picture(data, scan.source.where(ref), recipe, rendering)
            checksum_of(stored)
            PixelSums.from_picture(pixels)
    return (time.perf_counter() - start_s) / len(samples) * len(scan.samples)


def _sample_evenly(scan: Scan, count: int) -> list[SampleRef]:
    """Return at most `count` samples, spread evenly over the scan."""
    rows = np.unique(np.linspace(0, len(scan.samples) - 1, count).astype(int)).tolist()
    return [scan.samples[row] for row in rows]


def _dataset_bytes(scan: Scan, recipe: Recipe, picture_bytes: float) -> int:
    """Return the bytes of `scan` in `recipe`'s format, if a picture takes `picture_bytes` on average."""
    form = FORMATS[recipe.format]
    shards = math.ceil(len(scan.samples) / recipe.samples_per_shard)
    return round(len(scan.samples) * (picture_bytes + form.bytes_per_sample) + shards * form.bytes_per_shard)


def _predict_picture_bytes(
    data: bytes | Image.Image, path: str, recipe: Recipe, rendering: Rendering
) -> float:
    width, height = data.size if isinstance(data, Image.Image) else images.upright_shape(data, path)[::-1]
    fitted = images.fitted_size(width, height, rendering)
    if FORMATS[recipe.format].holds_pixels:
        return math.prod(fitted) * images.CHANNELS[recipe.channels]
    if fitted == (width, height) and isinstance(data, bytes) and data.startswith(jpeg.START):
        return len(data)  # it is copied
    per_pixel = np.interp(recipe.quality, [*_JPEG_BYTES_PER_PIXEL], [*_JPEG_BYTES_PER_PIXEL.values()])
    return math.prod(fitted) * float(per_pixel)


def check_disk_space(
    scan: Scan,
    recipe: Recipe,
    waiting: Sequence[ShardPlan],
    folder: Path,
    on_start: Callable[[int, int], None],
) -> None:
    """Raise DatasetError if the disk of `folder` has too little space for the shards that are missing.

    For JPEGs, which may turn out smaller than predicted, this is a warning.

    Args:
        waiting: shards that are not written yet.
        on_start: called with (bytes that these shards will take, bytes free).
    """
    share = sum(len(shard.rows) for shard in waiting) / len(scan.samples)
    needed = round(predict_bytes(scan, recipe) * share)
    remedy = "make room, or choose a DST on another disk or a smaller --size"
    free = shutil.disk_usage(folder).free
    on_start(needed, free)
    if needed <= free:
        return
    problem = f"the dataset needs about {needed:,} bytes, and {free:,} are free"
    if FORMATS[recipe.format].holds_pixels:
        raise DatasetError(problem, path=folder, remedy=remedy)
    warn(f"{folder}: {problem}; if the disk fills up, {remedy}")

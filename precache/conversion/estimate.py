"""How large a converted dataset will be, from a few of its pictures, and whether the disk can take it."""

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from precache.conversion.shard_writer import store
from precache.errors import DatasetError, ImageError
from precache.formats import FORMATS
from precache.pictures import masks
from precache.plan import ShardPlan
from precache.recipe import Recipe
from precache.sources.base import Scan
from precache.sources.masks import reader_of, render_mask
from precache.storage.shard_cache import CACHE_DIR

_PICTURES = 24


def predict_bytes(scan: Scan, recipe: Recipe, pictures: int = _PICTURES) -> int:
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

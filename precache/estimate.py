"""How large a converted dataset will be, from a few of its pictures."""

import math

from precache.errors import ImageError
from precache.formats import FORMATS
from precache.recipe import Recipe
from precache.shard_writer import store
from precache.sources.base import Scan

_PICTURES = 24


def predict_bytes(scan: Scan, recipe: Recipe) -> int:
    """Bytes that `scan` will take in `recipe`'s format; what varies is sampled, evenly over the tree."""
    form = FORMATS[recipe.format]
    known = form.holds_pixels and recipe.stored_size is not None
    picture = recipe.picture_bytes if known else _mean_bytes(scan, recipe)
    shards = math.ceil(len(scan.samples) / recipe.samples_per_shard)
    return round(len(scan.samples) * (picture + form.bytes_per_sample) + shards * form.bytes_per_shard)


def _mean_bytes(scan: Scan, recipe: Recipe) -> float:
    """Of a few of its pictures, as they will be stored; 0 if none of these can be decoded."""
    sizes = []
    for row in range(0, len(scan.samples), max(1, len(scan.samples) // _PICTURES)):
        ref = scan.samples[row]
        try:
            stored, *_ = store(scan.source.read(ref, recipe.max_pixels), scan.source.where(ref), recipe)
        except ImageError:
            continue  # the conversion says what is wrong with it
        sizes.append(len(stored) if isinstance(stored, bytes) else stored.nbytes)
    return sum(sizes) / len(sizes) if sizes else 0

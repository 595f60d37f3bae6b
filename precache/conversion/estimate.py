"""How large a converted dataset will be, from a few of its pictures."""

import math

from precache.conversion.shard_writer import store
from precache.errors import ImageError
from precache.formats import FORMATS
from precache.pictures import masks
from precache.recipe import Recipe
from precache.sources.base import Scan

_PICTURES = 24


def predict_bytes(scan: Scan, recipe: Recipe, pictures: int = _PICTURES) -> int:
    """Bytes that `scan` will take in `recipe`'s format.

    Args:
        pictures: about so many are converted, evenly over the tree, where their size varies.
    """
    form = FORMATS[recipe.format]
    has_masks = masks.reader_of(scan.source) is not None
    known = form.holds_pixels and recipe.stored_size is not None and not has_masks
    picture = recipe.picture_bytes if known else _mean_bytes(scan, recipe, pictures)
    shards = math.ceil(len(scan.samples) / recipe.samples_per_shard)
    return round(len(scan.samples) * (picture + form.bytes_per_sample) + shards * form.bytes_per_shard)


def _mean_bytes(scan: Scan, recipe: Recipe, pictures: int) -> float:
    """Of a few of its pictures, as they will be stored; 0 if none of these can be decoded."""
    sizes = []
    for row in range(0, len(scan.samples), max(1, len(scan.samples) // pictures)):
        ref = scan.samples[row]
        try:
            stored, size, *_ = store(scan.source.read(ref, recipe.max_pixels), scan.source.where(ref), recipe)
            mask = masks.render(scan.source, ref, size, recipe.rendering)
        except ImageError:
            continue  # the conversion says what is wrong with it
        if isinstance(stored, bytes):
            sizes.append(len(stored) + (0 if mask is None else len(masks.encode(mask))))
        else:
            sizes.append(stored.nbytes + (0 if mask is None else mask.nbytes))
    return sum(sizes) / len(sizes) if sizes else 0

"""How large a converted dataset will be, from a few of its pictures."""

import math

from precache import images
from precache.errors import ImageError
from precache.recipe import Recipe
from precache.shard_writer import store
from precache.source import Scan

_PICTURES = 24
_ROW_BYTES = 16  # label and id of a row of `shards`
_TAR_BYTES = 3 * 512 + 3 * 256  # three headers, and padding to blocks of 512
_TAR_END_BYTES = 6144  # of each tar: two empty blocks, and on average half a record of 10,240
_RECORD_BYTES = 120  # keys, lengths and checksums of a TFRecord


def predict_bytes(scan: Scan, recipe: Recipe) -> int:
    """Bytes that `scan` will take in `recipe`'s format; JPEGs are sampled, evenly over the tree."""
    if recipe.format == "shards":
        return len(scan.samples) * (recipe.size * recipe.size * 3 + _ROW_BYTES)
    step = max(1, len(scan.samples) // _PICTURES)
    sizes = []
    for row in range(0, len(scan.samples), step):
        path = f"{scan.root}/{scan.samples[row].path}"
        try:
            stored, _ = store(images.read_bytes(path, recipe.max_pixels), path, recipe)
        except ImageError:
            continue  # the conversion says what is wrong with it
        sizes.append(len(stored))
    tar = recipe.format == "webdataset"
    mean = sum(sizes) / len(sizes) if sizes else 0
    shards = math.ceil(len(scan.samples) / recipe.samples_per_shard)
    per_sample = mean + (_TAR_BYTES if tar else _RECORD_BYTES)
    return round(len(scan.samples) * per_sample + (shards * _TAR_END_BYTES if tar else 0))

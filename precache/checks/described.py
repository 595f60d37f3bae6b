"""Whether a dataset says of its samples what their source says: targets, fields and masks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from precache import images
from precache.dataset import columns
from precache.dataset.index import SampleIndex
from precache.errors import ImageError
from precache.formats import FORMATS, Sample, StoredSample
from precache.pictures import masks
from precache.recipe import Recipe
from precache.sources import Source
from precache.sources.base import SampleRef


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a sample: by its source, and by the index, at `row`.

    Attributes:
        target, fields: that the source has, see `columns.labelled`.
    """

    source: Source
    ref: SampleRef
    target: Any
    fields: Mapping[str, Any]
    index: SampleIndex
    row: int
    recipe: Recipe

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the upright picture of the source."""
        width, height = self.index.source_sizes[self.row].tolist()
        return width, height


def compare(known: Known, sample: StoredSample, shard: str) -> str:
    """What target, fields and mask of a sample, in the index and in its `shard`, are not; a phrase."""
    ref, index = known.ref, known.index
    labelled = columns.labelled(index.targets, index.fields, known.row)
    if repr(labelled) != repr((known.target, known.fields)):  # NaN is NaN
        return "has another target or other fields in the index than in its source"
    expected = Sample(ref.id, ref.label, b"", ref.path, known.size, known.target, known.fields)
    if sample.described != FORMATS[known.recipe.format].describe(expected):
        return "has another path, target or other fields in its shard than in its source"
    return _compare_mask(known, sample, shard)


def _compare_mask(known: Known, sample: StoredSample, shard: str) -> str:
    how = known.recipe.rendering
    try:
        expected = masks.render(known.source, known.ref, known.size, how)
        stored = sample.mask
        if isinstance(stored, bytes):
            stored = masks.decode(stored, images.fitted_size(*known.size, how)[::-1])
        if stored is not None:
            known.index.check_mask(known.row, stored, shard)
    except ImageError as error:
        return f"has another mask than its source ({error.reason})"
    except ValueError as error:
        return f"has a mask that cannot be decoded ({error})"
    if stored is None or expected is None:
        return "" if stored is expected else "has a mask, and its source has none, or the other way round"
    return "" if np.array_equal(stored, expected) else "has another mask than its source"


def in_words(index: SampleIndex) -> list[str]:
    """Target, fields and the mask's checksum of each sample; empty where there are none."""
    if index.targets is None and not index.fields and index.mask_checksums is None:
        return [""] * len(index)
    checksums = [None] * len(index) if index.mask_checksums is None else index.mask_checksums.tolist()
    return [
        repr((*columns.labelled(index.targets, index.fields, row), checksum))
        for row, checksum in enumerate(checksums)
    ]

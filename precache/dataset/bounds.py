"""Limits of the values in an index, which are checked when a column is first used.

Checksums find damage, not lies: a dataset may come from a stranger, who computes them anew. So the file's
header says only what lies in the file (`precache.dataset.index`), the columns are as many and as long as the
manifest counts, and here every number is compared with its range before it is used.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from precache.dataset.columns import Column, Target
from precache.pictures.images import MAX_KEPT_SIDE

Ints: TypeAlias = npt.NDArray[np.int64]
_TEXTS_PER_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Limits that the values of the columns of samples are checked against when a column is first used.

    Attributes:
        ids: upper bound of the ids, exclusive.
        classes: number of classes.
        target: kind of label.
        channels: number of channels of the stored pictures.
        starts: int64 [shards], row of each shard's first sample.
        shard_bytes: int64 [shards], size of each shard's file.
        max_bytes: int64 [shards], bytes that the pixels of a shard can have, see `max_pixels_bytes`.
        largest: int32 [shards, 2], greatest height and width of a picture in each shard; None where all
            pictures have one size.
    """

    ids: int
    classes: int
    target: Target
    channels: int
    starts: Ints
    shard_bytes: Ints
    max_bytes: Ints
    largest: npt.NDArray[np.int32] | None

    def check(self, name: str, column: Column) -> None:
        """Raise ValueError if a value of the column of this name, with a row per sample, is out of range."""
        values = column.values
        low, high = {
            "ids": (0, self.ids),
            "labels": (0, self.classes) if self.target == "class" else (-1, 0),
            "targets": (0, self.classes) if self.target == "classes" else (None, None),
            "source_sizes": (1, None),
            "byte_ranges": (0, 1 << 62),
            "shapes": (1, MAX_KEPT_SIDE + 1),
        }.get(name, (None, None))
        if low is not None and len(values) and values.min() < low:
            raise ValueError(f"{values.min():,} in column {name}")
        if high is not None and len(values) and values.max() >= high:
            raise ValueError(f"{values.max():,} in column {name}, expected less than {high:,}")
        if name == "ids" and not _are_distinct(values):
            raise ValueError("a sample is there twice")
        if column.kind == "text" and name != "paths":
            _check_text(column)
        if name == "byte_ranges":
            last_bytes = np.maximum.reduceat(values.sum(axis=1), self.starts)
            if (last_bytes > self.shard_bytes).any():
                number = int((last_bytes > self.shard_bytes).argmax())
                raise ValueError(f"the samples of shard {number:,} exceed its file")
        if name == "shapes":
            assert self.largest is not None
            pixels = np.multiply(values[:, 0], values[:, 1], dtype=np.int64)
            pixels_bytes = np.add.reduceat(pixels, self.starts) * self.channels
            too_large = np.maximum.reduceat(values, self.starts) > self.largest
            wrong_shards = (pixels_bytes > self.max_bytes) | too_large.any(axis=1)
            if wrong_shards.any():
                number = int(wrong_shards.argmax())
                raise ValueError(f"the shapes of the pictures in shard {number:,} exceed what it can hold")


def _are_distinct(ids: Ints) -> bool:
    """Whether all ids are different; none is negative."""
    limit = int(ids.max(initial=-1)) + 1
    if limit > ids.nbytes:  # a few of very many ids, or a lie: a table of all ids would take too much memory
        ranked = np.sort(ids)
        return not (ranked[1:] == ranked[:-1]).any()
    is_used = np.zeros(limit, np.bool_)  # thirty times as fast as sorting ten million ids
    is_used[ids] = True
    return int(is_used.sum()) == len(ids)


def _check_text(column: Column) -> None:
    """Raise ValueError unless every text of the column is UTF-8."""
    values, ends = column.values, column.ends
    assert ends is not None
    begin = 0
    for first in range(0, len(ends), _TEXTS_PER_BLOCK):  # decoded texts take memory
        part = ends[first : first + _TEXTS_PER_BLOCK]
        stop = int(part[-1])
        values[begin:stop].tobytes().decode()
        starts = part[part < len(values)]
        if ((values[starts] & 0xC0) == 0x80).any():
            raise ValueError("a text ends within a character")
        begin = stop

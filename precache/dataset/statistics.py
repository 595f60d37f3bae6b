"""Mean and standard deviation of each channel of the stored pictures, computed exactly from integer sums.

Each shard's writer adds up its pictures, and its sidecar keeps the sums. So a conversion
that was resumed has the same statistics as one that ran through.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import numpy as np
from msgspec import Meta, Struct

from precache.pictures.jpeg import Pixels
from precache.storage.stored_json import Count

_Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]

_BLOCK_ROWS = 64  # so few that their squares stay in the CPU's cache


@dataclass(frozen=True, slots=True)
class PixelSums:
    """Sums over pixels, one for each channel; without pixels there are no channels either.

    Attributes:
        pixels: number of pixels.
        sums: sum of the values of each channel.
        squares: sum of the squares of the values of each channel.
    """

    pixels: int = 0
    sums: tuple[int, ...] = ()
    squares: tuple[int, ...] = ()

    @classmethod
    def from_picture(cls, picture: Pixels) -> "PixelSums":
        """Add up a picture, uint8 [height, width, channels]."""
        height, width, channels = picture.shape
        rows = picture.reshape(height, width * channels)
        sums, squares = np.zeros((2, width * channels), np.uint64)
        for start in range(0, height, _BLOCK_ROWS):
            block = rows[start : start + _BLOCK_ROWS]
            sums += np.add.reduce(block, axis=0, dtype=np.uint32)
            # a square has 16 bits, and the squares of a block add up to 32
            squares += np.add.reduce(np.square(block, dtype=np.uint16), axis=0, dtype=np.uint32)
        channel_sums = sums.reshape(width, channels).sum(axis=0).tolist()
        channel_squares = squares.reshape(width, channels).sum(axis=0).tolist()
        return cls(height * width, tuple(channel_sums), tuple(channel_squares))

    def __add__(self, other: "PixelSums") -> "PixelSums":
        if not self.pixels:
            return other
        if not other.pixels:
            return self
        return PixelSums(
            self.pixels + other.pixels,
            tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)),
            tuple(a + b for a, b in zip(self.squares, other.squares, strict=True)),
        )


NO_PIXELS = PixelSums()


class ChannelStatistics(Struct, frozen=True, forbid_unknown_fields=True):
    """Mean and standard deviation over all pixels of a split.

    Attributes:
        mean, std: mean and standard deviation of each channel, as shares of the brightest value, 0-1; std is
            that of the pixels themselves, not an estimate from a sample of them.
        pixels: number of pixels.
    """

    mean: tuple[_Share, ...]
    std: tuple[_Share, ...]
    pixels: Count

    @classmethod
    def from_sums(cls, shards: Iterable[PixelSums]) -> "ChannelStatistics | None":
        """Compute the statistics of a split from sums of its shards; None if those of a shard are unknown."""
        total = NO_PIXELS
        for sums in shards:
            if not sums.pixels:
                return None
            total += sums
        if not total.pixels:
            return None
        count, scale = total.pixels, total.pixels * 255
        mean = tuple(value / scale for value in total.sums)
        std = tuple(
            math.sqrt(max(0, count * square - value**2)) / scale
            for value, square in zip(total.sums, total.squares, strict=True)
        )
        return cls(mean, std, count)

    def combine(self, other: "ChannelStatistics") -> "ChannelStatistics | None":
        """Compute the statistics of the pixels of both, up to rounding; None if their channels differ."""
        if len(self.mean) != len(other.mean):
            return None
        pixels = self.pixels + other.pixels
        share, other_share = self.pixels / pixels, other.pixels / pixels
        means, stds = [], []
        for mean, other_mean, std, other_std in zip(self.mean, other.mean, self.std, other.std, strict=True):
            means.append(min(1.0, share * mean + other_share * other_mean))
            between = share * other_share * (mean - other_mean) ** 2  # variance between the two means
            stds.append(min(1.0, math.sqrt(share * std**2 + other_share * other_std**2 + between)))
        return ChannelStatistics(tuple(means), tuple(stds), pixels)

    def __str__(self) -> str:
        mean, std = (" ".join(f"{value:.4f}" for value in part) for part in (self.mean, self.std))
        return f"mean {mean}, std {std}"


def statistics_by_split(parts: Iterable[tuple[str, PixelSums]]) -> dict[str, ChannelStatistics]:
    """Compute the statistics of each split; a split is left out if the sums of one of its parts are unknown.

    Args:
        parts: name of the split, and sums of its pixels, for each part such as a shard.
    """
    sums_by_split: dict[str, list[PixelSums]] = {}
    for split, sums in parts:
        sums_by_split.setdefault(split, []).append(sums)
    by_split = {}
    for split, split_sums in sums_by_split.items():
        statistics = ChannelStatistics.from_sums(split_sums)
        if statistics is not None:
            by_split[split] = statistics
    return by_split

"""Mean and standard deviation of each channel of what is stored: exact, from integer sums.

Each shard's writer adds up its pictures, the journal keeps the sums of finished shards, so what a resumed
conversion says is what one run says.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from precache.pictures.jpeg import Pixels

_BLOCK_ROWS = 64  # at a time: their squares stay in the CPU's cache


@dataclass(frozen=True, slots=True)
class PixelSums:
    """Sums over pixels, one for each channel; of no pixels, there are no channels either.

    Attributes:
        pixels: how many.
        sums: of their values.
        squares: of the squares of these.
    """

    pixels: int = 0
    sums: tuple[int, ...] = ()
    squares: tuple[int, ...] = ()

    @classmethod
    def of(cls, picture: Pixels) -> "PixelSums":
        """Those of uint8 or uint16 [height, width, channels]."""
        height, width, channels = picture.shape
        rows = picture.reshape(height, width * channels)
        sums, squares = np.zeros((2, width * channels), np.uint64)
        # the square of a value fits into twice its bits, and of uint8 so does the sum of a block into 32
        square, total = (np.uint16, np.uint32) if picture.dtype == np.uint8 else (np.uint32, np.uint64)
        for start in range(0, height, _BLOCK_ROWS):
            block = rows[start : start + _BLOCK_ROWS]
            sums += np.add.reduce(block, axis=0, dtype=np.uint32)
            squares += np.add.reduce(np.square(block, dtype=square), axis=0, dtype=total)
        by_channel = (column.reshape(width, channels).sum(axis=0).tolist() for column in (sums, squares))
        return cls(height * width, *map(tuple, by_channel))

    def __add__(self, other: "PixelSums") -> "PixelSums":
        if not (self.pixels and other.pixels):
            return self if self.pixels else other
        sums, squares = (
            tuple(map(sum, zip(*pair, strict=True)))
            for pair in ((self.sums, other.sums), (self.squares, other.squares))
        )
        return PixelSums(self.pixels + other.pixels, sums, squares)


NO_PIXELS = PixelSums()


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Mean and standard deviation over all pixels of a split.

    Attributes:
        mean, std: of each channel, as shares of the brightest value, 0-1; std is of the pixels themselves,
            not an estimate from a sample of them.
        pixels: how many.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    pixels: int

    @classmethod
    def of(cls, shards: Iterable[PixelSums], brightest: int = 255) -> "ChannelStatistics | None":
        """Of the shards of a split, of values up to `brightest`; None if pixels of one are not known."""
        total = NO_PIXELS
        for sums in shards:
            if not sums.pixels:
                return None
            total += sums
        if not total.pixels:
            return None
        count, scale = total.pixels, total.pixels * brightest
        mean = tuple(value / scale for value in total.sums)
        std = tuple(
            math.sqrt(max(0, count * square - value**2)) / scale
            for value, square in zip(total.sums, total.squares, strict=True)
        )
        return cls(mean, std, count)

    def joined(self, other: "ChannelStatistics") -> "ChannelStatistics | None":
        """Statistics of the pixels of both, but for rounding; None if their channels differ."""
        if len(self.mean) != len(other.mean):
            return None
        pixels = self.pixels + other.pixels
        ours, theirs = self.pixels / pixels, other.pixels / pixels
        pairs = list(zip(self.mean, other.mean, strict=True))
        spreads = zip(self.std, other.std, strict=True)
        between = [ours * theirs * (one - another) ** 2 for one, another in pairs]
        return ChannelStatistics(
            tuple(min(1.0, ours * one + theirs * another) for one, another in pairs),
            tuple(
                min(1.0, math.sqrt(ours * one**2 + theirs * another**2 + apart))
                for (one, another), apart in zip(spreads, between, strict=True)
            ),
            pixels,
        )

    def __str__(self) -> str:
        mean, std = (" ".join(f"{value:.4f}" for value in part) for part in (self.mean, self.std))
        return f"mean {mean}, std {std}"


def statistics_by_split(
    parts: Iterable[tuple[str, PixelSums]], dtype: str = "uint8"
) -> dict[str, ChannelStatistics]:
    """Of each split all of whose parts, pairs of its name and the sums of pixels of `dtype`, are known."""
    by_split: dict[str, list[PixelSums]] = {}
    for split, sums in parts:
        by_split.setdefault(split, []).append(sums)
    brightest = np.iinfo(dtype).max
    found = {split: ChannelStatistics.from_sums(sums, brightest) for split, sums in by_split.items()}
    return {split: statistics for split, statistics in found.items() if statistics is not None}

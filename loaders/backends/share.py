"""Which samples of a split are kept in memory that does not hold them all, and where: pure.

The rule looks at the split and at the number of bytes alone, so that all processes keep the same: those of
whole shards, drawn by a fixed key: who reads shard after shard never opens one of them again.
Of the last one that fits only in part its first samples are kept. A raw tree, whose positions go class by
class, is cut into runs of positions instead.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loaders.batch import Positions
from loaders.dataset import RAW, SplitData

_KEPT_TAG = 11
_RUN = 64  # positions of a raw tree that are kept together


class Places:
    """Where the pictures of a split begin, if all of one split lay one behind the other.

    Attributes:
        picture_bytes: of each; None where each picture has a size of its own.
        total_bytes: of all.
    """

    def __init__(self, data: SplitData, picture_bytes: int | None) -> None:
        self.picture_bytes = picture_bytes
        self._count = len(data.ids)
        if picture_bytes is None:
            lengths = data.shapes_at(slice(None)).prod(axis=1) * data.pixel_bytes
            self._starts = np.concatenate(([0], np.cumsum(lengths)))
        self.total_bytes = int(self.starts(np.array([self._count]))[0])

    def starts(self, positions: Positions) -> Positions:
        """int64 [n]: the byte where each begins; at the number of samples all end."""
        if self.picture_bytes is not None:
            return positions * self.picture_bytes
        starts: Positions = self._starts[positions]
        return starts


@dataclass(frozen=True, slots=True)
class Share:
    """The samples that are kept.

    Attributes:
        samples: how many.
        total_bytes: of their pictures.
        places: of all pictures of the split.
        edges: int64 [runs + 1], the position of the first sample of each run, and behind the last one.
        counts: int64 [runs], how many of each run, the first ones, are kept.
        numbers: int64 [runs], how many samples are kept of the runs before.
        offsets: int64 [runs], the byte where what is kept of each run begins.
    """

    samples: int
    total_bytes: int
    places: Places
    edges: Positions
    counts: Positions
    numbers: Positions
    offsets: Positions

    def find(self, positions: Positions) -> Positions:
        """int64 [n]: each sample's number among those that are kept, -1 if it is not."""
        runs = np.searchsorted(self.edges, positions, side="right") - 1
        rows = positions - self.edges[runs]
        found: Positions = np.where(rows < self.counts[runs], self.numbers[runs] + rows, -1)
        return found

    def starts(self, positions: Positions) -> Positions:
        """int64 [n]: the byte where each picture, one of those that are kept, begins."""
        runs = np.searchsorted(self.edges, positions, side="right") - 1
        first = self.places.starts(self.edges[runs])
        starts: Positions = self.offsets[runs] + self.places.starts(positions) - first
        return starts


def choose_share(data: SplitData, places: Places, most_bytes: int) -> Share:
    """What is kept of `data` in `most_bytes` of memory."""
    count = len(data.ids)
    edges = np.append(np.arange(0, count, _RUN), count) if data.kind == RAW else data.shard_starts
    samples, lengths = np.diff(edges), np.diff(places.starts(edges))
    counts = samples.copy()
    if places.total_bytes > most_bytes:
        drawn = np.random.default_rng((len(samples), _KEPT_TAG)).permutation(len(samples))
        ends = np.cumsum(lengths[drawn])
        fitting = int(np.searchsorted(ends, most_bytes, side="right"))
        counts[drawn[fitting:]] = 0
        last = int(drawn[fitting])
        left = most_bytes - (int(ends[fitting - 1]) if fitting else 0)
        rows = np.arange(edges[last], edges[last + 1] + 1)
        ends_in_last = places.starts(rows) - places.starts(rows[:1])
        counts[last] = np.searchsorted(ends_in_last, left, side="right") - 1
    kept_bytes = places.starts(edges[:-1] + counts) - places.starts(edges[:-1])
    return Share(
        int(counts.sum()),
        int(kept_bytes.sum()),
        places,
        edges,
        counts,
        _before(counts),
        _before(kept_bytes),
    )


def _before(lengths: npt.NDArray[np.int64]) -> Positions:
    return np.cumsum(lengths) - lengths

"""The order of several datasets served as one, see `loaders.mixture`: computed place by place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loaders.batch import Positions
from loaders.order.arrangements import Arrangement
from loaders.order.cut import Cut, Shares
from loaders.order.keyed import KeyedOrder
from loaders.order.listed import EpochOrder

_GAP = 1 << 17  # places between two that are not looked up together


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedOrder:
    """The batches of any epoch; positions count through the parts, one behind the other.

    Its batches are cut among the ranks of all nodes alike.

    Attributes:
        parts: the order of each, of one node.
        counts: how many samples of each an epoch has.
        batch_size, last, rank, world_size: as of `EpochOrder`.
    """

    parts: tuple[EpochOrder | KeyedOrder, ...]
    counts: tuple[int, ...]
    batch_size: int
    last: str
    rank: int
    world_size: int

    @property
    def kind(self) -> str:
        """As of `Order`."""
        return "none" if all(part.kind == "none" for part in self.parts) else "mixture"

    @property
    def samples(self) -> int:
        """As of `Order`."""
        return sum(self.counts)

    def batches(self, epoch: int) -> Shares:
        """As of `Order`."""
        cut = self._cut()
        return Shares(cut, _Mixed(self.parts, self.counts, epoch).look_up, cut.span)

    def batch_count(self) -> int:
        """As of `Order`."""
        return len(self._cut())

    def rank_samples(self) -> int:
        """As of `Order`."""
        return self._cut().rank_samples()

    def identity(self) -> dict[str, Any]:
        """As of `Order`."""
        return {"shuffle": [part.identity() for part in self.parts], "samples": list(self.counts)}

    def _cut(self) -> Cut:
        return Cut(
            samples=self.samples,
            batch_size=self.batch_size,
            last=self.last,
            rank=self.rank,
            world_size=self.world_size,
        )


class _Mixed:
    """One epoch."""

    def __init__(self, parts: Sequence[EpochOrder | KeyedOrder], counts: Sequence[int], epoch: int) -> None:
        self._counts = counts
        starts = np.cumsum([0, *(part.samples for part in parts)]).tolist()
        self._streams = [
            _Stream(part, start, epoch * count)
            for part, start, count in zip(parts, starts, counts, strict=False)
        ]

    def look_up(self, places: Positions) -> tuple[Positions, Positions]:
        """As of `loaders.order.cut.LookUp`."""
        apart = np.flatnonzero(abs(np.diff(places)) > _GAP) + 1
        found = [self._near(part) for part in np.split(places, apart)]
        positions, occurrences = zip(*found, strict=True)
        return np.concatenate(positions), np.concatenate(occurrences)

    def _near(self, places: Positions) -> tuple[Positions, Positions]:
        first, last = int(places.min()), int(places.max())
        parts, numbers = (of_all[places - first] for of_all in merge(self._counts, first, last + 1))
        positions, occurrences = np.empty_like(places), np.empty_like(places)
        for part, stream in enumerate(self._streams):
            of_part = np.flatnonzero(parts == part)
            positions[of_part], occurrences[of_part] = stream.look_up(numbers[of_part])
        return positions, occurrences


class _Stream:
    """The epochs of a part, one behind the other, from number `begin` of its samples on.

    Args:
        start: what its positions begin with.
    """

    def __init__(self, part: EpochOrder | KeyedOrder, start: int, begin: int) -> None:
        self._part = part
        self._start = start
        self._begin = begin
        self._kept: dict[int, Arrangement] = {}  # the latest epoch of the part, and the first one

    def look_up(self, numbers: Positions) -> tuple[Positions, Positions]:
        """The samples of these numbers from `begin` on, int64 [n], and how often each came since then."""
        epochs, places = np.divmod(self._begin + numbers, self._part.samples)
        first, begin = divmod(self._begin, self._part.samples)
        positions, occurrences = np.empty_like(places), np.maximum(0, epochs - first - 1)
        for epoch in np.unique(epochs).tolist():
            rows = np.flatnonzero(epochs == epoch)
            positions[rows] = self._arrangement(epoch, first).at(places[rows])
            if epoch > first:
                occurrences[rows] += self._arrangement(first, first).come_from(begin, positions[rows])
        return self._start + positions, occurrences

    def _arrangement(self, epoch: int, first: int) -> Arrangement:
        if epoch not in self._kept:
            self._kept = {known: self._kept[known] for known in (first,) if known in self._kept}
            self._kept[epoch] = self._part.arrangement(epoch)
        return self._kept[epoch]


def merge(counts: Sequence[int], start: int, stop: int) -> tuple[Positions, Positions]:
    """Of places `start` to `stop` of an epoch: int64 [n] the part that each is of, its number in that.

    The j-th of m comes at (j + 1/2) / m of the epoch: of two datasets, what came so far has its shares to
    within half a sample, and any batch to within one.
    """
    total, margin = sum(counts), len(counts) + 1  # a time gives the place to within one for each part
    firsts = [_earlier(count, (start - margin) / total) for count in counts]
    stops = [_earlier(count, (stop + margin) / total) for count in counts]
    spans = list(zip(firsts, stops, strict=True))
    numbers = np.concatenate([np.arange(*span) for span in spans])
    parts = np.repeat(np.arange(len(counts)), np.subtract(stops, firsts))
    order = np.argsort((numbers + 0.5) / np.array(counts)[parts], kind="stable")
    order = order[start - sum(firsts) :][: stop - start]
    return parts[order], numbers[order]


def _earlier(count: int, time: float) -> int:
    """How many samples of `count` come before `time` of the epoch, exactly as the times themselves say."""
    number = min(max(0, int(time * count)), count)
    while number > 0 and (number - 0.5) / count >= time:
        number -= 1
    while number < count and (number + 0.5) / count < time:
        number += 1
    return number

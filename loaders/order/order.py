"""The batches of one rank in any epoch."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from loaders.batch import Positions
from loaders.order.arrangements import (
    Arrangement,
    Shuffled,
    Stored,
    Weights,
    Windows,
    draw,
    gather_windows,
    occurrences,
)
from loaders.order.cut import Cut, LookUp, Shares

WINDOW_SHARDS = 8
_GAP = 1 << 17  # places between two of a mixture that are not looked up together


@dataclass(frozen=True, kw_only=True, slots=True)
class Epochs:
    """What all ranks serve of one dataset in any epoch. The position of a sample alone decides when it comes.

    Attributes:
        shard_starts: int64 [shards + 1], see `loaders.dataset.SplitData`.
        kind: `full`, `window` or `none`, the stored order.
        seed: with the epoch it gives the order.
        window_shards: shards in a window, for kind `window`.
        chosen: of a part of a split the positions of its samples in the whole, int64 [n], ascending, and how
            many samples the whole has: `full` serves them in the order that they have there, which it lists.
        weights: float64 [n], how likely each sample is drawn; an epoch then draws as many as there are, with
            replacement, and lists them in the order of its kind. None: each comes once.
    """

    shard_starts: Positions
    kind: str
    seed: int
    window_shards: int = WINDOW_SHARDS
    chosen: tuple[Positions, int] | None = None
    weights: Weights | None = None

    @property
    def samples(self) -> int:
        """Of an epoch, without what fills up."""
        return int(self.shard_starts[-1])

    def arrangement(self, epoch: int, run: tuple[int, int] | None = None) -> Arrangement:
        """Without weights; only places of `run`, from the first to behind the last, are asked for."""
        if self.kind == "none":
            return Stored()
        if self.kind == "window":
            return Windows(self.shard_starts, self.seed, epoch, self.window_shards, run or (0, self.samples))
        positions, whole = self.chosen or (None, self.samples)
        return Shuffled(whole, self.seed, epoch, positions)

    def look_up(self, epoch: int, run: tuple[int, int]) -> LookUp:
        """What tells the samples at places of `run`."""
        if self.weights is None:
            arrangement = self.arrangement(epoch, run)
            return lambda places: (arrangement.at(places), None)
        drawn = draw(self.weights, self.seed, epoch)
        if self.kind == "window":
            drawn = gather_windows(drawn, self.shard_starts, self.seed, epoch, self.window_shards)
        elif self.kind == "none":
            drawn = np.sort(drawn)
        before = occurrences(drawn)
        return lambda places: (drawn[places], before[places])

    def identity(self) -> dict[str, Any]:
        """What tells these from others of the same samples and seed, as plain JSON values."""
        windows = {"window_shards": self.window_shards} if self.kind == "window" else {}
        weights = None if self.weights is None else sha256(self.weights.tobytes()).hexdigest()
        return {"shuffle": self.kind, **windows, "weights": weights}


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedEpochs:
    """What all ranks serve of several datasets, see `loaders.mixture`.

    Positions count through the parts, one behind the other.

    Attributes:
        parts: the epochs of each, without weights.
        counts: how many samples of each an epoch has.
    """

    parts: tuple[Epochs, ...]
    counts: tuple[int, ...]

    @property
    def kind(self) -> str:
        """`none` where all parts are served in the stored order."""
        return "none" if all(part.kind == "none" for part in self.parts) else "mixture"

    @property
    def samples(self) -> int:
        """Of an epoch, without what fills up."""
        return sum(self.counts)

    def look_up(self, epoch: int, run: tuple[int, int]) -> LookUp:
        """As of `Epochs`; any place may be asked for."""
        starts = np.cumsum([0, *(part.samples for part in self.parts)]).tolist()
        streams = [
            _Stream(part, start, epoch * count)
            for part, start, count in zip(self.parts, starts, self.counts, strict=False)
        ]

        def near(places: Positions) -> tuple[Positions, Positions]:
            first, last = int(places.min()), int(places.max())
            parts, numbers = (of_all[places - first] for of_all in merge(self.counts, first, last + 1))
            positions, occurrences = np.empty_like(places), np.empty_like(places)
            for part, stream in enumerate(streams):
                of_part = np.flatnonzero(parts == part)
                positions[of_part], occurrences[of_part] = stream.look_up(numbers[of_part])
            return positions, occurrences

        def look_up(places: Positions) -> tuple[Positions, Positions]:
            apart = np.flatnonzero(abs(np.diff(places)) > _GAP) + 1
            positions, occurrences = zip(*map(near, np.split(places, apart)), strict=True)
            return np.concatenate(positions), np.concatenate(occurrences)

        return look_up

    def identity(self) -> dict[str, Any]:
        """As of `Epochs`."""
        return {"shuffle": [part.identity() for part in self.parts], "samples": list(self.counts)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What one rank serves in any epoch.

    `window` and `none` may be dealt out to the nodes: each reads shards of its own, which its ranks share,
    and but for those at the two ends of its run no other node reads them. `full` takes samples from all.

    Attributes:
        epochs: what all ranks serve.
        cut: which part of it this one serves in which batch.
    """

    epochs: Epochs | MixedEpochs
    cut: Cut

    def batches(self, epoch: int) -> Shares:
        """Each batch of this rank in `epoch`, in the order they are served."""
        return Shares(self.cut, self.epochs.look_up(epoch, self.cut.run))

    def identity(self) -> dict[str, Any]:
        """What tells this order from others of the same samples, seed and batches, as plain JSON values."""
        return {**self.epochs.identity(), "nodes": self.cut.nodes}


class _Stream:
    """The epochs of a part, one behind the other, from number `begin` of its samples on.

    Args:
        start: what its positions begin with.
    """

    def __init__(self, part: Epochs, start: int, begin: int) -> None:
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

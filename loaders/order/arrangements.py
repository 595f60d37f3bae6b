"""What all ranks serve in an epoch, one behind the other, each place of it computed when it is asked for."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from loaders.batch import Positions
from loaders.order.permutation import KeyedPermutation

_SHARDS_TAG, _SAMPLES_TAG, _KEY_TAG = 6, 7, 8
_FEW = 1 << 16  # samples that are shuffled as a list, of 0.5 MB


class Arrangement(Protocol):
    """The order of one epoch.

    Attributes:
        anywhere: whether places far apart cost no more than those side by side.
    """

    anywhere: bool

    def at(self, places: Positions) -> Positions:
        """The samples at `places`: int64 [n] each."""

    def come_from(self, place: int, positions: Positions) -> npt.NDArray[np.bool_]:
        """Bool [n]: which of the samples at `positions` come at `place` or behind it."""


class Stored:
    """The stored order."""

    anywhere = True

    def at(self, places: Positions) -> Positions:
        """As of `Arrangement`."""
        return places

    def come_from(self, place: int, positions: Positions) -> npt.NDArray[np.bool_]:
        """As of `Arrangement`."""
        come: npt.NDArray[np.bool_] = positions >= place
        return come


class Listed:
    """Any order of samples, of which each comes once unless only `at` is asked: int64 [n]."""

    anywhere = True

    def __init__(self, order: Positions) -> None:
        self._order = order

    def at(self, places: Positions) -> Positions:
        """As of `Arrangement`."""
        return self._order[places]

    def places_of(self, positions: Positions) -> Positions:
        """Where `positions` come, of an order of all samples: int64 [n] each."""
        return np.argsort(self._order)[positions]

    def come_from(self, place: int, positions: Positions) -> npt.NDArray[np.bool_]:
        """As of `Arrangement`."""
        return np.isin(positions, self._order[place:])


class Shuffled:
    """A permutation of `count` samples, each place of which costs the same."""

    anywhere = True

    def __init__(self, count: int, seed: int, epoch: int) -> None:
        key = (seed, epoch, _KEY_TAG)
        few = count <= _FEW
        self._drawn = (
            Listed(np.random.default_rng(key).permutation(count)) if few else KeyedPermutation(count, key)
        )

    def at(self, places: Positions) -> Positions:
        """As of `Arrangement`."""
        return self._drawn.at(places)

    def places_of(self, positions: Positions) -> Positions:
        """Where `positions` come: int64 [n] each."""
        return self._drawn.places_of(positions)

    def come_from(self, place: int, positions: Positions) -> npt.NDArray[np.bool_]:
        """As of `Arrangement`."""
        come: npt.NDArray[np.bool_] = self.places_of(positions) >= place
        return come


class Windows:
    """Shards in random order, samples shuffled within windows of shards: one window is kept at a time.

    A window is a list, for whoever reads it holds its shards, too.

    Args:
        shard_starts: as of `loaders.dataset.SplitData`.
        window_shards: in a window, at most.
        run: first place, and the one behind the last, that may be asked for: windows begin and end with it.
    """

    anywhere = False

    def __init__(
        self, shard_starts: Positions, seed: int, epoch: int, window_shards: int, run: tuple[int, int]
    ) -> None:
        counts = np.diff(shard_starts)
        filled = np.flatnonzero(counts)
        self._shards = filled[np.random.default_rng((seed, epoch, _SHARDS_TAG)).permutation(len(filled))]
        self._stops = np.cumsum(counts[self._shards])  # place behind each shard, in their order
        self._stored = shard_starts
        self._key = (seed, epoch, _SAMPLES_TAG)
        self._run = run
        self._window_shards = window_shards
        first, last = np.searchsorted(self._stops, (run[0], run[1] - 1), side="right").tolist()
        self._firsts = np.arange(first, last + 1, window_shards)  # shard of each window, in their order
        self._starts = self._bounds(self._firsts)[0]
        self._window, self._samples = -1, np.empty(0, np.int64)

    def at(self, places: Positions) -> Positions:
        """As of `Arrangement`."""
        out = np.empty_like(places)
        windows = np.searchsorted(self._starts, places, side="right") - 1
        ends = np.flatnonzero(np.diff(windows, append=-1)) + 1
        for start, stop in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            window = int(windows[start])
            out[start:stop] = self._shuffled(window)[places[start:stop] - self._starts[window]]
        return out

    def come_from(self, place: int, positions: Positions) -> npt.NDArray[np.bool_]:
        """As of `Arrangement`."""
        shards = np.searchsorted(self._stored, positions, side="right") - 1
        ranks = np.empty(len(self._stored), np.int64)
        ranks[self._shards] = np.arange(len(self._shards))
        windows = (ranks[shards] - self._firsts[0]) // self._window_shards
        window = int(np.searchsorted(self._starts, place, side="right")) - 1
        behind = self._shuffled(window)[place - int(self._starts[window]) :]
        come: npt.NDArray[np.bool_] = (windows > window) | np.isin(positions, behind)
        return come

    def _bounds(self, numbers: Positions) -> tuple[Positions, Positions, Positions]:
        """Of shards by their order, in the run: first places, those behind the last, first samples."""
        stops, shards = self._stops[numbers], self._shards[numbers]
        starts = stops - (self._stored[shards + 1] - self._stored[shards])
        first = np.maximum(starts, self._run[0])
        return first, np.minimum(stops, self._run[1]), self._stored[shards] + first - starts

    def _shuffled(self, window: int) -> Positions:
        """The samples of that window: int64 [n]."""
        if window != self._window:
            first = int(self._firsts[window])
            numbers = np.arange(first, min(first + self._window_shards, len(self._shards)))
            bounds = zip(*(part.tolist() for part in self._bounds(numbers)), strict=True)
            samples = np.concatenate([np.arange(at, at + max(0, stop - start)) for start, stop, at in bounds])
            # a node's first shard may be the last one of another: its number tells their windows apart
            rng = np.random.default_rng((*self._key, first, self._run[0]))
            self._window, self._samples = window, rng.permutation(samples)
        return self._samples

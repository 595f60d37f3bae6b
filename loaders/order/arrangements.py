"""What all ranks serve in an epoch, one behind the other, each place of it computed when it is asked for."""

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from loaders.batch import Positions
from loaders.order.permutation import KeyedPermutation

_WINDOW_TAG, _WEIGHTED_TAG, _SHARDS_TAG, _SAMPLES_TAG, _KEY_TAG = 4, 5, 6, 7, 8
_FEW = 1 << 16  # samples that are shuffled as a list, of 0.5 MB
Weights: TypeAlias = npt.NDArray[np.float64]


class Arrangement(Protocol):
    """The order of one epoch in which each sample comes once."""

    def at(self, places: Positions) -> Positions:
        """The samples at `places`: int64 [n] each."""

    def come_from(self, place: int, positions: Positions) -> npt.NDArray[np.bool_]:
        """Bool [n]: which of the samples at `positions` come at `place` or behind it."""


class Stored:
    """The stored order."""

    def at(self, places: Positions) -> Positions:
        """As of `Arrangement`."""
        return places

    def come_from(self, place: int, positions: Positions) -> npt.NDArray[np.bool_]:
        """As of `Arrangement`."""
        come: npt.NDArray[np.bool_] = positions >= place
        return come


class Listed:
    """A permutation that is listed: int64 [n]."""

    def __init__(self, order: Positions) -> None:
        self._order = order

    def at(self, places: Positions) -> Positions:
        """What comes at `places`: int64 [n] each."""
        return self._order[places]

    def places_of(self, positions: Positions) -> Positions:
        """Where `positions` come: int64 [n] each."""
        return np.argsort(self._order)[positions]


class Shuffled:
    """A permutation of `count` samples, each place of which costs the same.

    Args:
        chosen: int64 [n], ascending: these alone, in the order that they have among all; it is listed.
    """

    def __init__(self, count: int, seed: int, epoch: int, chosen: Positions | None = None) -> None:
        key = (seed, epoch, _KEY_TAG)
        drawn: Listed | KeyedPermutation = (
            Listed(np.random.default_rng(key).permutation(count))
            if count <= _FEW
            else KeyedPermutation(count, key)
        )
        if chosen is not None:
            drawn = Listed(np.argsort(drawn.places_of(chosen)))
        self.at, self._places_of = drawn.at, drawn.places_of

    def come_from(self, place: int, positions: Positions) -> npt.NDArray[np.bool_]:
        """As of `Arrangement`."""
        come: npt.NDArray[np.bool_] = self._places_of(positions) >= place
        return come


class Windows:
    """Shards in random order, samples shuffled within windows of shards: one window is kept at a time.

    A window is a list, for whoever reads it holds its shards, too.

    Args:
        shard_starts: as of `loaders.dataset.SplitData`.
        window_shards: in a window, at most.
        run: first place, and the one behind the last, that may be asked for: windows begin and end with it.
    """

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


def draw(weights: Weights, seed: int, epoch: int) -> Positions:
    """As many samples as there are weights, drawn with replacement.

    As torch's `WeightedRandomSampler(weights, len(weights))`.
    """
    ends = np.cumsum(weights)
    draws = np.random.default_rng((seed, epoch, _WEIGHTED_TAG)).random(len(weights)) * ends[-1]
    # never the last bound itself, to which a product may be rounded
    drawn: Positions = np.searchsorted(ends, np.minimum(draws, np.nextafter(ends[-1], 0)), side="right")
    return drawn


def gather_windows(
    drawn: Positions, shard_starts: Positions, seed: int, epoch: int, window_shards: int
) -> Positions:
    """The samples `drawn`, shuffled within windows of shards as those of `Windows` are."""
    rng = np.random.default_rng((seed, epoch, _WINDOW_TAG))
    places = np.argsort(rng.permutation(len(shard_starts) - 1))  # of each shard
    shards = np.searchsorted(shard_starts[1:], drawn, side="right")
    return drawn[np.lexsort((rng.random(len(drawn)), places[shards] // window_shards))]


def occurrences(order: Positions) -> Positions:
    """How often each sample of `order` came before in it: int64 [n]."""
    by_sample = np.argsort(order, kind="stable")
    ranked = order[by_sample]
    first = np.concatenate(([True], ranked[1:] != ranked[:-1]))[: len(ranked)]
    places = np.arange(len(ranked))
    before = np.empty_like(places)
    before[by_sample] = places - np.maximum.accumulate(np.where(first, places, 0))
    return before

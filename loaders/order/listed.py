"""Which sample comes when. Pure: NumPy only, no state, the same on every machine.

An order is a permutation of positions, a position being a sample's rank in the stored order of its
split. It depends on the seed, the epoch and what is stored, never on workers or timing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from loaders.batch import Positions
from loaders.order.arrangements import Arrangement, Listed
from loaders.order.cut import Cut, Shares, batch_count, cut, cut_repeating

_FULL_TAG, _WINDOW_TAG, _WEIGHTED_TAG = 3, 4, 5
WINDOW_SHARDS = 8
Weights: TypeAlias = npt.NDArray[np.float64]


class Order(Protocol):
    """What is served in any epoch.

    Attributes:
        kind: `none` for the stored order.
        batch_size: samples per batch of one rank.
        last: see `loaders.order.cut.global_sizes`.
    """

    @property
    def kind(self) -> str:
        """See the class."""

    @property
    def batch_size(self) -> int:
        """See the class."""

    @property
    def last(self) -> str:
        """See the class."""

    @property
    def samples(self) -> int:
        """Of an epoch, over all ranks, without what fills up."""

    def batches(self, epoch: int) -> Shares:
        """Each batch of this rank in `epoch`, in the order they are served."""

    def batch_count(self) -> int:
        """Batches of an epoch, the same for every rank."""

    def rank_samples(self) -> int:
        """How many samples this rank serves in an epoch."""

    def identity(self) -> dict[str, Any]:
        """What tells this order from others of the same samples, seed and batches, as plain JSON values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """The batches of any epoch, of a raw tree: each order is listed, which costs tens of bytes a sample.

    So are weighted orders of any data; the weights alone are 8 bytes each. Others have `KeyedOrder`.

    Attributes:
        ids: int64 [n], of the split's samples in stored order.
        shard_samples: samples per shard, in stored order.
        kind: `full`, `window` or `none`.
        seed: with the epoch it gives the order.
        batch_size: samples per batch of one rank.
        last: `partial`, `pad` or `drop`, see `loaders.order.cut.global_sizes`.
        window_shards: shards in a window, for kind `window`.
        rank, world_size: which of how many processes share each epoch.
        weights: float64 [n], how likely each sample is drawn; an epoch then draws as many as there are, with
            replacement, and has them in the order of its kind. None: each comes once.
    """

    ids: Positions
    shard_samples: tuple[int, ...]
    kind: str
    seed: int
    batch_size: int
    last: str
    window_shards: int = WINDOW_SHARDS
    rank: int = 0
    world_size: int = 1
    weights: Weights | None = None

    @property
    def samples(self) -> int:
        """As of `Order`."""
        return len(self.ids)

    def batches(self, epoch: int) -> Shares:
        """Each batch of this rank in `epoch`, in the order they are served."""
        order = self.order(epoch)
        if self.weights is None:
            return cut(order, self.batch_size, self.last, self.rank, self.world_size)
        return cut_repeating(order, self.batch_size, self.last, self.rank, self.world_size)

    def arrangement(self, epoch: int) -> Arrangement:
        """What all ranks serve in `epoch`, without what fills up."""
        return Listed(self.order(epoch))

    def order(self, epoch: int) -> Positions:
        """What all ranks serve in `epoch`, without what fills up."""
        if self.weights is not None:
            drawn = weighted_order(self.ids, self.weights, self.seed, epoch)
            if self.kind == "window":
                return gather_windows(drawn, self.shard_samples, self.seed, epoch, self.window_shards)
            return drawn if self.kind == "full" else np.sort(drawn)
        if self.kind == "full":
            return full_order(self.ids, self.seed, epoch)
        if self.kind == "window":
            return window_order(self.shard_samples, self.seed, epoch, self.window_shards)
        return np.arange(len(self.ids))

    def batch_count(self) -> int:
        """Batches of an epoch, the same for every rank."""
        return batch_count(len(self.ids), self.batch_size, self.last, self.world_size)

    def rank_samples(self) -> int:
        """How many samples this rank serves in an epoch."""
        return Cut(
            samples=len(self.ids),
            batch_size=self.batch_size,
            last=self.last,
            rank=self.rank,
            world_size=self.world_size,
        ).rank_samples()

    def identity(self) -> dict[str, Any]:
        """As of `Order`."""
        windows = {"window_shards": self.window_shards} if self.kind == "window" else {}
        weights = None if self.weights is None else sha256(self.weights.tobytes()).hexdigest()
        return {"shuffle": self.kind, **windows, "weights": weights}


def full_order(ids: Positions, seed: int, epoch: int) -> Positions:
    """A permutation of all samples.

    Each sample draws its key by its id, so that two datasets of the same source serve the samples
    that both hold in the same order, however each stores them.
    """
    largest = int(ids.max(initial=-1))
    keys = np.random.default_rng((seed, epoch, _FULL_TAG)).random(largest + 1)
    return np.argsort(keys[ids], kind="stable")


def window_order(
    shard_samples: Sequence[int], seed: int, epoch: int, window_shards: int = WINDOW_SHARDS
) -> Positions:
    """Shards in random order, samples shuffled within windows of `window_shards` shards.

    Who reads shards sequentially holds no more than `window_shards` of them at a time.
    """
    rng = np.random.default_rng((seed, epoch, _WINDOW_TAG))
    stops = np.cumsum(shard_samples)
    shards = [np.arange(stop - count, stop) for stop, count in zip(stops, shard_samples, strict=True)]
    shuffled = [shards[index] for index in rng.permutation(len(shards))]
    windows = [
        rng.permutation(np.concatenate(shuffled[start : start + window_shards]))
        for start in range(0, len(shuffled), window_shards)
    ]
    return np.concatenate(windows) if windows else np.empty(0, np.int64)


def weighted_order(ids: Positions, weights: Weights, seed: int, epoch: int) -> Positions:
    """As many samples as there are, drawn with replacement; by their ids, as in `full_order`.

    As torch's `WeightedRandomSampler(weights, len(weights))`.
    """
    by_id = np.argsort(ids, kind="stable")
    ends = np.cumsum(weights[by_id])
    draws = np.random.default_rng((seed, epoch, _WEIGHTED_TAG)).random(len(ids)) * ends[-1]
    # never the last bound itself, to which a product may be rounded
    picked = np.searchsorted(ends, np.minimum(draws, np.nextafter(ends[-1], 0)), side="right")
    drawn: Positions = by_id[picked]
    return drawn


def gather_windows(
    drawn: Positions, shard_samples: Sequence[int], seed: int, epoch: int, window_shards: int
) -> Positions:
    """The samples `drawn`, shuffled within windows of shards as those of `window_order` are."""
    rng = np.random.default_rng((seed, epoch, _WINDOW_TAG))
    places = np.argsort(rng.permutation(len(shard_samples)))  # of each shard
    shards = np.searchsorted(np.cumsum(shard_samples), drawn, side="right")
    return drawn[np.lexsort((rng.random(len(drawn)), places[shards] // window_shards))]

"""Which sample comes when. Pure: NumPy only, no state, the same on every machine.

An order is a permutation of positions, a position being a sample's rank in the stored order of its
split. It depends on the seed, the epoch and what is stored, never on workers or timing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loaders.batch import Positions

_FULL_TAG, _WINDOW_TAG = 3, 4
WINDOW_SHARDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """The batches of any epoch.

    Attributes:
        ids: int64 [n], of the split's samples in stored order.
        shard_samples: samples per shard, in stored order.
        kind: `full`, `window` or `none`.
        seed: with the epoch it gives the order.
        batch_size: samples per batch of one rank.
        last: `partial`, `pad` or `drop`, see `cut`.
        window_shards: shards in a window, for kind `window`.
        rank, world_size: which of how many processes share each epoch.
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

    def batches(self, epoch: int) -> list[Positions]:
        """Positions of each batch of this rank in `epoch`, in the order they are served."""
        if self.kind == "full":
            order = full_order(self.ids, self.seed, epoch)
        elif self.kind == "window":
            order = window_order(self.shard_samples, self.seed, epoch, self.window_shards)
        else:
            order = np.arange(len(self.ids))
        return cut(order, self.batch_size, self.last, self.rank, self.world_size)


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


def cut(order: Positions, batch_size: int, last: str, rank: int = 0, world_size: int = 1) -> list[Positions]:
    """One rank's batches of `order`.

    `order` is cut into global batches of `batch_size * world_size`, of which each rank takes its part:
    the same global batches for any world size that gives the same product. The short one at the end
    is shared out evenly (`partial`: some ranks may have one batch less), filled up from the start of
    `order` (`pad`), or left out (`drop`).
    """
    share = slice(rank * batch_size, (rank + 1) * batch_size)
    global_size = batch_size * world_size
    whole = len(order) // global_size * global_size
    batches = [order[start : start + global_size][share] for start in range(0, whole, global_size)]
    rest = order[whole:]
    if last == "pad" and len(rest):
        batches.append(np.resize(np.concatenate((rest, order)), global_size)[share])
    elif last == "partial" and len(part := np.array_split(rest, world_size)[rank]):
        batches.append(part)
    return batches


def batch_count(samples: int, batch_size: int, last: str, rank: int = 0, world_size: int = 1) -> int:
    """How many batches `cut` gives for an order of `samples`."""
    whole, rest = divmod(samples, batch_size * world_size)
    return whole + (last == "pad" and rest > 0) + (last == "partial" and rank < rest)

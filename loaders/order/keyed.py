"""Orders of converted datasets: computed place by place, at the same cost for any number of samples.

The position of a sample alone decides when it comes. All formats of one plan store their samples in the same
order, so that they are served in the same one, too; a raw tree has the orders of `loaders.order`, in which a
sample's id decides.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from loaders.batch import Positions
from loaders.order.arrangements import Arrangement, Listed, Shuffled, Stored, Windows
from loaders.order.cut import Cut, Shares


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyedOrder:
    """The batches of any epoch, see `loaders.order.listed.Order`.

    `window` and `none` are dealt out to the nodes: each reads shards of its own, which its ranks share, and
    but for those at the two ends of its run no other node reads them. `full` takes samples from all shards.

    Attributes:
        shard_starts: int64 [shards + 1], see `loaders.dataset.SplitData`.
        chosen: of a part of a split the positions of its samples in the whole, int64 [n], ascending, and how
            many samples the whole has: `full` serves them in the order that they have there, which it lists.
        nodes: how many machines; those ranks are of one whose numbers follow one another.
        kind, seed, batch_size, last, window_shards, rank, world_size: as of `EpochOrder`.
    """

    shard_starts: Positions
    kind: str
    seed: int
    batch_size: int
    last: str
    window_shards: int
    chosen: tuple[Positions, int] | None = None
    rank: int = 0
    world_size: int = 1
    nodes: int = 1

    @property
    def samples(self) -> int:
        """As of `Order`."""
        return int(self.shard_starts[-1])

    def batches(self, epoch: int) -> Shares:
        """As of `Order`."""
        cut = self._cut()
        arrangement = self.arrangement(epoch, cut.run)
        return Shares(
            cut, lambda places: (arrangement.at(places), None), None if arrangement.anywhere else cut.span
        )

    def arrangement(self, epoch: int, run: tuple[int, int] | None = None) -> Arrangement:
        """What all ranks serve in `epoch`, without what fills up; places of `run` alone are asked for."""
        if self.kind == "none":
            return Stored()
        if self.kind == "window":
            return Windows(self.shard_starts, self.seed, epoch, self.window_shards, run or (0, self.samples))
        if self.chosen is None:
            return Shuffled(self.samples, self.seed, epoch)
        positions, whole = self.chosen
        return Listed(np.argsort(Shuffled(whole, self.seed, epoch).places_of(positions)))

    def batch_count(self) -> int:
        """As of `Order`."""
        return len(self._cut())

    def rank_samples(self) -> int:
        """As of `Order`."""
        return self._cut().rank_samples()

    def identity(self) -> dict[str, Any]:
        """As of `Order`."""
        windows = {"window_shards": self.window_shards} if self.kind == "window" else {}
        nodes = {} if self.kind == "full" else {"nodes": self.nodes}
        return {"shuffle": self.kind, **windows, **nodes, "weights": None}

    def _cut(self) -> Cut:
        return Cut(
            samples=self.samples,
            batch_size=self.batch_size,
            last=self.last,
            rank=self.rank,
            world_size=self.world_size,
            nodes=1 if self.kind == "full" else self.nodes,
        )

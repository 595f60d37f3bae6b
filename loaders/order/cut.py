"""Which part of an epoch's order a rank serves in which batch: arithmetic, one batch at a time.

An epoch's order is never listed here: it is asked, place by place, for what this rank is about to serve.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from loaders.batch import Positions

_BLOCK = 1 << 17  # places of an order that are looked up at a time: a call for each batch would cost more


class Share(NamedTuple):
    """What one rank serves of a global batch.

    Attributes:
        positions: int64 [n], n > 0.
        padding: how many at the end of `positions` are repeats, which fill up.
        occurrences: int64 [n], how often each sample came before in the epoch; None where none comes again.
    """

    positions: Positions
    padding: int = 0
    occurrences: Positions | None = None


LookUp: TypeAlias = Callable[[Positions], tuple[Positions, Positions | None]]
"""The samples at some places of an epoch's order, int64 [n], and their occurrences, see `Share`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One rank's batches of an order: as many for each rank, none of them empty.

    The order is cut into global batches, see `global_sizes`, of which each rank serves its part; parts of the
    same global batch differ by at most one sample. A global batch that is too short for that, and for `pad`
    the last one, is filled up with samples from the start of the order.

    With several nodes the order is first cut into a run for each, behind one another; a node's ranks share
    its run as all ranks share an order, and fill up from its start. A global batch is then put together of
    the nodes' parts, which differ by at most one sample, too.

    Attributes:
        samples: of the order.
        batch_size: of one rank.
        last: `partial`, `pad` or `drop`, see `global_sizes`.
        rank, world_size: which of how many processes; those of a node follow one another.
        nodes: how many machines, with as many ranks each.
        span: places of the order from one batch of this rank to its next.
        run: first place, and the one behind the last, of what this rank's node serves. What `drop` leaves out
            is in the last node's; a node for which no sample is left has all, to fill up.
    """

    samples: int
    batch_size: int
    last: str
    rank: int = 0
    world_size: int = 1
    nodes: int = 1
    span: int = field(init=False)
    run: tuple[int, int] = field(init=False)
    _whole: int = field(init=False)
    _tail: tuple[int, ...] = field(init=False)  # the node's parts of the shorter batches

    def __post_init__(self) -> None:
        ranks = self.world_size // self.nodes
        node, span = self.rank // ranks, self.batch_size * ranks
        whole, tail = global_sizes(self.samples, span * self.nodes, self.last)
        parts = [_part(size, node, self.nodes) for size in tail]
        start = node * whole * span + sum(first for first, _ in parts)
        own = tuple(stop - first for first, stop in parts)
        stop = start + whole * span + sum(own)
        if start == stop:
            start, stop = 0, self.samples
        elif node == self.nodes - 1:
            stop = self.samples
        values = {"span": span, "run": (start, stop), "_whole": whole, "_tail": own}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return self._whole + len(self._tail)

    def places(self, number: int) -> tuple[Positions, int]:
        """Of batch `number`: places of what this rank serves, int64 [n], and how many at the end fill up."""
        ranks = self.world_size // self.nodes
        start, local = self.run[0], self.rank % ranks
        if number < self._whole:
            start += number * self.span + local * self.batch_size
            return np.arange(start, start + self.batch_size), 0
        before, size = self._tail[: number - self._whole], self._tail[number - self._whole]
        least = ranks * (self.batch_size if self.last == "pad" else 1)
        first, stop = _part(max(least, size), local, ranks)
        places = np.arange(first, stop)
        filled = sum(max(0, least - other) for other in before)
        again = start + (filled + places - size) % (self.run[1] - start)
        places += start + self._whole * self.span + sum(before)
        padding = min(stop - first, max(0, stop - size))
        places[len(places) - padding :] = again[len(places) - padding :]
        return places, padding

    def rank_samples(self) -> int:
        """How many samples this rank serves, those that fill up too."""
        shorter = sum(len(self.places(number)[0]) for number in range(self._whole, len(self)))
        return self._whole * self.batch_size + shorter


def _part(size: int, number: int, parts: int) -> tuple[int, int]:
    """First, and behind the last, of part `number` of `size`, of parts that differ by at most one."""
    each, more = divmod(size, parts)
    start = number * each + min(number, more)
    return start, start + each + (number < more)


class Shares:
    """One rank's batches of an epoch, each computed when it is asked for, with some that follow it.

    Any may be asked for first: those before it cost nothing.
    """

    def __init__(self, cut: Cut, look_up: LookUp) -> None:
        self._cut = cut
        self._look_up = look_up
        self._ahead = max(1, _BLOCK // cut.span)
        self._first, self._block = 0, list[Share]()

    def __len__(self) -> int:
        return len(self._cut)

    def __iter__(self) -> Iterator[Share]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Share:
        if not 0 <= number < len(self):
            raise IndexError(number)
        if not self._first <= number < self._first + len(self._block):
            self._first, self._block = number, self._compute(number)
        return self._block[number - self._first]

    def _compute(self, first: int) -> list[Share]:
        numbers = range(first, min(first + self._ahead, len(self)))
        asked = [self._cut.places(number) for number in numbers]
        positions, occurrences = self._look_up(np.concatenate([places for places, _ in asked]))
        shares, start = [], 0
        for places, padding in asked:
            part = slice(start, start := start + len(places))
            shares.append(Share(positions[part], padding, None if occurrences is None else occurrences[part]))
        return shares


def global_sizes(samples: int, global_size: int, last: str) -> tuple[int, list[int]]:
    """How many batches of an epoch have `global_size` over all ranks, and the sizes of those behind them.

    Without the samples that fill up. What is left (`rest`) depends on these two numbers alone, so that the
    same global batches come for any world size of the same global size: `partial` shares the last whole one
    and the rest out over two, of which no rank's part is a sliver; `pad` has the rest in one, to be filled
    up; `drop` leaves it out.
    """
    whole, rest = divmod(samples, global_size)
    if rest and last == "partial" and whole:
        return whole - 1, [(global_size + rest + 1) // 2, (global_size + rest) // 2]
    return whole, [rest] if rest and last != "drop" else []

"""Order of the samples of each epoch, computed place by place at the same cost for any number of samples.

Pure: NumPy only, no state, the same on every machine. An order is a permutation of positions; a position is
a sample's rank in the stored order of its split. It depends on the seed, the epoch and the stored samples,
never on workers or timing. All formats of one plan store their samples in the same order, and so serve them
in the same order.

`EpochOrder` gives the order that all ranks serve in an epoch; `RankBatches` cuts it into the batches of one
rank. A place is computed when a rank is about to serve it. Only short orders (at most 65,536 samples), parts
of a split and drawn samples are held as lists.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from loaders.batch import Positions, Request
from precache.dataset.columns import Ints

_WINDOW_TAG, _WEIGHTED_TAG, _SHARDS_TAG, _SAMPLES_TAG, _KEY_TAG = 4, 5, 6, 7, 8
_MAX_LISTED = 1 << 16  # samples that are shuffled as a list, of 0.5 MB
_BLOCK_PLACES = 1 << 17  # places that are looked up at a time: one call for each batch would cost more
_ROUNDS = 10  # 6 pass the tests for 1,000 samples, where hashes of 5 bits are the least random
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
WINDOW_SHARDS = 8
"""Number of shards in a window, unless memory bounds it."""
_Words: TypeAlias = npt.NDArray[np.uint64]
Weights: TypeAlias = npt.NDArray[np.float64]
LookUp: TypeAlias = Callable[[Ints], Positions]
"""Function from places in an epoch, int64 [n], to the positions of the samples served there, int64 [n]."""


class KeyedPermutation:
    """Permutation of 0 to `count` - 1 that is computed value by value and stored nowhere.

    `key`, integers of at least 0, determines it: the same on every machine and with every version of NumPy.
    Use it for many samples: with few, each hash has few bits, and some permutations come more often.

    It is a Feistel network over the smallest rectangle of `rows` x 2**bits that holds all values: in turns
    one coordinate is moved on by a keyed hash of the other one, which can be undone for any hash. A value
    that falls behind the last one, less than one in a hundred, is sent through again until it does not. Both
    are by J. Black, P. Rogaway, *Ciphers with Arbitrary Finite Domains*, CT-RSA 2002 (generalised Feistel
    cipher, cycle walking). R. Mitchell, D. Stokes, E. Frank, G. Holmes, *Bandwidth-Optimal Random Shuffling
    for GPUs*, ACM Transactions on Parallel Computing 9 (2022), arXiv 2106.06161, measure that such a network
    shuffles like drawing lots; `tests/loaders/test_order.py` measures it for this one. The hash is the middle
    of D. Stafford's *Mix13*, which ends splitmix64, too; its highest bits are used. It is no cipher.
    """

    def __init__(self, count: int, key: tuple[int, ...]) -> None:
        bits = (count - 1).bit_length() // 2
        self._count = np.uint64(count)
        self._bits = np.uint64(bits)
        self._rows = np.uint64(-(-count >> bits))
        keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
        self._rounds = [(number, np.uint64(word)) for number, word in enumerate(keys)]

    def at(self, places: Ints) -> Ints:
        """Return the values at `places` of the permutation: int64 [n] each."""
        return self._walk(places, forward=True)

    def places_of(self, values: Ints) -> Ints:
        """Return the places of `values` in the permutation: int64 [n] each."""
        return self._walk(values, forward=False)

    def _walk(self, values: Ints, *, forward: bool) -> Ints:
        """Send `values` through the network, and those that fall behind the last value through it again."""
        out = self._permute(values.astype(np.uint64), forward)
        behind = np.flatnonzero(out >= self._count)
        while len(behind):
            permuted = self._permute(out[behind], forward)
            out[behind] = permuted
            behind = behind[permuted >= self._count]
        return out.view(np.int64)

    def _permute(self, values: _Words, forward: bool) -> _Words:
        """Send `values`, from 0 to rows * 2**bits - 1, through the network once."""
        row: _Words = values >> self._bits
        column = values & ((np.uint64(1) << self._bits) - np.uint64(1))
        for number, key in self._rounds if forward else self._rounds[::-1]:
            moves_row = number % 2 == 0
            hashed = (column if moves_row else row) ^ key
            hashed *= _FACTORS[0]
            hashed ^= hashed >> _HALF
            hashed *= _FACTORS[1]
            hashed >>= _HALF
            if moves_row:  # by the hash's 32 bits as a share of all rows, modulo the number of rows
                hashed *= self._rows
                hashed >>= _HALF
                row = row + hashed if forward else row - hashed
                # the smaller one is the one that has not wrapped around 2**64
                np.minimum(row, row - self._rows if forward else row + self._rows, out=row)
            else:
                hashed >>= _HALF - self._bits
                column ^= hashed
        row <<= self._bits
        row |= column
        return row


def window_order(
    shard_starts: Positions, seed: int, epoch: int, window_shards: int, run: tuple[int, int]
) -> LookUp:
    """Return the order with shards shuffled, and samples shuffled within windows of consecutive shards.

    One window at a time is held as a list: its reader holds the window's shards, too.

    Args:
        shard_starts: see `loaders.dataset.SplitData`.
        window_shards: largest number of shards in a window.
        run: first place that may be looked up, and the one behind the last; windows begin and end with it.
    """
    counts = np.diff(shard_starts)
    filled = np.flatnonzero(counts)
    shards = filled[np.random.default_rng((seed, epoch, _SHARDS_TAG)).permutation(len(filled))]
    stops = np.cumsum(counts[shards])  # place behind the last sample of each of `shards`
    first, last = np.searchsorted(stops, (run[0], run[1] - 1), side="right").tolist()
    firsts = np.arange(first, last + 1, window_shards)  # first shard of each window, as a row of `shards`
    starts = np.maximum((stops - counts[shards])[firsts], run[0])

    @lru_cache(maxsize=1)
    def shuffle_window(window: int) -> Positions:
        first = int(firsts[window])
        samples = []
        for number in range(first, min(first + window_shards, len(shards))):
            stored = np.arange(shard_starts[shards[number]], shard_starts[shards[number] + 1])
            start = stops[number] - len(stored)
            samples.append(stored[max(run[0] - start, 0) : max(run[1] - start, 0)])
        # two nodes may share a shard at the ends of their runs: run[0] tells their windows apart
        return np.random.default_rng((seed, epoch, _SAMPLES_TAG, first, run[0])).permutation(
            np.concatenate(samples)
        )

    def look_up(places: Ints) -> Positions:
        windows = np.searchsorted(starts, places, side="right") - 1
        cuts = np.flatnonzero(np.diff(windows)) + 1
        positions = []
        for window, part in zip(np.split(windows, cuts), np.split(places, cuts), strict=True):
            positions.append(shuffle_window(int(window[0]))[part - starts[window[0]]])
        return np.concatenate(positions)

    return look_up


def full_order(count: int, key: tuple[int, ...], chosen: Positions | None = None) -> LookUp:
    """Return a permutation of `count` samples, each place of which costs the same.

    Args:
        chosen: int64 [n], ascending: permute these samples alone, in the order that they have in the
            permutation of all; held as a list.
    """
    if count > _MAX_LISTED:
        permutation = KeyedPermutation(count, key)
        if chosen is None:
            return permutation.at
        positions = np.argsort(permutation.places_of(chosen))
    else:
        positions = np.random.default_rng(key).permutation(count)
        if chosen is not None:
            positions = np.argsort(np.argsort(positions)[chosen])
    return lambda places: positions[places]


def draw_samples(weights: Weights, seed: int, epoch: int) -> Positions:
    """Draw as many samples as there are weights, with replacement.

    The distribution is that of torch's `WeightedRandomSampler(weights, len(weights))`.
    """
    stops = np.cumsum(weights)
    draws = np.random.default_rng((seed, epoch, _WEIGHTED_TAG)).random(len(weights)) * stops[-1]
    # the product may be rounded up to the last bound, which would be behind the last sample
    samples: Positions = np.searchsorted(stops, np.minimum(draws, np.nextafter(stops[-1], 0)), side="right")
    return samples


def shuffle_in_windows(
    samples: Positions, shard_starts: Positions, seed: int, epoch: int, window_shards: int
) -> Positions:
    """Return `samples`, drawn ones, with shards shuffled, and shuffled within windows of shards."""
    rng = np.random.default_rng((seed, epoch, _WINDOW_TAG))
    shard_places = np.argsort(rng.permutation(len(shard_starts) - 1))
    shards = np.searchsorted(shard_starts[1:], samples, side="right")
    return samples[np.lexsort((rng.random(len(samples)), shard_places[shards] // window_shards))]


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """Order in which all ranks together serve a split, for any epoch.

    Attributes:
        shard_starts: int64 [shards + 1], see `loaders.dataset.SplitData`.
        kind: `full`, `window` or `none`, which is the stored order.
        seed: seed of the order, together with the epoch.
        window_shards: number of shards in a window, for kind `window`.
        chosen: for a part of a split, the positions of its samples in the whole split, int64 [n], ascending,
            and the number of samples of the whole; `full` serves the part in the order of the whole.
        weights: float64 [n], relative probability of each sample; an epoch then draws as many samples as
            there are, with replacement, and serves them in the order of its kind. None: each comes once.
    """

    shard_starts: Positions
    kind: str
    seed: int
    window_shards: int = WINDOW_SHARDS
    chosen: tuple[Positions, int] | None = None
    weights: Weights | None = None

    @property
    def samples(self) -> int:
        """Number of samples in an epoch, without those that fill up the last batch."""
        return int(self.shard_starts[-1])

    def draw(self, epoch: int, run: tuple[int, int] | None = None) -> LookUp:
        """Draw the order of `epoch`.

        Args:
            run: first place that may be looked up, and the one behind the last; default: all.
        """
        if self.weights is not None:
            samples = draw_samples(self.weights, self.seed, epoch)
            if self.kind == "window":
                samples = shuffle_in_windows(samples, self.shard_starts, self.seed, epoch, self.window_shards)
            elif self.kind == "none":
                samples.sort()
            return lambda places: samples[places]
        if self.kind == "none":
            return lambda places: places
        if self.kind == "window":
            run = run or (0, self.samples)
            return window_order(self.shard_starts, self.seed, epoch, self.window_shards, run)
        positions, count = self.chosen or (None, self.samples)
        return full_order(count, (self.seed, epoch, _KEY_TAG), positions)

    def identity(self) -> dict[str, Any]:
        """Return JSON values that differ for any other order of the same samples with the same seed."""
        windows = {"window_shards": self.window_shards} if self.kind == "window" else {}
        weights = None if self.weights is None else sha256(self.weights.tobytes()).hexdigest()
        return {"shuffle": self.kind, **windows, "weights": weights}


class RankBatches:
    """Batches of one rank, for any epoch: as many for each rank, none of them empty.

    The order of all ranks is cut into global batches, see `global_batch_sizes`, and each rank serves its part
    of each; parts of one global batch differ by at most one sample. A global batch that is too short for
    that, and for `pad` the last one, is filled up with samples from the start of the epoch.

    With several nodes the epoch is first cut into one run for each node. A node's ranks share its run as all
    ranks share an epoch, and fill up from its start. A global batch then consists of the nodes' parts, which
    differ by at most one sample, too. With `window` and `none` each node then reads shards of its own, except
    for those at the two ends of its run; `full` reads samples of all shards.

    Args:
        order: order of all ranks.
        batch_size: samples in a batch of one rank.
        last: `partial`, `pad` or `drop`, see `global_batch_sizes`.
        rank: number of this process; those of one node follow one another.
        world_size: number of processes.
        nodes: number of machines, with as many ranks each.
    """

    def __init__(
        self,
        order: EpochOrder,
        batch_size: int,
        last: str,
        rank: int = 0,
        world_size: int = 1,
        nodes: int = 1,
    ) -> None:
        self.order, self._batch_size, self._nodes = order, batch_size, nodes
        self._repeats = order.weights is not None
        self._ranks = world_size // nodes
        node, self._local = divmod(rank, self._ranks)
        self._min_samples = self._ranks * (batch_size if last == "pad" else 1)  # in a batch of the node
        self._span = batch_size * self._ranks  # places from one batch of this rank to its next
        self._whole, tail = global_batch_sizes(order.samples, self._span * nodes, last)
        parts = [_part_range(size, node, nodes) for size in tail]
        start = node * self._whole * self._span + sum(first for first, _ in parts)
        self._tail = [stop - first for first, stop in parts]  # the node's parts of the shorter batches
        stop = start + self._whole * self._span + sum(self._tail)
        if start == stop:  # no sample is left for this node: it fills up from the whole epoch
            start, stop = 0, order.samples
        elif node == nodes - 1:  # the last node's run has the samples that `drop` leaves out, too
            stop = order.samples
        self._run = start, stop

    def __len__(self) -> int:
        return self._whole + len(self._tail)

    def _batch_places(self, number: int) -> tuple[Ints, int]:
        """Return the places of batch `number`, int64 [n], and how many at the end fill it up."""
        start, stop = self._run
        if number < self._whole:
            start += number * self._span + self._local * self._batch_size
            return np.arange(start, start + self._batch_size), 0
        previous, size = self._tail[: number - self._whole], self._tail[number - self._whole]
        places = np.arange(*_part_range(max(self._min_samples, size), self._local, self._ranks))
        filled = sum(max(0, self._min_samples - other) for other in previous)
        repeats = start + (filled + places - size) % (stop - start)
        is_repeat = places >= size
        places += start + self._whole * self._span + sum(previous)
        return np.where(is_repeat, repeats, places), int(is_repeat.sum())

    def rank_samples(self) -> int:
        """Return how many samples this rank serves in an epoch, those that fill up included."""
        shorter = sum(len(self._batch_places(number)[0]) for number in range(self._whole, len(self)))
        return self._whole * self._batch_size + shorter

    def requests(self, epoch: int, start: int = 0) -> Iterator[Request]:
        """Yield the requests of `epoch` from batch `start` on; the batches before it cost nothing."""
        look_up = self.order.draw(epoch, self._run)
        block_batches = max(1, _BLOCK_PLACES // self._span)
        for first in range(start, len(self), block_batches):
            numbers = range(first, min(first + block_batches, len(self)))
            batches = [self._batch_places(number) for number in numbers]
            positions = look_up(np.concatenate([places for places, _ in batches]))
            offset = 0
            for places, padding in batches:
                batch_positions = positions[offset : offset + len(places)]
                offset += len(places)
                yield Request(epoch, batch_positions, padding, places if self._repeats else None)

    def identity(self) -> dict[str, Any]:
        """Return JSON values that differ for any other order of the same samples, seed and batches."""
        return {**self.order.identity(), "nodes": self._nodes}


def _part_range(size: int, number: int, parts: int) -> tuple[int, int]:
    """Return start and stop of part `number` of `size`, cut into `parts` that differ by at most one."""
    quotient, remainder = divmod(size, parts)
    start = number * quotient + min(number, remainder)
    stop = (number + 1) * quotient + min(number + 1, remainder)
    return start, stop


def global_batch_sizes(samples: int, global_size: int, last: str) -> tuple[int, list[int]]:
    """Return how many batches of an epoch have `global_size` over all ranks, and the sizes of shorter ones.

    Samples that fill up do not count. The rest depends on these two numbers alone, so that the same global
    batches come for any world size with the same global size: `partial` divides the last whole batch and the
    rest into two, in which each rank has its share; `pad` keeps the rest as one, to be filled up; `drop`
    leaves it out.
    """
    whole, rest = divmod(samples, global_size)
    if rest and last == "partial" and whole:
        return whole - 1, [(global_size + rest + 1) // 2, (global_size + rest) // 2]
    return whole, [rest] if rest and last != "drop" else []

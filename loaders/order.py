"""Which sample comes when, computed place by place at the same cost for any number of samples and ranks.

Pure: NumPy only, no state, the same on every machine. An order is a permutation of positions, a position
being a sample's rank in the stored order of its split. It depends on the seed, the epoch and what is stored,
never on workers or timing. All formats of one plan store their samples alike, and so serve them in the same
order.

`Epochs`, or `MixedEpochs`, is what all ranks serve in an epoch; `Order` which part of it this one does, batch
by batch. Each place is computed when it is asked for, by a rank that is about to serve it; listed are what
costs little, at most 65,536 samples, and what cannot be had otherwise: parts of a split and drawn samples.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from loaders.batch import Positions, Request

_WINDOW_TAG, _WEIGHTED_TAG, _SHARDS_TAG, _SAMPLES_TAG, _KEY_TAG = 4, 5, 6, 7, 8
_FEW = 1 << 16  # samples that are shuffled as a list, of 0.5 MB
_BLOCK = 1 << 17  # places of an order that are looked up at a time: a call for each batch would cost more
_GAP = 1 << 17  # places between two of a mixture that are not looked up together
_ROUNDS = 10  # 6 pass the tests of 1,000 samples, where hashes of 5 bits are the least random
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
WINDOW_SHARDS = 8
"""In a window, unless memory bounds it."""
_Words: TypeAlias = npt.NDArray[np.uint64]
Weights: TypeAlias = npt.NDArray[np.float64]
LookUp: TypeAlias = Callable[[Positions], Positions]
"""What tells the samples at some places of an epoch, int64 [n] each."""


class KeyedPermutation:
    """A permutation of 0 to `count` - 1 that is computed where it is asked for, and kept nowhere.

    `key` gives it, any integers from 0 on: the same on every machine and with every version of NumPy. To be
    used for many samples: of a few, of which each hash has few bits, not all permutations come as often.

    A Feistel network over the least rectangle of `rows` x 2**bits that holds them all: in turns one
    coordinate is moved on by a keyed hash of the other one, which can be undone, whatever the hash. What
    falls behind the last sample, less than one in a hundred, is sent through again until it does not. Both
    are by J. Black, P. Rogaway, *Ciphers with Arbitrary Finite Domains*, CT-RSA 2002 (generalised Feistel
    cipher, cycle walking). That such a network shuffles as drawing lots does is measured in R. Mitchell,
    D. Stokes, E. Frank, G. Holmes, *Bandwidth-Optimal Random Shuffling for GPUs*, ACM Transactions on
    Parallel Computing 9 (2022), arXiv 2106.06161, and of this one by `tests/loaders/test_order.py`. The hash
    is the middle of D. Stafford's *Mix13*, which ends splitmix64, too; its highest bits are taken. It
    shuffles; it is no cipher.
    """

    def __init__(self, count: int, key: tuple[int, ...]) -> None:
        bits = (count - 1).bit_length() // 2
        self._count = np.uint64(count)
        self._bits = np.uint64(bits)
        self._rows = np.uint64(-(-count >> bits))
        keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
        self._rounds = [(number, np.uint64(one)) for number, one in enumerate(keys)]

    def at(self, places: Positions) -> Positions:
        """What comes at `places`: int64 [n] each."""
        return self._walk(places, forward=True)

    def places_of(self, positions: Positions) -> Positions:
        """Where `positions` come: int64 [n] each."""
        return self._walk(positions, forward=False)

    def _walk(self, values: Positions, *, forward: bool) -> Positions:
        out = self._permute(values.astype(np.uint64), forward)
        behind = np.flatnonzero(out >= self._count)
        while len(behind):
            again = out[behind] = self._permute(out[behind], forward)
            behind = behind[again >= self._count]
        return out.view(np.int64)

    def _permute(self, values: _Words, forward: bool) -> _Words:
        """Of 0 to rows * 2**bits - 1, through the network once."""
        row: _Words = values >> self._bits
        column = values & ((np.uint64(1) << self._bits) - np.uint64(1))
        for number, key in self._rounds if forward else self._rounds[::-1]:
            of_row = number % 2 == 0  # is moved on
            hashed = (column if of_row else row) ^ key
            hashed *= _FACTORS[0]
            hashed ^= hashed >> _HALF
            hashed *= _FACTORS[1]
            hashed >>= _HALF
            if of_row:  # by 32 bits as a share of all rows; in a circle
                hashed *= self._rows
                hashed >>= _HALF
                row = row + hashed if forward else row - hashed
                # the lesser is the one that has not gone round 2**64
                np.minimum(row, row - self._rows if forward else row + self._rows, out=row)
            else:
                hashed >>= _HALF - self._bits
                column ^= hashed
        row <<= self._bits
        row |= column
        return row


def windows(
    shard_starts: Positions, seed: int, epoch: int, window_shards: int, run: tuple[int, int]
) -> LookUp:
    """Shards in random order, samples shuffled within windows of shards: one window is kept at a time.

    A window is a list, for whoever reads it holds its shards, too.

    Args:
        shard_starts: as of `loaders.dataset.SplitData`.
        window_shards: in a window, at most.
        run: first place, and the one behind the last, that may be asked for: windows begin and end with it.
    """
    counts = np.diff(shard_starts)
    filled = np.flatnonzero(counts)
    shards = filled[np.random.default_rng((seed, epoch, _SHARDS_TAG)).permutation(len(filled))]
    stops = np.cumsum(counts[shards])  # place behind each shard, in their order
    first, last = np.searchsorted(stops, (run[0], run[1] - 1), side="right").tolist()
    firsts = np.arange(first, last + 1, window_shards)  # shard of each window, in their order
    starts = np.maximum((stops - counts[shards])[firsts], run[0])

    @lru_cache(maxsize=1)
    def shuffled(window: int) -> Positions:
        first = int(firsts[window])
        samples = []
        for number in range(first, min(first + window_shards, len(shards))):
            stored = np.arange(shard_starts[shards[number]], shard_starts[shards[number] + 1])
            before = stops[number] - len(stored)
            samples.append(stored[max(run[0] - before, 0) : max(run[1] - before, 0)])
        # a node's first shard may be the last one of another: its number tells their windows apart
        return np.random.default_rng((seed, epoch, _SAMPLES_TAG, first, run[0])).permutation(
            np.concatenate(samples)
        )

    def at(places: Positions) -> Positions:
        of_window = np.searchsorted(starts, places, side="right") - 1
        cuts = np.flatnonzero(np.diff(of_window)) + 1
        parts = zip(np.split(of_window, cuts), np.split(places, cuts), strict=True)
        return np.concatenate([shuffled(int(window[0]))[part - starts[window[0]]] for window, part in parts])

    return at


def shuffled(count: int, key: tuple[int, ...], chosen: Positions | None = None) -> LookUp:
    """A permutation of `count` samples, each place of which costs the same.

    Args:
        chosen: int64 [n], ascending: these alone, in the order that they have among all; it is listed.
    """
    if count > _FEW:
        keyed = KeyedPermutation(count, key)
        if chosen is None:
            return keyed.at
        listed = np.argsort(keyed.places_of(chosen))
    else:
        listed = np.random.default_rng(key).permutation(count)
        if chosen is not None:
            listed = np.argsort(np.argsort(listed)[chosen])
    return lambda places: listed[places]


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

    def look_up(self, epoch: int, run: tuple[int, int] | None = None) -> LookUp:
        """What tells the samples at places of `run`, from the first to behind the last; default: all."""
        windows_of = self.shard_starts, self.seed, epoch, self.window_shards
        if self.weights is not None:
            listed = draw(self.weights, self.seed, epoch)
            if self.kind == "window":
                listed = gather_windows(listed, *windows_of)
            elif self.kind == "none":
                listed.sort()
            return lambda places: listed[places]
        if self.kind == "none":
            return lambda places: places
        if self.kind == "window":
            return windows(*windows_of, run or (0, self.samples))
        positions, count = self.chosen or (None, self.samples)
        return shuffled(count, (self.seed, epoch, _KEY_TAG), positions)

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
    def samples(self) -> int:
        """As of `Epochs`."""
        return sum(self.counts)

    def look_up(self, epoch: int, _: object = None) -> LookUp:
        """As of `Epochs`; any place may be asked for."""
        starts = np.cumsum([0, *(part.samples for part in self.parts)]).tolist()
        streams = [
            _stream(part, start, epoch * count)
            for part, start, count in zip(self.parts, starts, self.counts, strict=False)
        ]

        def near(places: Positions) -> Positions:
            first, last = int(places.min()), int(places.max())
            parts, numbers = (of_all[places - first] for of_all in merge(self.counts, first, last + 1))
            positions = np.empty_like(places)
            for part, stream in enumerate(streams):
                of_part = np.flatnonzero(parts == part)
                positions[of_part] = stream(numbers[of_part])
            return positions

        def look_up(places: Positions) -> Positions:
            apart = np.flatnonzero(abs(np.diff(places)) > _GAP) + 1
            return np.concatenate([near(part) for part in np.split(places, apart)])

        return look_up

    def identity(self) -> dict[str, Any]:
        """As of `Epochs`."""
        return {"shuffle": [part.identity() for part in self.parts], "samples": list(self.counts)}


def _stream(part: Epochs, start: int, begin: int) -> LookUp:
    """The samples of the epochs of a part, one behind the other, by their numbers from `begin` on.

    Args:
        start: what positions of the part begin with.
    """
    look_up = lru_cache(maxsize=1)(part.look_up)

    def at(numbers: Positions) -> Positions:
        epochs, places = np.divmod(begin + numbers, part.samples)
        positions = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            rows = np.flatnonzero(epochs == epoch)
            positions[rows] = look_up(epoch)(places[rows])
        return start + positions

    return at


def merge(counts: Sequence[int], start: int, stop: int) -> tuple[Positions, Positions]:
    """Of places `start` to `stop` of an epoch: int64 [n] the part that each is of, its number in that.

    The j-th of m comes at (j + 1/2) / m of the epoch: of two datasets, what came so far has its shares to
    within half a sample, and any batch to within one.
    """
    total, margin = sum(counts), len(counts) + 1  # a time gives the place to within one for each part
    firsts = [max(0, count * (start - margin) // total) for count in counts]
    stops = [min(count, count * (stop + margin) // total + 1) for count in counts]
    spans = list(zip(firsts, stops, strict=True))
    numbers = np.concatenate([np.arange(*span) for span in spans])
    parts = np.repeat(np.arange(len(counts)), np.subtract(stops, firsts))
    order = np.argsort((numbers + 0.5) / np.array(counts)[parts], kind="stable")
    order = order[start - sum(firsts) :][: stop - start]
    return parts[order], numbers[order]


class Order:
    """One rank's batches of any epoch: as many for each rank, none of them empty.

    What all ranks serve is cut into global batches, see `global_sizes`, of which each rank serves its part;
    parts of the same global batch differ by at most one sample. A global batch that is too short for that,
    and for `pad` the last one, is filled up with samples from the start of the epoch.

    With several nodes the epoch is first cut into a run for each, behind one another; a node's ranks share
    its run as all ranks share an epoch, and fill up from its start. A global batch is then put together of
    the nodes' parts, which differ by at most one sample, too. Of `window` and `none` each node then reads
    shards of its own, but for those at the two ends of its run; `full` takes samples from all.

    Args:
        epochs: what all ranks serve.
        batch_size: of one rank.
        last: `partial`, `pad` or `drop`, see `global_sizes`.
        rank, world_size: which of how many processes; those of a node follow one another.
        nodes: how many machines, with as many ranks each.
    """

    def __init__(
        self,
        epochs: Epochs | MixedEpochs,
        batch_size: int,
        last: str,
        rank: int = 0,
        world_size: int = 1,
        nodes: int = 1,
    ) -> None:
        self.epochs, self._batch_size, self._nodes = epochs, batch_size, nodes
        self._repeats = isinstance(epochs, MixedEpochs) or epochs.weights is not None
        self._ranks = world_size // nodes
        node, self._local = divmod(rank, self._ranks)
        self._least = self._ranks * (batch_size if last == "pad" else 1)  # samples of a node's batch
        self._span = batch_size * self._ranks  # places from one batch of this rank to its next
        self._whole, tail = global_sizes(epochs.samples, self._span * nodes, last)
        parts = [_part(size, node, nodes) for size in tail]
        start = node * self._whole * self._span + sum(first for first, _ in parts)
        self._tail = [stop - first for first, stop in parts]  # the node's parts of the shorter batches
        stop = start + self._whole * self._span + sum(self._tail)
        if start == stop:  # for which no sample is left: it has all, to fill up
            start, stop = 0, epochs.samples
        elif node == nodes - 1:  # has what `drop` leaves out, too
            stop = epochs.samples
        self._run = start, stop  # of the node

    def __len__(self) -> int:
        return self._whole + len(self._tail)

    def _places(self, number: int) -> tuple[Positions, int]:
        """Of batch `number`: places of what this rank serves, int64 [n], and how many at the end fill up."""
        start, stop = self._run
        if number < self._whole:
            start += number * self._span + self._local * self._batch_size
            return np.arange(start, start + self._batch_size), 0
        before, size = self._tail[: number - self._whole], self._tail[number - self._whole]
        places = np.arange(*_part(max(self._least, size), self._local, self._ranks))
        filled = sum(max(0, self._least - other) for other in before)
        again = start + (filled + places - size) % (stop - start)
        behind = places >= size
        places += start + self._whole * self._span + sum(before)
        return np.where(behind, again, places), int(behind.sum())

    def rank_samples(self) -> int:
        """How many samples this rank serves, those that fill up too."""
        shorter = sum(len(self._places(number)[0]) for number in range(self._whole, len(self)))
        return self._whole * self._batch_size + shorter

    def batches(self, epoch: int, start: int = 0) -> Iterator[Request]:
        """What to ask for in `epoch`, from batch `start` on; those before it cost nothing."""
        look_up = self.epochs.look_up(epoch, self._run)
        most = max(1, _BLOCK // self._span)
        for first in range(start, len(self), most):
            asked = [self._places(number) for number in range(first, min(first + most, len(self)))]
            positions, at = look_up(np.concatenate([places for places, _ in asked])), 0
            for places, padding in asked:
                part = positions[at : (at := at + len(places))]
                yield Request(epoch, part, padding, places if self._repeats else None)

    def identity(self) -> dict[str, Any]:
        """What tells this order from others of the same samples, seed and batches, as plain JSON values."""
        return {**self.epochs.identity(), "nodes": self._nodes}


def _part(size: int, number: int, parts: int) -> tuple[int, int]:
    """First, and behind the last, of part `number` of `size`, of parts that differ by at most one."""
    each, more = divmod(size, parts)
    start = number * each + min(number, more)
    return start, start + each + (number < more)


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

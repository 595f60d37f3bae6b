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
from dataclasses import dataclass, field
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
_CHUNK = 1 << 14  # a few arrays of it fit into a core's cache
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
WINDOW_SHARDS = 8
"""In a window, unless memory bounds it."""
_Words: TypeAlias = npt.NDArray[np.uint64]
Weights: TypeAlias = npt.NDArray[np.float64]
LookUp: TypeAlias = Callable[[Positions], Positions]
"""The samples at some places of an epoch's order, int64 [n] each."""


class Stored:
    """The stored order."""

    def at(self, places: Positions) -> Positions:
        """The samples at `places`: int64 [n] each."""
        return places


class Listed:
    """A permutation that is listed: int64 [n]."""

    def __init__(self, order: Positions) -> None:
        self._order = order

    def at(self, places: Positions) -> Positions:
        """As of `Stored`."""
        return self._order[places]

    def places_of(self, positions: Positions) -> Positions:
        """Where the samples at `positions` come: int64 [n] each."""
        return np.argsort(self._order)[positions]


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
        out = np.empty(len(values), np.int64)
        for start in range(0, len(values), _CHUNK):
            part = self._permute(values[start : start + _CHUNK].astype(np.uint64), forward)
            behind = np.flatnonzero(part >= self._count)
            while len(behind):
                again = part[behind] = self._permute(part[behind], forward)
                behind = behind[again >= self._count]
            out[start : start + _CHUNK] = part.view(np.int64)
        return out

    def _permute(self, values: _Words, forward: bool) -> _Words:
        """Of 0 to rows * 2**bits - 1, through the network once."""
        row: _Words = values >> self._bits
        column = values & ((np.uint64(1) << self._bits) - np.uint64(1))
        hashed, other = np.empty_like(values), np.empty_like(values)
        for number, key in self._rounds if forward else self._rounds[::-1]:
            of_row = number % 2 == 0  # is moved on
            np.bitwise_xor(column if of_row else row, key, out=hashed)
            np.multiply(hashed, _FACTORS[0], out=hashed)
            np.right_shift(hashed, _HALF, out=other)
            np.bitwise_xor(hashed, other, out=hashed)
            np.multiply(hashed, _FACTORS[1], out=hashed)
            np.right_shift(hashed, _HALF, out=hashed)
            if of_row:
                self._move(row, hashed, other, forward)
            else:
                np.right_shift(hashed, _HALF - self._bits, out=hashed)
                np.bitwise_xor(column, hashed, out=column)
        np.left_shift(row, self._bits, out=row)
        np.bitwise_or(row, column, out=row)
        return row

    def _move(self, row: _Words, hashed: _Words, other: _Words, forward: bool) -> None:
        """Add `hashed`, of 32 bits, as a share of all rows, or take it off again; in a circle.

        The lesser of two is the one that has not gone round 2**64.
        """
        np.multiply(hashed, self._rows, out=hashed)
        np.right_shift(hashed, _HALF, out=hashed)
        if forward:
            np.add(row, hashed, out=row)
            np.subtract(row, self._rows, out=other)
        else:
            np.subtract(row, hashed, out=row)
            np.add(row, self._rows, out=other)
        np.minimum(row, other, out=row)


def shuffled(count: int, seed: int, epoch: int, chosen: Positions | None = None) -> Listed | KeyedPermutation:
    """A permutation of `count` samples, each place of which costs the same.

    Args:
        chosen: int64 [n], ascending: these alone, in the order that they have among all; it is listed.
    """
    key = (seed, epoch, _KEY_TAG)
    drawn: Listed | KeyedPermutation = (
        Listed(np.random.default_rng(key).permutation(count))
        if count <= _FEW
        else KeyedPermutation(count, key)
    )
    return drawn if chosen is None else Listed(np.argsort(drawn.places_of(chosen)))


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
        """As of `Stored`."""
        out = np.empty_like(places)
        windows = np.searchsorted(self._starts, places, side="right") - 1
        ends = np.flatnonzero(np.diff(windows, append=-1)) + 1
        for start, stop in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            window = int(windows[start])
            out[start:stop] = self._shuffled(window)[places[start:stop] - self._starts[window]]
        return out

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


Arrangement: TypeAlias = Stored | Listed | KeyedPermutation | Windows
"""The order of one epoch in which each sample comes once."""


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

    @property
    def repeats(self) -> bool:
        """Whether a sample may come again in one epoch."""
        return self.weights is not None

    def arrangement(self, epoch: int, run: tuple[int, int] | None = None) -> Arrangement:
        """Without weights; only places of `run`, from the first to behind the last, are asked for."""
        if self.kind == "none":
            return Stored()
        if self.kind == "window":
            return Windows(self.shard_starts, self.seed, epoch, self.window_shards, run or (0, self.samples))
        positions, whole = self.chosen or (None, self.samples)
        return shuffled(whole, self.seed, epoch, positions)

    def look_up(self, epoch: int, run: tuple[int, int]) -> LookUp:
        """What tells the samples at places of `run`."""
        if self.weights is None:
            return self.arrangement(epoch, run).at
        drawn = draw(self.weights, self.seed, epoch)
        if self.kind == "window":
            drawn = gather_windows(drawn, self.shard_starts, self.seed, epoch, self.window_shards)
        elif self.kind == "none":
            drawn = np.sort(drawn)
        return Listed(drawn).at

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

    repeats = True
    """As of `Epochs`."""

    def look_up(self, epoch: int, run: tuple[int, int]) -> LookUp:
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
    arrangement = lru_cache(maxsize=1)(part.arrangement)

    def at(numbers: Positions) -> Positions:
        epochs, places = np.divmod(begin + numbers, part.samples)
        positions = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            rows = np.flatnonzero(epochs == epoch)
            positions[rows] = arrangement(epoch).at(places[rows])
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """One rank's batches of any epoch: as many for each rank, none of them empty.

    What all ranks serve is cut into global batches, see `global_sizes`, of which each rank serves its part;
    parts of the same global batch differ by at most one sample. A global batch that is too short for that,
    and for `pad` the last one, is filled up with samples from the start of the epoch.

    With several nodes the epoch is first cut into a run for each, behind one another; a node's ranks share
    its run as all ranks share an epoch, and fill up from its start. A global batch is then put together of
    the nodes' parts, which differ by at most one sample, too. Of `window` and `none` each node then reads
    shards of its own, but for those at the two ends of its run; `full` takes samples from all.

    Attributes:
        epochs: what all ranks serve.
        batch_size: of one rank.
        last: `partial`, `pad` or `drop`, see `global_sizes`.
        rank, world_size: which of how many processes; those of a node follow one another.
        nodes: how many machines, with as many ranks each.
        span: places of an epoch from one batch of this rank to its next.
        run: first place, and the one behind the last, of what this rank's node serves. What `drop` leaves out
            is in the last node's; a node for which no sample is left has all, to fill up.
    """

    epochs: Epochs | MixedEpochs
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
        whole, tail = global_sizes(self.epochs.samples, span * self.nodes, self.last)
        parts = [_part(size, node, self.nodes) for size in tail]
        start = node * whole * span + sum(first for first, _ in parts)
        own = tuple(stop - first for first, stop in parts)
        stop = start + whole * span + sum(own)
        if start == stop:
            start, stop = 0, self.epochs.samples
        elif node == self.nodes - 1:
            stop = self.epochs.samples
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

    def batches(self, epoch: int) -> "Batches":
        """What to ask for, batch by batch, in `epoch`."""
        return Batches(self, epoch)

    def identity(self) -> dict[str, Any]:
        """What tells this order from others of the same samples, seed and batches, as plain JSON values."""
        return {**self.epochs.identity(), "nodes": self.nodes}


def _part(size: int, number: int, parts: int) -> tuple[int, int]:
    """First, and behind the last, of part `number` of `size`, of parts that differ by at most one."""
    each, more = divmod(size, parts)
    start = number * each + min(number, more)
    return start, start + each + (number < more)


class Batches:
    """One rank's batches of an epoch, each computed when it is asked for, with some that follow it.

    Any may be asked for first: those before it cost nothing.
    """

    def __init__(self, order: Order, epoch: int) -> None:
        self._order, self._epoch = order, epoch
        self._look_up = order.epochs.look_up(epoch, order.run)
        self._first, self._block = 0, list[Request]()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Request:
        if not 0 <= number < len(self):
            raise IndexError(number)
        if not self._first <= number < self._first + len(self._block):
            self._first, self._block = number, self._compute(number)
        return self._block[number - self._first]

    def _compute(self, first: int) -> list[Request]:
        numbers = range(first, min(first + max(1, _BLOCK // self._order.span), len(self)))
        asked = [self._order.places(number) for number in numbers]
        positions = self._look_up(np.concatenate([places for places, _ in asked]))
        requests, start = [], 0
        for places, padding in asked:
            part = slice(start, start := start + len(places))
            again = places if self._order.epochs.repeats else None
            requests.append(Request(self._epoch, positions[part], padding, again))
        return requests


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

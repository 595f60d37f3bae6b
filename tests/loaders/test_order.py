"""An epoch's order is computed place by place and divided among ranks; each node reads its own shards."""

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loaders.batch import Request
from loaders.order import EpochOrder, KeyedPermutation, RankBatches

SHARDS = (100,) * 7 + (0,) + (75,) * 4
KINDS = ("full", "window", "none")
COUNT, KEYS = 1000, 2000


def make_order(kind: str, shard_samples: tuple[int, ...] | np.ndarray = SHARDS, **other: Any) -> EpochOrder:
    starts = np.concatenate(([0], np.cumsum(shard_samples, dtype=np.int64)))
    return EpochOrder(shard_starts=starts, kind=kind, **{"seed": 3, "window_shards": 4, **other})


def make_batches(order: EpochOrder, **settings: Any) -> RankBatches:
    return RankBatches(order=order, **{"batch_size": 16, "last": "partial", **settings})


def unpadded(requests: list[Request]) -> list[int]:
    """Return the positions of all requests, without the repeats that fill up."""
    positions = []
    for request in requests:
        positions += request.positions[: len(request.positions) - request.padding].tolist()
    return positions


def served(order: EpochOrder, epoch: int = 0, **settings: Any) -> np.ndarray:
    """Return the positions that one rank serves in an epoch, in its order."""
    return np.array(unpadded(list(make_batches(order, **settings).requests(epoch))))


@pytest.mark.parametrize("kind", KINDS)
def test_orders_are_reproducible_permutations(kind: str) -> None:
    epochs = [served(make_order(kind), epoch) for epoch in range(3)]
    assert all(np.array_equal(np.sort(epoch), np.arange(1000)) for epoch in epochs)
    assert np.array_equal(served(make_order(kind), 2, batch_size=7), epochs[2])
    if kind == "none":
        assert np.array_equal(epochs[0], np.arange(1000))
    else:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(served(make_order(kind, seed=1), 0), served(make_order(kind, seed=0), 1))


@pytest.mark.parametrize("kind", KINDS)
def test_any_batch_is_computed_without_those_before_it(kind: str) -> None:
    batches = make_batches(make_order(kind, (400,) * 1000), batch_size=64)
    whole = list(batches.requests(1))
    assert len(whole) == len(batches) == 6250
    for number in (6249, 3000, 2999, 0):
        assert np.array_equal(next(batches.requests(1, number)).positions, whole[number].positions)


@pytest.mark.parametrize("window", [1, 4, 100])
def test_a_window_reads_only_its_own_shards(window: int) -> None:
    shard_of = np.repeat(np.arange(len(SHARDS)), SHARDS)[served(make_order("window", window_shards=window))]
    place = 0
    while place < len(shard_of):
        shards = list(dict.fromkeys(shard_of[place:].tolist()))[:window]
        part = shard_of[place : place + sum(SHARDS[shard] for shard in shards)]
        assert set(part) == set(shards)
        place += len(part)


def quality(order: np.ndarray, labels: np.ndarray, batch_size: int = 64) -> tuple[float, float]:
    """Return the mean class entropy of batches in bits, and the share of pairs stored next to each other."""
    entropies = []
    for batch in order[: len(order) // batch_size * batch_size].reshape(-1, batch_size):
        shares = np.bincount(labels[batch]) / batch_size
        entropies.append(-(shares[shares > 0] * np.log2(shares[shares > 0])).sum())
    return float(np.mean(entropies)), float((np.abs(np.diff(order)) == 1).mean())


@pytest.mark.parametrize("samples", [4000, 1 << 17])
def test_shuffled_orders_mix_as_a_true_permutation_does(samples: int) -> None:
    """Batches have as many classes, and as few neighbours as stored, as those of a random permutation.

    The 40 shards hold samples of 50 classes at random. Few samples are permuted in an array, as of 4,000, and
    many by a `KeyedPermutation`, as of 131,072.
    """
    rng = np.random.default_rng(0)
    labels = rng.permutation(samples) * 50 // samples
    truth, _ = quality(rng.permutation(samples), labels)
    sizes = tuple(np.bincount(np.arange(samples) % 40).tolist())
    for kind, window, pool in (("full", 1, samples), ("window", 1, samples / 40), ("window", 8, samples / 5)):
        entropy, neighbours = quality(served(make_order(kind, sizes, window_shards=window), 1), labels)
        assert abs(entropy / truth - 1) < 0.01
        assert neighbours < 3 * 2 / pool
    assert quality(np.arange(samples), np.sort(labels))[0] < 0.6 * truth, (
        "entropy does not tell sorted labels from shuffled ones"
    )


@pytest.mark.parametrize("count", [1000, 100_000])
def test_a_subset_keeps_the_order_of_the_whole_split(count: int) -> None:
    """A rejected sample does not change the order of the others."""
    whole_order = served(make_order("full", (count,)), 2)
    chosen_sets = [np.flatnonzero(np.random.default_rng(0).random(count) < 0.3)]
    for rejected in (0, count // 2, count - 1):
        chosen_sets.append(np.delete(np.arange(count), rejected))
    for chosen in chosen_sets:
        part = make_order("full", (len(chosen),), chosen=(chosen, count))
        assert np.array_equal(chosen[served(part, 2)], whole_order[np.isin(whole_order, chosen)])


@dataclass(frozen=True)
class Layout:
    """Numbers of samples of each shard, of nodes, of ranks of a node and of samples in a rank's batch."""

    kind: str
    last: str
    shards: tuple[int, ...]
    batch_size: int
    nodes: int
    ranks: int

    @property
    def samples(self) -> int:
        return sum(self.shards)

    @property
    def global_size(self) -> int:
        return self.batch_size * self.nodes * self.ranks

    @property
    def whole_and_rest(self) -> tuple[int, int]:
        """Number of whole global batches, and of the samples left."""
        return divmod(self.samples, self.global_size)

    def each_rank(self) -> list[RankBatches]:
        """Return the batches of each rank."""
        order = make_order(self.kind, self.shards, window_shards=2)
        world_size = self.nodes * self.ranks
        world = {"world_size": world_size, "nodes": self.nodes, "batch_size": self.batch_size}
        return [make_batches(order, rank=rank, last=self.last, **world) for rank in range(world_size)]

    def global_batches(self) -> list[list[Request]]:
        """Return the requests of all ranks for each global batch of an epoch."""
        return [
            list(requests)
            for requests in zip(*(batches.requests(1) for batches in self.each_rank()), strict=True)
        ]


LAYOUTS = st.builds(
    Layout,
    kind=st.sampled_from(KINDS),
    last=st.sampled_from(("partial", "pad", "drop")),
    shards=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any).map(tuple),
    batch_size=st.integers(1, 8),
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 4),
)
REST_OF_ONE = Layout("none", "partial", (9,), 4, 1, 1)
FEWER_SAMPLES_THAN_RANKS = Layout("none", "partial", (1,), 2, 4, 3)


def each_layout(test: Callable[[Layout], None]) -> Callable[[], None]:
    """Run the test with random layouts, and with two that are at the limit."""
    for layout in (REST_OF_ONE, FEWER_SAMPLES_THAN_RANKS):
        test = example(layout)(test)
    return settings(max_examples=150, deadline=None)(given(LAYOUTS)(test))


@each_layout
def test_ranks_share_an_epoch(layout: Layout) -> None:
    """Each sample is served once, and all ranks have as many batches."""
    ranks = layout.each_rank()
    served_batches = [list(batches.requests(1)) for batches in ranks]
    whole, rest = layout.whole_and_rest
    global_batches = whole + (rest > 0 and layout.last != "drop")
    for batches, rank_batches in zip(ranks, served_batches, strict=True):
        assert len(batches) == len(rank_batches) == global_batches
    positions = [position for rank_batches in served_batches for position in unpadded(rank_batches)]
    assert len(positions) == len(set(positions))
    assert len(positions) == (whole * layout.global_size if layout.last == "drop" else layout.samples)


@each_layout
def test_rank_samples_counts_the_samples_of_a_rank(layout: Layout) -> None:
    for batches in layout.each_rank():
        assert batches.rank_samples() == sum(len(request.positions) for request in batches.requests(1))


@each_layout
def test_parts_of_a_global_batch_differ_by_at_most_one_sample(layout: Layout) -> None:
    global_batches = layout.global_batches()
    for number, requests in enumerate(global_batches):
        sizes = {len(request.positions) for request in requests}
        if layout.last != "partial" or number < len(global_batches) - 2:
            assert sizes == {layout.batch_size}
        assert min(sizes) >= 1
        assert max(sizes) <= min(layout.batch_size, min(sizes) + 1)


@each_layout
def test_only_pad_and_batches_of_one_sample_are_filled_up(layout: Layout) -> None:
    """A global batch with fewer samples than ranks is filled up, so that no rank has an empty batch."""
    for requests in layout.global_batches():
        if any(request.padding for request in requests):
            assert layout.last == "pad" or {len(request.positions) for request in requests} == {1}


@each_layout
def test_partial_divides_the_rest_among_the_last_two_batches(layout: Layout) -> None:
    whole, rest = layout.whole_and_rest
    layout = replace(layout, last="partial")
    if whole and rest:
        smaller, larger = sorted(len(unpadded(requests)) for requests in layout.global_batches()[-2:])
        assert smaller + larger == layout.global_size + rest
        assert larger - smaller <= 1


@each_layout
def test_pad_spreads_the_repeats_over_all_samples(layout: Layout) -> None:
    layout = replace(layout, last="pad", nodes=1)
    positions = [request.positions for requests in layout.global_batches() for request in requests]
    max_repeats = -(-layout.global_size // layout.samples) + 1
    assert np.bincount(np.concatenate(positions)).max() <= max_repeats


@each_layout
def test_ranks_per_node_change_no_global_batch(layout: Layout) -> None:
    """A single rank for each node, with batches as large as those of its ranks, serves the same samples."""
    one_per_node = replace(layout, ranks=1, batch_size=layout.batch_size * layout.ranks)
    samples, expected = (
        [sorted(unpadded(requests)) for requests in some_layout.global_batches()]
        for some_layout in (layout, one_per_node)
    )
    assert samples == expected


@pytest.mark.parametrize("kind", ["window", "none"])
def test_two_nodes_share_at_most_one_shard(kind: str) -> None:
    order = make_order(kind, (100,) * 14)
    readers: dict[int, set[int]] = {}
    for rank in range(8):
        batches = make_batches(order, batch_size=4, rank=rank, world_size=8, nodes=2)
        for request in batches.requests(3):
            for shard in set((request.positions // 100).tolist()):
                readers.setdefault(shard, set()).add(rank // 4)
    assert len(readers) == 14
    assert sum(len(nodes) > 1 for nodes in readers.values()) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_out_of_a_billion_samples_is_cheap(kind: str) -> None:
    """A batch of 64 takes less than 1 s of CPU and 100 MiB, however many samples the epoch has."""
    shards = np.full(600_000, 1666)
    shards[:400_000] += 1
    order = make_order(kind, shards, window_shards=8)
    assert order.samples == 10**9
    batches = make_batches(order, batch_size=64, rank=777, world_size=1024, nodes=128)
    for number in (0, 10_000):
        tracemalloc.start()
        start_s = time.thread_time()  # CPU time of this thread alone
        request = next(batches.requests(2, number))
        duration_s = time.thread_time() - start_s
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(request.positions) == 64
        assert duration_s < 1
        assert peak_bytes < 100 << 20


@pytest.mark.parametrize("count", [1, 2, 3, 5, 255, 256, 257, 1000, 65_537, 1 << 17, (1 << 17) + 1, 300_000])
def test_a_keyed_permutation_can_be_inverted(count: int) -> None:
    places = np.arange(count)
    permutation = KeyedPermutation(count, (3, 1, 4))
    positions = permutation.at(places)
    assert np.array_equal(np.sort(positions), places)
    assert np.array_equal(permutation.places_of(positions), places)
    assert np.array_equal(permutation.at(places[::-7]), positions[::-7]), "any part, in any order"
    if count > 256:
        assert not np.array_equal(positions, KeyedPermutation(count, (3, 2, 4)).at(places))


@pytest.mark.parametrize("count", [10**9, (1 << 30) + 1, 10**12, 1 << 40])
def test_a_huge_permutation_can_be_inverted(count: int) -> None:
    places = np.random.default_rng(0).integers(0, count, 50_000)
    permutation = KeyedPermutation(count, (0, 0, 1))
    positions = permutation.at(places)
    assert 0 <= positions.min() <= positions.max() < count
    assert np.array_equal(permutation.places_of(positions), places)
    assert abs(positions.mean() / count - 0.5) < 5 * 0.29 / np.sqrt(len(places))


def test_a_permutation_never_changes() -> None:
    """Values are pinned: another version or machine has to go on with the same order."""
    assert KeyedPermutation(1000, (7, 1, 2)).at(np.arange(5)).tolist() == [546, 669, 875, 975, 354]
    billion = KeyedPermutation(10**9, (7, 1, 2)).at(np.arange(3))
    assert billion.tolist() == [508507684, 837948263, 580567251]


def test_a_permutation_is_statistically_uniform() -> None:
    """Chi-squared statistics are less than five standard deviations off; with four rounds they are nine off.

    Each sample comes at each place equally often, distances between neighbours are those of random draws,
    and neither places that differ in one bit nor neighbouring keys are correlated.
    """

    def deviations(observed: np.ndarray, expected: np.ndarray | float) -> float:
        """Return how many standard deviations the chi-squared statistic is above its mean."""
        freedom = observed.size - 1
        return float((((observed - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))

    # 1,000 samples, a number for which the hashes are the least random
    permutations = np.stack([KeyedPermutation(COUNT, (key, 7)).at(np.arange(COUNT)) for key in range(KEYS)])
    place_counts = np.stack([np.bincount(column, minlength=COUNT) for column in permutations.T])
    assert abs(deviations(place_counts, KEYS / COUNT)) < 5
    distances = np.bincount(np.abs(np.diff(permutations)).ravel(), minlength=COUNT)[1:]
    # 2 * (n - d) of n * (n - 1) pairs of samples are at distance d; a key has n - 1 pairs of neighbours
    random_distances = 2 * (COUNT - np.arange(1, COUNT)) / (COUNT * (COUNT - 1)) * KEYS * (COUNT - 1)
    assert abs(deviations(distances, random_distances)) < 5
    for bit in (0, 4, 5, 9):
        pairs = permutations[:, 5] // 100 * 10 + permutations[:, 5 ^ (1 << bit)] // 100
        assert abs(deviations(np.bincount(pairs, minlength=100), KEYS / 100)) < 5
    matches = (permutations[1:] == permutations[:-1]).sum(axis=1)
    assert abs(matches.mean() - 1) < 5 / np.sqrt(KEYS)

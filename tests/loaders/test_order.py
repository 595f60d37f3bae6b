"""Orders are computed place by place and divided among ranks; each node reads its own shards."""

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loaders.batch import Request
from loaders.order import Epochs, KeyedPermutation, MixedEpochs, Order

SHARDS = (100,) * 7 + (0,) + (75,) * 4
KINDS = ("full", "window", "none")
COUNT, KEYS = 1000, 2000


def make_epochs(kind: str, shard_samples: tuple[int, ...] | np.ndarray = SHARDS, **other: Any) -> Epochs:
    starts = np.concatenate(([0], np.cumsum(shard_samples, dtype=np.int64)))
    return Epochs(shard_starts=starts, kind=kind, **{"seed": 3, "window_shards": 4, **other})


def make_order(epochs: Epochs | MixedEpochs, **settings: Any) -> Order:
    return Order(epochs=epochs, **{"batch_size": 16, "last": "partial", **settings})


def unpadded(requests: list[Request]) -> list[int]:
    """Return the positions of all requests without those that fill up."""
    positions = []
    for request in requests:
        positions += request.positions[: len(request.positions) - request.padding].tolist()
    return positions


def served(epochs: Epochs, epoch: int = 0, **settings: Any) -> np.ndarray:
    return np.array(unpadded(list(make_order(epochs, **settings).batches(epoch))))


@pytest.mark.parametrize("kind", KINDS)
def test_orders_are_reproducible_permutations(kind: str) -> None:
    epochs = [served(make_epochs(kind), epoch) for epoch in range(3)]
    assert all(np.array_equal(np.sort(epoch), np.arange(1000)) for epoch in epochs)
    assert np.array_equal(served(make_epochs(kind), 2, batch_size=7), epochs[2])
    if kind == "none":
        assert np.array_equal(epochs[0], np.arange(1000))
    else:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(served(make_epochs(kind, seed=1), 0), served(make_epochs(kind, seed=0), 1))


@pytest.mark.parametrize("kind", KINDS)
def test_any_batch_is_computed_without_those_before_it(kind: str) -> None:
    order = make_order(make_epochs(kind, (400,) * 1000), batch_size=64)
    whole = list(order.batches(1))
    assert len(whole) == len(order) == 6250
    for number in (6249, 3000, 2999, 0):
        assert np.array_equal(next(order.batches(1, number)).positions, whole[number].positions)


@pytest.mark.parametrize("window", [1, 4, 100])
def test_a_window_reads_only_its_own_shards(window: int) -> None:
    shard_of = np.repeat(np.arange(len(SHARDS)), SHARDS)[served(make_epochs("window", window_shards=window))]
    place = 0
    while place < len(shard_of):
        shards = list(dict.fromkeys(shard_of[place:].tolist()))[:window]
        part = shard_of[place : place + sum(SHARDS[shard] for shard in shards)]
        assert set(part) == set(shards)
        place += len(part)


def quality(order: np.ndarray, labels: np.ndarray, batch_size: int = 64) -> tuple[float, float]:
    """Return the mean class entropy of batches in bits, and the share of neighbours that are stored so."""
    entropies = []
    for batch in order[: len(order) // batch_size * batch_size].reshape(-1, batch_size):
        shares = np.bincount(labels[batch]) / batch_size
        entropies.append(-(shares[shares > 0] * np.log2(shares[shares > 0])).sum())
    return float(np.mean(entropies)), float((np.abs(np.diff(order)) == 1).mean())


@pytest.mark.parametrize("samples", [4000, 1 << 17])
def test_shuffled_orders_mix_as_a_true_permutation_does(samples: int) -> None:
    """40 shards of 50 classes, written shuffled; 4,000 samples are listed, more are permuted by a key."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(samples) * 50 // samples
    truth, _ = quality(rng.permutation(samples), labels)
    sizes = tuple(np.bincount(np.arange(samples) % 40).tolist())
    for kind, window, pool in (("full", 1, samples), ("window", 1, samples / 40), ("window", 8, samples / 5)):
        entropy, neighbours = quality(served(make_epochs(kind, sizes, window_shards=window), 1), labels)
        assert abs(entropy / truth - 1) < 0.01
        assert neighbours < 3 * 2 / pool
    assert quality(np.arange(samples), np.sort(labels))[0] < 0.6 * truth, "the measure detects no shuffle"


@pytest.mark.parametrize("count", [1000, 100_000])
def test_a_subset_keeps_the_order_of_the_whole_split(count: int) -> None:
    """A rejected sample does not change the order of the others."""
    whole_order = served(make_epochs("full", (count,)), 2)
    chosen_sets = [np.flatnonzero(np.random.default_rng(0).random(count) < 0.3)]
    for rejected in (0, count // 2, count - 1):
        chosen_sets.append(np.delete(np.arange(count), rejected))
    for chosen in chosen_sets:
        part = make_epochs("full", (len(chosen),), chosen=(chosen, count))
        assert np.array_equal(chosen[served(part, 2)], whole_order[np.isin(whole_order, chosen)])


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    last=st.sampled_from(("partial", "pad", "drop")),
    shards=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any).map(tuple),
    batch_size=st.integers(1, 8),
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 4),
)
@example(kind="none", last="partial", shards=(9,), batch_size=4, nodes=1, ranks=1)
@example(kind="none", last="partial", shards=(1,), batch_size=2, nodes=4, ranks=3)
def test_ranks_share_an_epoch(
    kind: str, last: str, shards: tuple[int, ...], batch_size: int, nodes: int, ranks: int
) -> None:
    """Each sample is served once, ranks have as many batches, and ranks per node change no global batch."""
    count, global_size = sum(shards), batch_size * nodes * ranks
    epochs = make_epochs(kind, shards, window_shards=2)

    def make_ranks(ranks_per_node: int, size: int) -> list[Order]:
        world_size = nodes * ranks_per_node
        world = {"world_size": world_size, "nodes": nodes, "batch_size": size, "last": last}
        return [make_order(epochs, rank=rank, **world) for rank in range(world_size)]

    orders = make_ranks(ranks, batch_size)
    batches = [list(order.batches(1)) for order in orders]
    whole, rest = divmod(count, global_size)
    assert {len(order) for order in orders} == {len(rank_batches) for rank_batches in batches}
    assert {len(order) for order in orders} == {whole + (rest > 0 and last != "drop")}
    positions = [i for rank_batches in batches for i in unpadded(rank_batches)]
    assert len(positions) == len(set(positions)) == (whole * global_size if last == "drop" else count)
    for order, rank_batches in zip(orders, batches, strict=True):
        assert order.rank_samples() == sum(len(request.positions) for request in rank_batches)
    global_batches = [list(requests) for requests in zip(*batches, strict=True)]
    for number, requests in enumerate(global_batches):
        sizes = {len(request.positions) for request in requests}
        if last != "partial" or number < len(global_batches) - 2:
            assert sizes == {batch_size}
        assert 1 <= min(sizes) <= max(sizes) <= min(batch_size, min(sizes) + 1)
        assert last == "pad" or all(request.padding == 0 or sizes == {1} for request in requests)
    if last == "partial" and whole and rest:
        smaller, larger = sorted(len(unpadded(requests)) for requests in global_batches[-2:])
        assert smaller + larger == global_size + rest
        assert larger - smaller <= 1
    if nodes == 1 and last == "pad" and count:
        padded = np.concatenate([request.positions for rank_batches in batches for request in rank_batches])
        max_repeats = -(-global_size // count) + 1
        assert np.bincount(padded).max() <= max_repeats, "repeats are spread over all samples"
    one_per_node = zip(*(order.batches(1) for order in make_ranks(1, batch_size * ranks)), strict=True)
    assert [sorted(unpadded(requests)) for requests in global_batches] == [
        sorted(unpadded(list(requests))) for requests in one_per_node
    ]


@pytest.mark.parametrize("kind", ["window", "none"])
def test_two_nodes_share_at_most_one_shard(kind: str) -> None:
    epochs = make_epochs(kind, (100,) * 14)
    readers: dict[int, set[int]] = {}
    for rank in range(8):
        order = make_order(epochs, batch_size=4, rank=rank, world_size=8, nodes=2)
        for request in order.batches(3):
            for shard in set((request.positions // 100).tolist()):
                readers.setdefault(shard, set()).add(rank // 4)
    assert len(readers) == 14
    assert sum(len(nodes) > 1 for nodes in readers.values()) <= 1


@pytest.mark.parametrize("kind", [*KINDS, "mixture"])
def test_a_batch_of_a_billion_samples_takes_under_a_second(kind: str) -> None:
    shards = np.full(600_000, 1666)
    shards[:400_000] += 1
    epochs: Epochs | MixedEpochs
    if kind == "mixture":
        parts = (make_epochs("full", shards), make_epochs("window", shards), make_epochs("full"))
        epochs = MixedEpochs(parts=parts, counts=(10**9, 10**9, 3000))
    else:
        epochs = make_epochs(kind, shards, window_shards=8)
        assert epochs.samples == 10**9
    nodes = 1 if kind == "mixture" else 128
    order = make_order(epochs, batch_size=64, rank=777, world_size=1024, nodes=nodes)
    for number in (0, 10_000):
        tracemalloc.start()
        start_s = time.thread_time()  # CPU time of this thread alone
        request = next(order.batches(2, number))
        duration_s = time.thread_time() - start_s
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(request.positions) == 64
        assert kind != "mixture" or abs((request.positions < 10**9).sum() - 32) <= 1
        assert duration_s < 1
        assert peak_bytes < 100 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_equals_its_parts_sorted_by_time(kind: str) -> None:
    """Places computed one by one are compared with a whole epoch, sorted by time."""
    counts = (1000, 900, 37)
    parts = tuple(make_epochs(kind, sizes) for sizes in (SHARDS, (40, 13, 27), (50, 50)))
    for epoch in (0, 1, 5):
        listed = []
        for part, count in zip(parts, counts, strict=True):
            first, last = epoch * count // part.samples, (epoch * count + count - 1) // part.samples
            epochs = [part.order(e)(np.arange(part.samples)) for e in range(first, last + 1)]
            listed.append(np.concatenate(epochs)[epoch * count % part.samples :][:count])
        times = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        offsets = np.repeat([0, 1000, 1080], counts)
        expected = (np.concatenate(listed) + offsets)[np.argsort(times, kind="stable")].tolist()
        for rank, world_size in ((0, 1), (1, 3)):
            mixed = MixedEpochs(parts=parts, counts=counts)
            order = make_order(mixed, last="drop", rank=rank, world_size=world_size)
            for number, request in enumerate(order.batches(epoch)):
                start = number * 16 * world_size + rank * 16
                assert request.positions.tolist() == expected[start : start + 16]
                assert request.places is not None
                assert request.places.tolist() == list(range(start, start + 16)), "repeats are drawn anew"


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


def test_a_permutation_is_the_same_on_every_machine() -> None:
    assert KeyedPermutation(1000, (7, 1, 2)).at(np.arange(5)).tolist() == [546, 669, 875, 975, 354]
    billion = KeyedPermutation(10**9, (7, 1, 2)).at(np.arange(3))
    assert billion.tolist() == [508507684, 837948263, 580567251]


def test_a_permutation_is_statistically_uniform() -> None:
    """Chi-squared statistics are less than five standard deviations off; those of four rounds are 9 off.

    Each sample comes at each place equally often, distances between neighbours are those of random draws,
    and neither places that differ in one bit nor neighbouring keys are correlated.
    """

    def deviations(observed: np.ndarray, expected: np.ndarray | float) -> float:
        freedom = observed.size - 1
        return float((((observed - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))

    # 1,000 samples, a number for which the hashes are the least random
    permutations = np.stack([KeyedPermutation(COUNT, (key, 7)).at(np.arange(COUNT)) for key in range(KEYS)])
    place_counts = np.stack([np.bincount(column, minlength=COUNT) for column in permutations.T])
    assert abs(deviations(place_counts, KEYS / COUNT)) < 5
    distances = np.bincount(np.abs(np.diff(permutations)).ravel(), minlength=COUNT)[1:]
    random_distances = 2 * (COUNT - np.arange(1, COUNT)) / (COUNT * (COUNT - 1)) * KEYS * (COUNT - 1)
    assert abs(deviations(distances, random_distances)) < 5
    for bit in (0, 4, 5, 9):
        pairs = permutations[:, 5] // 100 * 10 + permutations[:, 5 ^ (1 << bit)] // 100
        assert abs(deviations(np.bincount(pairs, minlength=100), KEYS / 100)) < 5
    matches = (permutations[1:] == permutations[:-1]).sum(axis=1)
    assert abs(matches.mean() - 1) < 5 / np.sqrt(KEYS)

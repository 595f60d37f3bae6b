"""Orders: computed place by place, shared by ranks, in shards of their own for each node."""

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


def once(shares: list[Request]) -> list[int]:
    """Positions, without those that fill up."""
    return [i for share in shares for i in share.positions[: len(share.positions) - share.padding].tolist()]


def served(epochs: Epochs, epoch: int = 0, **settings: Any) -> np.ndarray:
    return np.array(once(list(make_order(epochs, **settings).batches(epoch))))


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
    """Mean class entropy of the batches in bits, and the share of neighbours that were stored as such."""
    entropies = []
    for batch in order[: len(order) // batch_size * batch_size].reshape(-1, batch_size):
        shares = np.bincount(labels[batch]) / batch_size
        entropies.append(-(shares[shares > 0] * np.log2(shares[shares > 0])).sum())
    return float(np.mean(entropies)), float((np.abs(np.diff(order)) == 1).mean())


@pytest.mark.parametrize("samples", [4000, 1 << 17])
def test_shuffled_orders_mix_as_a_true_permutation_does(samples: int) -> None:
    """40 shards of a tree of 50 classes, written shuffled; a list, and keyed."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(samples) * 50 // samples
    truth, _ = quality(rng.permutation(samples), labels)
    sizes = tuple(np.bincount(np.arange(samples) % 40).tolist())
    for kind, window, near in (("full", 1, samples), ("window", 1, samples / 40), ("window", 8, samples / 5)):
        mixed, neighbours = quality(served(make_epochs(kind, sizes, window_shards=window), 1), labels)
        assert abs(mixed / truth - 1) < 0.01
        assert neighbours < 3 * 2 / near
    assert quality(np.arange(samples), np.sort(labels))[0] < 0.6 * truth, "it can tell"


@pytest.mark.parametrize("count", [1000, 100_000])
def test_a_subset_keeps_the_order_of_the_whole_split(count: int) -> None:
    """So a rejected sample does not change the order of the others."""
    among_all = served(make_epochs("full", (count,)), 2)
    some = np.flatnonzero(np.random.default_rng(0).random(count) < 0.3)
    for left in (some, *(np.delete(np.arange(count), gone) for gone in (0, count // 2, count - 1))):
        part = make_epochs("full", (len(left),), chosen=(left, count))
        assert np.array_equal(left[served(part, 2)], among_all[np.isin(among_all, left)])


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
    """Every sample once, in as many batches for each; the same global batches for any ranks of a node."""
    count, global_size = sum(shards), batch_size * nodes * ranks
    epochs = make_epochs(kind, shards, window_shards=2)

    def make_ranks(of_node: int, size: int) -> list[Order]:
        world = {"world_size": nodes * of_node, "nodes": nodes, "batch_size": size, "last": last}
        return [make_order(epochs, rank=rank, **world) for rank in range(nodes * of_node)]

    orders = make_ranks(ranks, batch_size)
    batches = [list(order.batches(1)) for order in orders]
    whole, rest = divmod(count, global_size)
    assert {len(order) for order in orders} == {len(of_rank) for of_rank in batches}
    assert {len(order) for order in orders} == {whole + (rest > 0 and last != "drop")}
    got = [i for of_rank in batches for i in once(of_rank)]
    assert len(got) == len(set(got)) == (whole * global_size if last == "drop" else count)
    for order, of_rank in zip(orders, batches, strict=True):
        assert order.rank_samples() == sum(len(request.positions) for request in of_rank)
    global_batches = list(zip(*batches, strict=True))
    for number, of_ranks in enumerate(global_batches):
        sizes = {len(request.positions) for request in of_ranks}
        if last != "partial" or number < len(global_batches) - 2:
            assert sizes == {batch_size}
        assert 1 <= min(sizes) <= max(sizes) <= min(batch_size, min(sizes) + 1)
        assert last == "pad" or all(request.padding == 0 or sizes == {1} for request in of_ranks)
    if last == "partial" and whole and rest:
        less, more = sorted(len(once(list(of_ranks))) for of_ranks in global_batches[-2:])
        assert (less + more, more - less <= 1) == (global_size + rest, True)
    if nodes == 1 and last == "pad" and count:
        every = np.concatenate([request.positions for of_rank in batches for request in of_rank])
        most = -(-global_size // count) + 1
        assert np.bincount(every).max() <= most, "what fills up is spread over all"
    alone = zip(*(order.batches(1) for order in make_ranks(1, batch_size * ranks)), strict=True)
    assert [sorted(once(list(of_ranks))) for of_ranks in global_batches] == [
        sorted(once(list(of_nodes))) for of_nodes in alone
    ]


@pytest.mark.parametrize("kind", ["window", "none"])
def test_two_nodes_share_at_most_one_shard(kind: str) -> None:
    epochs = make_epochs(kind, (100,) * 14)
    readers: dict[int, set[int]] = {}
    for rank in range(8):
        order = make_order(epochs, batch_size=4, rank=rank, world_size=8, nodes=2)
        for share in order.batches(3):
            for shard in set((share.positions // 100).tolist()):
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
        start_s = time.thread_time()  # not that of others
        request = next(order.batches(2, number))
        took_s = time.thread_time() - start_s
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(request.positions) == 64
        assert kind != "mixture" or abs((request.positions < 10**9).sum() - 32) <= 1
        assert took_s < 1
        assert most < 100 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_equals_its_parts_sorted_by_time(kind: str) -> None:
    """Place by place, against all of an epoch sorted by time."""
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
            for number, share in enumerate(order.batches(epoch)):
                start = number * 16 * world_size + rank * 16
                assert share.positions.tolist() == expected[start : start + 16]
                assert share.places is not None
                assert share.places.tolist() == list(range(start, start + 16)), "each drawn for itself"


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
    of_many = KeyedPermutation(10**9, (7, 1, 2)).at(np.arange(3))
    assert of_many.tolist() == [508507684, 837948263, 580567251]


def test_a_permutation_is_statistically_uniform() -> None:
    """By chi-squared statistics, less than five standard deviations off: four rounds are off by 9.

    Each sample comes anywhere as often; what comes side by side lies as far apart; places that differ in one
    bit, and neighbouring keys, have nothing in common.
    """

    def deviations(observed: np.ndarray, expected: np.ndarray | float) -> float:
        freedom = observed.size - 1
        return float((((observed - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))

    # of 1,000 samples, a number at which hashes are the least random
    drawn = np.stack([KeyedPermutation(COUNT, (key, 7)).at(np.arange(COUNT)) for key in range(KEYS)])
    seen = np.stack([np.bincount(column, minlength=COUNT) for column in drawn.T])
    assert abs(deviations(seen, KEYS / COUNT)) < 5
    apart = np.bincount(np.abs(np.diff(drawn)).ravel(), minlength=COUNT)[1:]
    of_lots = 2 * (COUNT - np.arange(1, COUNT)) / (COUNT * (COUNT - 1)) * KEYS * (COUNT - 1)
    assert abs(deviations(apart, of_lots)) < 5
    for bit in (0, 4, 5, 9):
        pairs = drawn[:, 5] // 100 * 10 + drawn[:, 5 ^ (1 << bit)] // 100
        assert abs(deviations(np.bincount(pairs, minlength=100), KEYS / 100)) < 5
    same = (drawn[1:] == drawn[:-1]).sum(axis=1)
    assert abs(same.mean() - 1) < 5 / np.sqrt(KEYS)

from itertools import chain

import numpy as np
import pytest

from loaders.order import EpochOrder, batch_count, cut, full_order, window_order

IDS = np.random.default_rng(0).permutation(1000)
SHARDS = (100,) * 7 + (75,) * 4


def test_orders_are_permutations_and_pure() -> None:
    for make in (lambda e: full_order(IDS, 3, e), lambda e: window_order(SHARDS, 3, e, 4)):
        assert sorted(make(0)) == list(range(1000))
        assert np.array_equal(make(5), make(5))
        assert not np.array_equal(make(0), make(1))


def test_seed_0_epoch_1_is_not_seed_1_epoch_0() -> None:
    assert not np.array_equal(full_order(IDS, 0, 1), full_order(IDS, 1, 0))
    assert not np.array_equal(window_order(SHARDS, 0, 1), window_order(SHARDS, 1, 0))


def test_full_order_is_of_ids_not_of_how_they_are_stored() -> None:
    other_store = np.sort(IDS)
    assert np.array_equal(IDS[full_order(IDS, 3, 2)], other_store[full_order(other_store, 3, 2)])


def test_a_rejected_sample_does_not_change_the_order_of_the_others() -> None:
    for gone in (0, 500, 999):
        rest = IDS[gone != IDS]
        served = IDS[full_order(IDS, 3, 2)]
        assert np.array_equal(rest[full_order(rest, 3, 2)], served[served != gone])


@pytest.mark.parametrize("window", [1, 4, 100])
def test_a_window_touches_no_more_than_its_shards(window: int) -> None:
    shard_of = np.repeat(np.arange(len(SHARDS)), SHARDS)[window_order(SHARDS, 0, 0, window)]
    position, seen = 0, []
    while position < len(shard_of):
        shards = list(dict.fromkeys(shard_of[position:]))[:window]
        length = sum(SHARDS[shard] for shard in shards)
        part = shard_of[position : position + length]
        assert set(part) == set(shards)
        assert len(part) == sum(SHARDS[shard] for shard in set(part))
        seen += sorted(set(part.tolist()))
        position += len(part)
    assert sorted(seen) == list(range(len(SHARDS)))


def test_samples_within_a_window_are_mixed() -> None:
    first = np.repeat(np.arange(len(SHARDS)), SHARDS)[window_order(SHARDS, 0, 0, 4)][:64]
    assert len(set(first.tolist())) == 4


@pytest.mark.parametrize(("count", "last", "sizes"), [
    (10, "partial", [4, 4, 2]), (10, "drop", [4, 4]), (8, "drop", [4, 4]), (3, "drop", []), (0, "drop", []),
])  # fmt: skip
def test_cut(count: int, last: str, sizes: list[int]) -> None:
    batches = cut(np.arange(count), 4, last)
    assert [len(batch) for batch in batches] == sizes
    assert np.array_equal(np.concatenate([*batches, []]), np.arange(sum(sizes)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 24, 70, 100])
@pytest.mark.parametrize("last", ["partial", "pad", "drop"])
def test_ranks_share_an_epoch(count: int, last: str, world_size: int) -> None:
    order = np.random.default_rng(0).permutation(count)
    ranks = [cut(order, 4, last, rank, world_size) for rank in range(world_size)]
    served = np.concatenate([*chain(*ranks), []]).astype(int)
    global_size = 4 * world_size
    whole = count // global_size * global_size
    assert [len(batches) for batches in ranks] == [
        batch_count(count, 4, last, rank, world_size) for rank in range(world_size)
    ]
    if last == "partial":
        assert sorted(served) == list(range(count))
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
    elif last == "drop":
        assert sorted(served) == sorted(order[:whole])
    else:
        assert set(served) == set(range(count))
        assert len(served) == -(-count // global_size) * global_size
        assert np.bincount(served, minlength=count).max(initial=0) <= -(-global_size // max(1, count)) + 1
    if last != "partial":
        assert len({len(batches) for batches in ranks}) == 1
        assert all(len(batch) == 4 for batch in chain(*ranks))


def test_the_same_global_batch_gives_the_same_samples_for_any_world_size() -> None:
    order = np.random.default_rng(0).permutation(100)

    def global_batches(batch_size: int, world_size: int) -> list[list[int]]:
        ranks = [cut(order, batch_size, "pad", rank, world_size) for rank in range(world_size)]
        return [np.concatenate(parts).tolist() for parts in zip(*ranks, strict=True)]

    assert global_batches(24, 1) == global_batches(12, 2) == global_batches(8, 3) == global_batches(3, 8)


def test_epoch_order_of_kind_none_is_the_stored_one() -> None:
    order = EpochOrder(ids=IDS, shard_samples=SHARDS, kind="none", seed=0, batch_size=300, last="partial")
    assert np.array_equal(np.concatenate(order.batches(7)), np.arange(1000))


def quality(order: np.ndarray, labels: np.ndarray, batch_size: int) -> tuple[float, float]:
    """Mean class entropy of the batches in bits, and the share of neighbours that were stored as such."""
    entropies = []
    for batch in cut(order, batch_size, "drop"):
        shares = np.bincount(labels[batch]) / batch_size
        entropies.append(-(shares[shares > 0] * np.log2(shares[shares > 0])).sum())
    return float(np.mean(entropies)), float((np.abs(np.diff(order)) == 1).mean())


@pytest.mark.parametrize("window", [1, 2, 8, 40])
def test_shuffled_orders_mix_as_a_true_permutation_does(window: int) -> None:
    """40 shards of 100 samples, written shuffled, as the converter does, of a tree of 50 classes."""
    rng = np.random.default_rng(0)
    ids = rng.permutation(4000)
    labels = ids // 80
    truth, _ = quality(rng.permutation(4000), labels, 64)
    full, full_neighbours = quality(full_order(ids, 0, 1), labels, 64)
    windowed, neighbours = quality(window_order((100,) * 40, 0, 1, window), labels, 64)
    assert abs(full / truth - 1) < 0.01
    assert full_neighbours < 3 * 2 / 4000
    assert abs(windowed / truth - 1) < 0.01, "what is stored shuffled stays so in any window"
    assert neighbours < 3 * 2 / (100 * window), "two stored side by side are seldom served so"


def test_the_measure_of_shuffling_tells_an_unshuffled_order() -> None:
    labels = np.arange(4000) // 80
    mixed, _ = quality(np.random.default_rng(0).permutation(4000), labels, 64)
    for order in (np.arange(4000), window_order((100,) * 40, 0, 1, 2)):  # of a tree stored class by class
        assert quality(order, labels, 64)[0] < 0.6 * mixed
    assert quality(np.arange(4000), labels, 64)[1] == 1

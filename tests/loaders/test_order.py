import numpy as np
import pytest

from loaders.order import EpochOrder, cut, full_order, window_order

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


def test_epoch_order_of_kind_none_is_the_stored_one() -> None:
    order = EpochOrder(ids=IDS, shard_samples=SHARDS, kind="none", seed=0, batch_size=300, last="partial")
    assert np.array_equal(np.concatenate(order.batches(7)), np.arange(1000))

from collections.abc import Iterable
from itertools import chain, product

import numpy as np
import pytest

from loaders.order.cut import Share, batch_count, cut
from loaders.order.listed import EpochOrder, full_order, window_order

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


def served(shares: Iterable[Share]) -> list[int]:
    """Positions, without those that fill up."""
    return [i for share in shares for i in share.positions[: len(share.positions) - share.padding].tolist()]


@pytest.mark.parametrize(("count", "last", "sizes"), [
    (10, "partial", [4, 3, 3]), (9, "partial", [4, 3, 2]), (8, "partial", [4, 4]), (3, "partial", [3]),
    (10, "pad", [4, 4, 4]), (3, "pad", [4]),
    (10, "drop", [4, 4]), (8, "drop", [4, 4]), (3, "drop", []), (0, "drop", []), (0, "partial", []),
])  # fmt: skip
def test_cut(count: int, last: str, sizes: list[int]) -> None:
    shares = cut(np.arange(count), 4, last)
    assert [len(share.positions) for share in shares] == sizes
    assert served(shares) == list(range(min(count, sum(sizes))))


@pytest.mark.parametrize("world_size", range(1, 9))
def test_every_rank_serves_as_many_batches_and_every_sample_once(world_size: int) -> None:
    for count, batch_size in product(range(1, 71), range(1, 9)):
        order = np.random.default_rng(count).permutation(count)
        ranks = [cut(order, batch_size, "partial", rank, world_size) for rank in range(world_size)]
        batches = batch_count(count, batch_size, "partial", world_size)
        assert [len(shares) for shares in ranks] == [batches] * world_size
        assert sorted(served(chain(*ranks))) == list(range(count)), "apart from what is marked as padding"
        for number, of_ranks in enumerate(zip(*ranks, strict=True)):
            sizes = {len(share.positions) for share in of_ranks}
            assert sizes <= {min(sizes), min(sizes) + 1}
            assert 1 <= min(sizes) <= max(sizes) <= batch_size
            assert number >= batches - 2 or sizes == {batch_size}, "but for the last two all are whole"
            assert all(share.padding == 0 or sizes == {1} for share in of_ranks), "no more than needed"


@pytest.mark.parametrize("last", ["partial", "pad", "drop"])
def test_the_same_global_batch_size_gives_the_same_global_batches_for_any_world_size(last: str) -> None:
    for count, global_size in product((1, 2, 5, 7, 23, 24, 25, 47, 48, 49, 70, 100), (1, 6, 8, 24)):
        order = np.random.default_rng(0).permutation(count)
        worlds = [n for n in (1, 2, 3, 4, 6, 8, 24) if global_size % n == 0]
        batches = []
        for world_size in worlds:
            parts = [cut(order, global_size // world_size, last, r, world_size) for r in range(world_size)]
            batches.append([served(of_ranks) for of_ranks in zip(*parts, strict=True)])
        assert all(others == batches[0] for others in batches)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 24, 70, 100])
@pytest.mark.parametrize("last", ["pad", "drop"])
def test_ranks_share_an_epoch_in_whole_batches(count: int, last: str, world_size: int) -> None:
    order = np.random.default_rng(0).permutation(count)
    ranks = [cut(order, 4, last, rank, world_size) for rank in range(world_size)]
    global_size = 4 * world_size
    assert [len(shares) for shares in ranks] == [batch_count(count, 4, last, world_size)] * world_size
    assert all(len(share.positions) == 4 for share in chain(*ranks))
    if last == "drop":
        assert sorted(served(chain(*ranks))) == sorted(order[: count // global_size * global_size])
    else:
        assert sorted(served(chain(*ranks))) == list(range(count))
        positions = [i for share in chain(*ranks) for i in share.positions.tolist()]
        most = -(-global_size // max(1, count)) + 1
        assert max(np.bincount(positions, minlength=1)) <= most, "what fills up is spread over all"


def test_a_sampler_counts_what_its_rank_serves() -> None:
    for rank, last in product(range(3), ("partial", "pad", "drop")):
        order = EpochOrder(
            ids=IDS,
            shard_samples=SHARDS,
            kind="full",
            seed=0,
            batch_size=64,
            last=last,
            rank=rank,
            world_size=3,
        )
        shares = order.batches(2)
        assert order.batch_count() == len(shares)
        assert order.rank_samples() == sum(len(share.positions) for share in shares)


def test_epoch_order_of_kind_none_is_the_stored_one() -> None:
    order = EpochOrder(ids=IDS, shard_samples=SHARDS, kind="none", seed=0, batch_size=300, last="partial")
    assert served(order.batches(7)) == list(range(1000))


def quality(order: np.ndarray, labels: np.ndarray, batch_size: int) -> tuple[float, float]:
    """Mean class entropy of the batches in bits, and the share of neighbours that were stored as such."""
    entropies = []
    for batch, *_ in cut(order, batch_size, "drop"):
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

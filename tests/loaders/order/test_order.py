"""Orders of converted datasets: computed batch by batch, in shards of their own for each node."""

import time
import tracemalloc
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.batch import Request
from loaders.dataset import open_split
from loaders.order.order import Epochs, MixedEpochs, Order, Windows, merge, shuffled
from tests.building import build_loader
from tests.loader_contract import ids_of

SHARDS = (100,) * 7 + (0,) + (75,) * 4
KINDS = ("full", "window", "none")


def starts_of(shard_samples: tuple[int, ...] | np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(shard_samples, dtype=np.int64)))


def make_epochs(kind: str, shard_samples: tuple[int, ...] | np.ndarray = SHARDS, **other: Any) -> Epochs:
    settings = {"seed": 3, "window_shards": 4, **other}
    return Epochs(shard_starts=starts_of(shard_samples), kind=kind, **settings)


def make_order(
    epochs: Epochs | MixedEpochs | str,
    shard_samples: tuple[int, ...] | np.ndarray = SHARDS,
    *,
    nodes: int = 1,
    **settings: Any,
) -> Order:
    """Of `epochs`, or of what `make_epochs` makes; nodes share all shards of kind `full`."""
    of_order = {name: settings.pop(name) for name in ("rank", "world_size") if name in settings}
    of_order |= {name: settings.pop(name, b) for name, b in (("batch_size", 16), ("last", "partial"))}
    if isinstance(epochs, str):
        nodes = 1 if epochs == "full" else nodes
        epochs = make_epochs(epochs, shard_samples, **settings)
    return Order(epochs=epochs, nodes=nodes, **of_order)


def once(shares: list[Request]) -> list[int]:
    """Positions, without those that fill up."""
    return [i for share in shares for i in share.positions[: len(share.positions) - share.padding].tolist()]


def served(order: Order, epoch: int = 0) -> np.ndarray:
    return np.array(once(list(order.batches(epoch))))


@pytest.mark.parametrize("kind", KINDS)
def test_orders_are_permutations_and_pure(kind: str) -> None:
    order = make_order(kind)
    epochs = [served(order, epoch) for epoch in range(3)]
    assert all(np.array_equal(np.sort(epoch), np.arange(1000)) for epoch in epochs)
    assert np.array_equal(served(make_order(kind), 2), epochs[2])
    assert np.array_equal(served(make_order(kind, batch_size=7), 2), epochs[2])
    if kind == "none":
        assert np.array_equal(epochs[0], np.arange(1000))
    else:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(served(make_order(kind, seed=1), 0), served(make_order(kind, seed=0), 1))


@pytest.mark.parametrize("kind", KINDS)
def test_any_batch_is_had_without_those_before_it(kind: str) -> None:
    order = make_order(kind, (400,) * 1000, batch_size=64)
    whole = list(order.batches(1))
    assert len(whole) == len(order) == 6250
    for number in (6249, 3000, 2999, 0):
        assert np.array_equal(order.batches(1)[number].positions, whole[number].positions)
    with pytest.raises(IndexError):
        order.batches(1)[6250]


@pytest.mark.parametrize("window", [1, 4, 100])
def test_a_window_touches_no_more_than_its_shards(window: int) -> None:
    shard_of = np.repeat(np.arange(len(SHARDS)), SHARDS)[served(make_order("window", window_shards=window))]
    place = 0
    while place < len(shard_of):
        shards = list(dict.fromkeys(shard_of[place:].tolist()))[:window]
        part = shard_of[place : place + sum(SHARDS[shard] for shard in shards)]
        assert set(part) == set(shards)
        place += len(part)


def quality(order: np.ndarray, labels: np.ndarray, batch_size: int) -> tuple[float, float]:
    """Mean class entropy of the batches in bits, and the share of neighbours that were stored as such."""
    entropies = []
    for batch in order[: len(order) // batch_size * batch_size].reshape(-1, batch_size):
        shares = np.bincount(labels[batch]) / batch_size
        entropies.append(-(shares[shares > 0] * np.log2(shares[shares > 0])).sum())
    return float(np.mean(entropies)), float((np.abs(np.diff(order)) == 1).mean())


@pytest.mark.parametrize("samples", [4000, 1 << 17])
@pytest.mark.parametrize("window", [1, 2, 8, 40])
def test_shuffled_orders_mix_as_a_true_permutation_does(window: int, samples: int) -> None:
    """40 shards of a tree of 50 classes, written shuffled; a list, and keyed."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(samples) * 50 // samples
    truth, _ = quality(rng.permutation(samples), labels, 64)
    sizes = tuple(np.bincount(np.arange(samples) % 40).tolist())
    full, neighbours = quality(served(make_order("full", sizes), 1), labels, 64)
    assert abs(full / truth - 1) < 0.01
    assert neighbours < 3 * 2 / samples
    windowed, neighbours = quality(served(make_order("window", sizes, window_shards=window), 1), labels, 64)
    assert abs(windowed / truth - 1) < 0.01
    assert neighbours < 3 * 2 / (samples / 40 * window)


def test_a_part_is_served_in_the_order_that_it_has_among_all() -> None:
    for samples in (1000, 100_000):
        chosen = np.flatnonzero(np.random.default_rng(0).random(samples) < 0.3)
        part = make_order("full", (len(chosen),), chosen=(chosen, samples))
        among_all = served(make_order("full", (samples,)), 2)
        assert np.array_equal(chosen[served(part, 2)], among_all[np.isin(among_all, chosen)])


@pytest.mark.parametrize("last", ["partial", "pad", "drop"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_of_every_node_serves_as_many_batches_and_every_sample_once(kind: str, last: str) -> None:
    for shards, (nodes, ranks), batch_size in product(
        ((7, 5, 0, 4, 9, 9, 9, 3), (1,), (3, 2), (40,) * 6), ((1, 3), (2, 2), (3, 1), (4, 3)), (1, 2, 5)
    ):
        world = nodes * ranks
        orders = [
            make_order(
                kind,
                shards,
                batch_size=batch_size,
                last=last,
                rank=r,
                world_size=world,
                nodes=nodes,
                window_shards=2,
            )
            for r in range(world)
        ]
        batches = [list(order.batches(1)) for order in orders]
        assert {len(of_rank) for of_rank in batches} == {len(orders[0])}
        count, global_size = sum(shards), batch_size * world
        expected = count // global_size * global_size if last == "drop" else count
        got = [i for of_rank in batches for i in once(of_rank)]
        assert len(got) == len(set(got)) == expected
        for order, of_rank in zip(orders, batches, strict=True):
            assert order.rank_samples() == sum(len(share.positions) for share in of_rank)
        for of_ranks in zip(*batches, strict=True):
            sizes = {len(share.positions) for share in of_ranks}
            assert min(sizes) > 0
            assert sizes <= ({min(sizes), min(sizes) + 1} if last == "partial" else {batch_size})


@pytest.mark.parametrize("kind", ["window", "none"])
def test_a_state_goes_on_with_other_ranks_of_as_many_nodes(kind: str) -> None:
    for count, last in product((1, 7, 24, 70, 100, 101), ("partial", "pad", "drop")):
        epochs = []
        for ranks in (1, 2, 4):
            of_ranks = [
                make_order(
                    kind, (count,), batch_size=8 // ranks, last=last, rank=r, world_size=3 * ranks, nodes=3
                )
                for r in range(3 * ranks)
            ]
            epochs.append(
                [sorted(once(list(shares))) for shares in zip(*(o.batches(0) for o in of_ranks), strict=True)]
            )
        assert epochs[0] == epochs[1] == epochs[2]


def test_nodes_are_told_apart_by_states_where_the_order_depends_on_them() -> None:
    assert make_order("window", nodes=2, world_size=4).identity()["nodes"] == 2
    assert make_order("none").identity()["nodes"] == 1
    full = [make_order("full", world_size=4, nodes=nodes) for nodes in (1, 2)]
    assert full[0].identity() == full[1].identity()
    assert np.array_equal(served(full[0]), served(full[1])), "which reads all shards everywhere"


@pytest.mark.parametrize("kind", ["window", "none"])
def test_nodes_of_a_small_set_have_one_shard_in_common_at_most(kind: str) -> None:
    sizes = (100,) * 14
    readers: dict[int, set[int]] = {}
    for rank in range(8):
        order = make_order(kind, sizes, batch_size=4, rank=rank, world_size=8, nodes=2)
        for share in order.batches(3):
            for shard in set((share.positions // 100).tolist()):
                readers.setdefault(shard, set()).add(rank // 4)
    assert len(readers) == 14
    assert sum(len(nodes) > 1 for nodes in readers.values()) <= 1


HUGE_SHARDS = np.full(600_000, 1666)
HUGE_SHARDS[:400_000] += 1  # 1,000,000,000 samples


def make_huge(kind: str, rank: int = 0, nodes: int = 128) -> Order:
    return make_order(
        kind,
        HUGE_SHARDS,
        batch_size=64,
        window_shards=8,
        rank=rank,
        world_size=1024,
        nodes=nodes,
    )


@pytest.mark.parametrize("nodes", [1, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_batch_of_a_billion_samples_is_there_at_once(kind: str, nodes: int) -> None:
    order = make_huge(kind, rank=777, nodes=nodes)
    assert order.epochs.samples == 10**9
    for number in (0, 10_000):
        tracemalloc.start()
        start_s = time.thread_time()  # not that of others
        share = order.batches(2)[number]
        took_s = time.thread_time() - start_s
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(share.positions) == 64
        assert took_s < 1
        assert most < 100 << 20


@pytest.mark.parametrize("kind", ["window", "none"])
def test_1024_ranks_on_128_nodes_share_an_epoch(kind: str) -> None:
    """1,200,000 samples in 12,000 shards: all that each rank serves."""
    sizes = np.resize([99, 101], 12_000)
    nodes_of = np.zeros((len(sizes), 128), bool)
    times = np.zeros(sizes.sum(), np.int64)
    batches = set()
    starts = starts_of(sizes)
    for rank in range(1024):
        order = make_order(kind, sizes, rank=rank, world_size=1024, nodes=128)
        shares = list(order.batches(1))
        positions = np.array(once(shares))
        batches.add(len(shares))
        times[positions] += 1
        nodes_of[np.searchsorted(starts, positions, side="right") - 1, rank // 8] = True
    assert batches == {74}
    assert (times == 1).all()
    alone = (nodes_of.sum(axis=1) == 1).mean()
    print(f"shards read by one node only: {alone:.2%}")
    assert alone >= 0.95


def test_1024_ranks_on_128_nodes_share_a_billion_samples() -> None:
    epochs = make_epochs("window", HUGE_SHARDS)
    orders = [make_order(epochs, batch_size=64, rank=r, world_size=1024, nodes=128) for r in range(1024)]
    assert {len(order) for order in orders} == {15259}
    runs = [order.run for order in orders[::8]]
    assert [order.run for order in orders] == [run for run in runs for _ in range(8)]
    assert [stop for _, stop in runs[:-1]] == [start for start, _ in runs[1:]]
    assert (runs[0][0], runs[-1][1]) == (0, 10**9)
    assert sum(order.rank_samples() for order in orders) == 10**9
    ends = orders[8 * 77 :][:8:7]
    places = [np.concatenate([order.places(number)[0] for number in range(15259)]) for order in ends]
    assert [len(part) for part in places] == [order.rank_samples() for order in ends]
    assert min(part.min() for part in places) == runs[77][0]
    assert max(part.max() for part in places) == runs[77][1] - 1


def test_windows_of_a_node_are_those_of_its_run_alone() -> None:
    starts = starts_of((166,) * 600)
    seen = []
    for run in ((0, 7812), (7812, 15_625)):
        positions = Windows(starts, 0, 0, 8, run).at(np.arange(*run))
        assert len(set(positions.tolist())) == run[1] - run[0]
        seen.append(positions)
    assert not np.isin(*seen).any()
    shards = [set((positions // 166).tolist()) for positions in seen]
    assert len(shards[0] & shards[1]) == 1, "the one at the end of one run, and the start of the next"


@pytest.mark.parametrize("nodes", [1, 128])
def test_a_window_over_a_billion_samples_mixes_as_a_true_permutation_does(nodes: int) -> None:
    """Sampled: 2,000,000 places in a row, of samples that were stored shuffled, of 1,000 classes."""
    run = make_huge("window", rank=800, nodes=nodes).run
    first = run[0] + 1_000_000
    order = Windows(starts_of(HUGE_SHARDS), 3, 1, 8, run).at(np.arange(first, first + 2_000_000))
    labels = shuffled(10**9, 9, 9).at(order) % 1000
    rng = np.random.default_rng(0)
    truth, _ = quality(np.arange(len(order)), rng.integers(0, 1000, len(order)), 256)
    windowed, _ = quality(np.arange(len(order)), labels, 256)
    assert abs(windowed / truth - 1) < 0.01
    assert (np.abs(np.diff(order)) == 1).mean() < 3 * 2 / (1666 * 8)
    shards = np.searchsorted(starts_of(HUGE_SHARDS), order, side="right") - 1
    assert len(np.unique(shards)) < 1.01 * 2_000_000 / 1666 + 16, "no more shards than it needs"
    batch = shards[:256]
    assert len(np.unique(batch)) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_is_what_its_parts_make_listed(kind: str) -> None:
    """Place by place, against all of an epoch sorted by time, and occurrences counted."""
    counts = (1000, 900, 37)
    parts = tuple(make_epochs(kind, sizes) for sizes in (SHARDS, (40, 13, 27), (50, 50)))
    for epoch in (0, 1, 5):
        listed = []
        for part, count in zip(parts, counts, strict=True):
            epochs = [
                part.arrangement(e).at(np.arange(part.samples))
                for e in range(epoch * count // part.samples, (epoch * count + count - 1) // part.samples + 1)
            ]
            listed.append(np.concatenate(epochs)[epoch * count % part.samples :][:count])
        times = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        offsets = np.repeat([0, 1000, 1080], counts)
        expected = (np.concatenate(listed) + offsets)[np.argsort(times, kind="stable")]
        seen: dict[int, int] = {}
        for rank, world_size in ((0, 1), (1, 3)):
            order = make_order(
                MixedEpochs(parts=parts, counts=counts),
                batch_size=16,
                last="drop",
                rank=rank,
                world_size=world_size,
            )
            for number, share in enumerate(order.batches(epoch)):
                start = number * 16 * world_size + rank * 16
                assert share.positions.tolist() == expected[start : start + 16].tolist()
                if world_size == 1:
                    assert share.occurrences is not None
                    for position, before in zip(
                        share.positions.tolist(), share.occurrences.tolist(), strict=True
                    ):
                        assert before == seen.get(position, 0)
                        seen[position] = before + 1


def test_a_mixture_of_a_billion_samples_is_asked_anywhere() -> None:
    parts = (make_epochs("full", HUGE_SHARDS), make_epochs("window", HUGE_SHARDS), make_epochs("full"))
    order = make_order(
        MixedEpochs(parts=parts, counts=(10**9, 10**9, 3000)),
        batch_size=64,
        last="drop",
        rank=5,
        world_size=1024,
    )
    start_s = time.thread_time()  # not that of others
    share = order.batches(1)[10_000]
    assert time.thread_time() - start_s < 1
    assert abs((share.positions < 10**9).sum() - 32) <= 1
    numbers, _ = merge((10**9, 10**9, 3000), 10**9, 10**9 + 1000)
    assert abs(np.bincount(numbers)[0] - 500) <= 1


@pytest.mark.parametrize("shuffle", ["full", "window"])
def test_what_is_converted_is_served_by_places(converted: dict[str, Path], shuffle: str) -> None:
    data = open_split(converted["shards"], "train")
    epochs = Epochs(shard_starts=data.shard_starts, kind=shuffle, seed=3)
    with build_loader(data.path, shuffle=shuffle, seed=3) as loader:
        assert (
            ids_of(loader) == np.asarray(data.ids[:])[epochs.arrangement(0).at(np.arange(len(data)))].tolist()
        )


def test_the_measure_of_shuffling_tells_an_unshuffled_order() -> None:
    labels = np.arange(4000) // 80
    mixed, _ = quality(np.random.default_rng(0).permutation(4000), labels, 64)
    windows = served(make_order("window", (100,) * 40, window_shards=2))
    for order in (np.arange(4000), windows):  # of a tree stored class by class
        assert quality(order, labels, 64)[0] < 0.6 * mixed
    assert quality(np.arange(4000), labels, 64)[1] == 1


@pytest.mark.parametrize("count", [1000, 100_000])
def test_a_rejected_sample_does_not_change_the_order_of_the_others(count: int) -> None:
    among_all = served(make_order("full", (count,)), 2)
    for gone in (0, count // 2, count - 1):
        left = np.delete(np.arange(count), gone)
        part = make_order("full", (count - 1,), chosen=(left, count))
        assert np.array_equal(left[served(part, 2)], among_all[among_all != gone])

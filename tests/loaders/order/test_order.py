"""Orders of converted datasets: computed batch by batch, in shards of their own for each node."""

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loaders.batch import Request
from loaders.order import Epochs, MixedEpochs, Order, Windows, merge, shuffled

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
@pytest.mark.parametrize("window", [1, 8])
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


@pytest.mark.parametrize("count", [1000, 100_000])
def test_a_part_is_served_in_the_order_that_it_has_among_all(count: int) -> None:
    """So a rejected sample does not change the order of the others."""
    among_all = served(make_order("full", (count,)), 2)
    some = np.flatnonzero(np.random.default_rng(0).random(count) < 0.3)
    for left in (some, *(np.delete(np.arange(count), gone) for gone in (0, count // 2, count - 1))):
        part = make_order("full", (len(left),), chosen=(left, count))
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

    def make_ranks(of_node: int, size: int) -> list[Order]:
        world = {"world_size": nodes * of_node, "nodes": nodes, "batch_size": size, "last": last}
        return [make_order(kind, shards, window_shards=2, rank=r, **world) for r in range(nodes * of_node)]

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
    if nodes == 1 and last == "pad" and count:
        every = np.concatenate([request.positions for of_rank in batches for request in of_rank])
        most = -(-global_size // count) + 1
        assert np.bincount(every).max() <= most, "what fills up is spread over all"
    alone = zip(*(order.batches(1) for order in make_ranks(1, batch_size * ranks)), strict=True)
    assert [sorted(once(list(of_ranks))) for of_ranks in global_batches] == [
        sorted(once(list(of_nodes))) for of_nodes in alone
    ]


@pytest.mark.parametrize(("count", "last", "sizes"), [
    (10, "partial", [4, 3, 3]), (9, "partial", [4, 3, 2]), (8, "partial", [4, 4]), (3, "partial", [3]),
    (10, "pad", [4, 4, 4]), (3, "pad", [4]),
    (10, "drop", [4, 4]), (8, "drop", [4, 4]), (3, "drop", []), (0, "drop", []), (0, "partial", []),
])  # fmt: skip
def test_what_fills_no_batch_is_shared_out_filled_up_or_dropped(
    count: int, last: str, sizes: list[int]
) -> None:
    order = make_order("none", (count,), batch_size=4, last=last)
    assert [len(request.positions) for request in order.batches(0)] == sizes
    assert served(order).tolist() == list(range(min(count, sum(sizes))))


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


def make_huge(kind: str, rank: int = 0) -> Order:
    world = {"rank": rank, "world_size": 1024, "nodes": 128}
    return make_order(kind, HUGE_SHARDS, batch_size=64, window_shards=8, **world)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_batch_of_a_billion_samples_is_there_at_once(kind: str) -> None:
    order = make_huge(kind, rank=777)
    assert order.epochs.samples == 10**9
    for number in (0, 10_000):
        tracemalloc.start()
        start_s = time.thread_time()  # not that of others
        request = order.batches(2)[number]
        took_s = time.thread_time() - start_s
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(request.positions) == 64
        assert took_s < 1
        assert most < 100 << 20


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


def test_a_window_over_a_billion_samples_mixes_as_a_true_permutation_does() -> None:
    """Sampled: 2,000,000 places in a row, of samples that were stored shuffled, of 1,000 classes."""
    run = make_huge("window", rank=800).run
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


def test_the_measure_of_shuffling_tells_an_unshuffled_order() -> None:
    labels = np.arange(4000) // 80
    mixed, _ = quality(np.random.default_rng(0).permutation(4000), labels, 64)
    windows = served(make_order("window", (100,) * 40, window_shards=2))
    for order in (np.arange(4000), windows):  # of a tree stored class by class
        assert quality(order, labels, 64)[0] < 0.6 * mixed
    assert quality(np.arange(4000), labels, 64)[1] == 1

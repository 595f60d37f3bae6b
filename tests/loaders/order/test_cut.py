"""Which part of an epoch each rank serves in which batch."""

from collections.abc import Iterable
from itertools import chain, product

import numpy as np
import pytest

from loaders.batch import Request
from loaders.order.order import Batches, Epochs, Order


def cut(count: int, batch_size: int, last: str, rank: int = 0, world_size: int = 1) -> Batches:
    """One rank's batches of so many samples, in stored order."""
    epochs = Epochs(shard_starts=np.array([0, count]), kind="none", seed=0)
    order = Order(epochs=epochs, batch_size=batch_size, last=last, rank=rank, world_size=world_size)
    return order.batches(0)


def batch_count(samples: int, batch_size: int, last: str, world_size: int = 1) -> int:
    whole, rest = divmod(samples, batch_size * world_size)
    return whole + (rest > 0 and last != "drop")


def served(shares: Iterable[Request]) -> list[int]:
    """Positions, without those that fill up."""
    return [i for share in shares for i in share.positions[: len(share.positions) - share.padding].tolist()]


@pytest.mark.parametrize(("count", "last", "sizes"), [
    (10, "partial", [4, 3, 3]), (9, "partial", [4, 3, 2]), (8, "partial", [4, 4]), (3, "partial", [3]),
    (10, "pad", [4, 4, 4]), (3, "pad", [4]),
    (10, "drop", [4, 4]), (8, "drop", [4, 4]), (3, "drop", []), (0, "drop", []), (0, "partial", []),
])  # fmt: skip
def test_cut(count: int, last: str, sizes: list[int]) -> None:
    shares = cut(count, 4, last)
    assert [len(share.positions) for share in shares] == sizes
    assert served(shares) == list(range(min(count, sum(sizes))))


@pytest.mark.parametrize("world_size", range(1, 9))
def test_every_rank_serves_as_many_batches_and_every_sample_once(world_size: int) -> None:
    for count, batch_size in product(range(1, 71), range(1, 9)):
        ranks = [cut(count, batch_size, "partial", rank, world_size) for rank in range(world_size)]
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
        worlds = [n for n in (1, 2, 3, 4, 6, 8, 24) if global_size % n == 0]
        batches = []
        for world_size in worlds:
            parts = [cut(count, global_size // world_size, last, r, world_size) for r in range(world_size)]
            batches.append([served(of_ranks) for of_ranks in zip(*parts, strict=True)])
        assert all(others == batches[0] for others in batches)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 24, 70, 100])
@pytest.mark.parametrize("last", ["pad", "drop"])
def test_ranks_share_an_epoch_in_whole_batches(count: int, last: str, world_size: int) -> None:
    ranks = [cut(count, 4, last, rank, world_size) for rank in range(world_size)]
    global_size = 4 * world_size
    assert [len(shares) for shares in ranks] == [batch_count(count, 4, last, world_size)] * world_size
    assert all(len(share.positions) == 4 for share in chain(*ranks))
    if last == "drop":
        assert sorted(served(chain(*ranks))) == list(range(count // global_size * global_size))
    else:
        assert sorted(served(chain(*ranks))) == list(range(count))
        positions = [i for share in chain(*ranks) for i in share.positions.tolist()]
        most = -(-global_size // max(1, count)) + 1
        assert max(np.bincount(positions, minlength=1)) <= most, "what fills up is spread over all"

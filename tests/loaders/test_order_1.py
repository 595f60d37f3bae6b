"""Orders that are listed, of raw trees and of weights, stay what they were."""

from collections.abc import Callable
from hashlib import sha256
from itertools import product

import numpy as np
import pytest

from loaders.order.listed import EpochOrder, Order
from loaders.order.mixed import MixedOrder

IDS = np.random.default_rng(7).permutation(1300)[:1000]
SHARDS = (100,) * 7 + (75,) * 4
WEIGHTS = np.random.default_rng(8).random(1000)
EPOCHS = (0, 1, 5)


def make_order(kind: str, weighted: bool, last: str, rank: int, world_size: int) -> EpochOrder:
    return EpochOrder(
        ids=IDS,
        shard_samples=SHARDS,
        kind=kind,
        seed=3,
        batch_size=16,
        last=last,
        window_shards=3,
        rank=rank,
        world_size=world_size,
        weights=WEIGHTS if weighted else None,
    )


def make_mixture(kind: str, last: str, rank: int, world_size: int) -> MixedOrder:
    parts = tuple(
        EpochOrder(ids=np.arange(n), shard_samples=(n // 4,) * 4, kind=kind, seed=3, batch_size=16, last=last)
        for n in (400, 72, 160)
    )
    return MixedOrder(
        parts=parts, counts=(400, 300, 20), batch_size=16, last=last, rank=rank, world_size=world_size
    )


def digest(make: Callable[[str, int, int], Order]) -> str:
    """Of what is served: every rank of several worlds, every `last`, several epochs."""
    sums = sha256()
    for last, world_size in product(("partial", "pad", "drop"), (1, 3, 8)):
        for rank, epoch in product(range(world_size), EPOCHS):
            order = make(last, rank, world_size)
            shares = list(order.batches(epoch))
            assert len(shares) == order.batch_count()
            for positions, padding, occurrences in shares:
                assert positions.dtype == np.int64
                sums.update(f"{positions.tolist()} {padding} ".encode())
                sums.update(f"{None if occurrences is None else occurrences.tolist()}\n".encode())
    return sums.hexdigest()[:16]


GOLDEN = {
    "full": "8e942251ea57e10a",
    "full, weighted": "9b2189e9772a03a5",
    "full, mixed": "61fc890a2bc61d96",
    "window": "127d0f619ea61145",
    "window, weighted": "735f8e13bff152aa",
    "window, mixed": "d10a280cc7936c59",
    "none": "a0416daa6acdfdb5",
    "none, weighted": "0a622f2ec9257802",
    "none, mixed": "c144af260d6230a2",
}


@pytest.mark.parametrize("kind", ["full", "window", "none"])
def test_an_order_of_version_1_is_what_it_always_was(kind: str) -> None:
    """Recorded with release 0.3.0, so that a run that began with it goes on with the same batches."""
    got = {
        kind: digest(lambda last, rank, world: make_order(kind, False, last, rank, world)),
        f"{kind}, weighted": digest(lambda last, rank, world: make_order(kind, True, last, rank, world)),
        f"{kind}, mixed": digest(lambda last, rank, world: make_mixture(kind, last, rank, world)),
    }
    assert got == {name: GOLDEN[name] for name in got}

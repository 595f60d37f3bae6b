"""Which version of an order a folder gets: by the version of its manifest."""

from pathlib import Path

import numpy as np
import pytest

from loaders.dataset import open_split
from loaders.order import full_order, window_order
from loaders.orders.arrangements import Shuffled, Windows
from tests.building import build_loader
from tests.loader_contract import ids_of

OLD = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("version", [2, 3, 4])
def test_what_older_versions_converted_is_served_in_the_order_that_it_always_had(version: int) -> None:
    data = open_split(OLD / f"version-{version}" / "shards", "train")
    counts = tuple(np.asarray(data.shard_samples).tolist())
    for shuffle, order in (("full", full_order(data.ids, 3, 0)), ("window", window_order(counts, 3, 0, 8))):
        with build_loader(data.path, shuffle=shuffle, seed=3, ranks_per_node=1) as loader:
            assert ids_of(loader) == data.ids[order].tolist()
            assert "nodes" not in loader.state_dict()


def test_what_is_converted_now_is_served_by_places(converted: dict[str, Path]) -> None:
    data = open_split(converted["shards"], "train")
    places, ids = np.arange(len(data)), np.asarray(data.ids[:])
    whole = (0, len(data))
    for shuffle, order in (
        ("full", Shuffled(len(data), 3, 0).at(places)),
        ("window", Windows(data.shard_starts, 3, 0, 8, whole).at(places)),
    ):
        with build_loader(data.path, shuffle=shuffle, seed=3) as loader:
            assert ids_of(loader) == ids[order].tolist()

"""The order that is served, by places."""

from pathlib import Path

import numpy as np

from loaders.dataset import open_split
from loaders.order.arrangements import Shuffled, Windows
from tests.building import build_loader
from tests.loader_contract import ids_of


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

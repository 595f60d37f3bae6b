"""Ranks of several nodes: each node reads shards of its own, which its ranks share."""

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from loaders.dataset import open_split
from loaders.settings import find_nodes
from precache import convert
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import small_recipe
from tests.loader_contract import ids_of


@pytest.fixture(scope="module")
def shards(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 24 shards of 3 pictures."""
    path = tmp_path_factory.mktemp("nodes") / "shards"
    convert(raw_tree, path, small_recipe("shards", size=16, shard_bytes=3 * 16 * 16 * 3), workers=0)
    return path


def shared_shards(path: Path, by_rank: list[tuple[int, list[int]]]) -> int:
    """How many shards several nodes served of; `by_rank`: node and ids of each rank, together all."""
    data = open_split(path, "train")
    ids = np.asarray(data.ids[:]).tolist()
    assert sorted(i for _, of_rank in by_rank for i in of_rank) == sorted(ids)
    shard_of = dict(zip(ids, data.locate(np.arange(len(data)))[0].tolist(), strict=True))
    readers = {(shard_of[i], node) for node, of_rank in by_rank for i in of_rank}
    return len(readers) - len(data.files)


@pytest.mark.parametrize("shuffle", ["window", False])
def test_each_node_reads_shards_of_its_own(shards: Path, shuffle: str | bool) -> None:
    for per_node, most in ((3, 1), (2, 2)):
        settings = {"shuffle": shuffle, "batch_size": 2, "world_size": 6, "per_node": per_node}
        with ExitStack() as at_end:
            ranks = [at_end.enter_context(build_loader(shards, rank=rank, **settings)) for rank in range(6)]
            for _ in range(2):
                ids = [(rank // per_node, ids_of(loader)) for rank, loader in enumerate(ranks)]
                assert shared_shards(shards, ids) <= most


def test_a_state_of_another_number_of_nodes_is_refused(shards: Path) -> None:
    settings = {"batch_size": 2, "rank": 0, "world_size": 4}
    for shuffle in ("window", "full"):
        with (
            build_loader(shards, shuffle=shuffle, per_node=2, **settings) as loader,
            build_loader(shards, shuffle=shuffle, **settings) as other,
        ):
            state = json.loads(json.dumps(loader.state_dict()))
            if shuffle == "full":
                other.load_state_dict(state)
            else:
                with pytest.raises(SettingError, match="taken with nodes 2, the loader has 1"):
                    other.load_state_dict(state)


def test_nodes_that_torchrun_runs_alike_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another launcher, or nodes of different sizes, leave it open, all ranks share each shard."""
    for ranks, nodes, world_size, found in (
        ("4", "2", 8, 2), ("8", "1", 8, 1), ("4", "2", 7, 1), ("4", "2", 1, 1), ("8", None, 16, 1),
        ("x", "2", 8, 1), (None, "2", 2, 1),
    ):  # fmt: skip
        for name, value in (("LOCAL_WORLD_SIZE", ranks), ("GROUP_WORLD_SIZE", nodes)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        assert find_nodes(None, world_size) == found
    assert find_nodes(2, 8) == 4
    with pytest.raises(SettingError, match="per_node 3 does not divide world_size 8; give"):
        find_nodes(3, 8)

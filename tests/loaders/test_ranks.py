"""Ranks as torchrun starts them: real processes, told nothing but the path; shards of each node."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from loaders.dataset import open_split
from loaders.settings import find_nodes
from precache import convert
from precache.errors import SettingError
from precache.example_data.sample_tree import make_sample
from tests.building import build_loader
from tests.command import ROOT
from tests.conftest import IMAGES, small_recipe
from tests.loader_contract import ids_of

PROGRAM = """
import json, sys
import torch.distributed as dist
import loaders

dist.init_process_group("gloo")
path, out = sys.argv[1:]
served = {}
for last, batch_size in (("partial", 4), ("partial", 1), ("pad", 4), ("drop", 4)):
    reading, sampling = loaders.Reading(workers=1), loaders.Sampling(last=last)
    with loaders.build(path, batch_size=batch_size, sampling=sampling, reading=reading) as loader:
        served[f"{last} {batch_size}"] = [
            [(batch.ids.tolist(), batch.ids[~batch.padding].tolist()) for batch in loader] for _ in range(2)
        ]
        assert [len(epoch) for epoch in served[f"{last} {batch_size}"]] == [len(loader)] * 2
with open(f"{out}/{dist.get_rank()}.json", "w") as file:
    json.dump(served, file)
dist.destroy_process_group()
"""


def launch(program: str, world_size: int, folder: Path, *arguments: object) -> None:
    """Run `program` under torchrun."""
    file = folder / "program.py"
    file.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    result = subprocess.run(
        [*command, str(world_size), str(file), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("world_size", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_serve_each_sample_once_in_as_many_batches(
    world_size: int, converted: dict[str, Path], tmp_path: Path
) -> None:
    path, count = converted["shards"], IMAGES
    if world_size == 8:  # more than there are pictures
        make_sample(tmp_path / "tree", images=(count := 5), classes=2, like="caltech", workers=0)
        convert(tmp_path / "tree", path := tmp_path / "tiny", small_recipe("shards"), workers=0)
    launch(PROGRAM, world_size, tmp_path, path, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world_size)]
    for setting, epoch in product(ranks[0], range(2)):
        batches = [rank[setting][epoch] for rank in ranks]
        once = [i for of_rank in batches for _, ids in of_rank for i in ids]
        dropped = count % (4 * world_size) if setting == "drop 4" else 0
        assert len(once) == len(set(once)) == count - dropped
        for of_ranks in zip(*batches, strict=True):
            sizes = [len(ids) for ids, _ in of_ranks]
            assert max(sizes) - min(sizes) <= (setting == "partial 4")


@pytest.mark.parametrize("shuffle", ["window", False])
def test_each_node_reads_shards_of_its_own(converted: dict[str, Path], shuffle: str | bool) -> None:
    path = converted["shards"]
    data = open_split(path, "train")
    shard_of = dict(zip(data.ids.tolist(), data.locate(np.arange(IMAGES))[0].tolist(), strict=True))
    for per_node, most in ((3, 1), (2, 2)):
        settings = {"shuffle": shuffle, "batch_size": 2, "world_size": 6, "per_node": per_node}
        with ExitStack() as at_end:
            ranks = [at_end.enter_context(build_loader(path, rank=rank, **settings)) for rank in range(6)]
            for _ in range(2):
                ids = {(rank // per_node, i) for rank, loader in enumerate(ranks) for i in ids_of(loader)}
                assert len(ids) == IMAGES
                readers = {(node, shard_of[i]) for node, i in ids}
                assert len(readers) - len(data.files) <= most


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

"""Ranks as torchrun starts them, in real processes without rank settings; shards of each node."""

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
from precache import SettingError
from tests.building import build_loader
from tests.command import ROOT
from tests.conftest import IMAGES
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


def test_ranks_serve_each_sample_once_in_as_many_batches(converted: dict[str, Path], tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(PROGRAM)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    result = subprocess.run(
        [sys.executable, *command, program, converted["shards"], tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for setting, epoch in product(ranks[0], range(2)):
        batches = [rank[setting][epoch] for rank in ranks]
        unpadded = [i for rank_batches in batches for _, ids in rank_batches for i in ids]
        dropped = IMAGES % 12 if setting == "drop 4" else 0
        assert len(unpadded) == len(set(unpadded)) == IMAGES - dropped
        for global_batch in zip(*batches, strict=True):
            sizes = [len(ids) for ids, _ in global_batch]
            assert max(sizes) - min(sizes) <= (setting == "partial 4")


@pytest.mark.parametrize("shuffle", ["window", False])
def test_each_node_reads_shards_of_its_own(converted: dict[str, Path], shuffle: str | bool) -> None:
    path = converted["shards"]
    data = open_split(path, "train")
    shard_of = dict(zip(data.ids.tolist(), data.locate(np.arange(IMAGES))[0].tolist(), strict=True))
    for per_node, max_shared in ((3, 1), (2, 2)):
        settings = {"shuffle": shuffle, "batch_size": 2, "world_size": 6, "per_node": per_node}
        with ExitStack() as stack:
            ranks = [stack.enter_context(build_loader(path, rank=rank, **settings)) for rank in range(6)]
            for _ in range(2):
                ids = {(rank // per_node, i) for rank, loader in enumerate(ranks) for i in ids_of(loader)}
                assert len(ids) == IMAGES
                readers = {(node, shard_of[i]) for node, i in ids}
                assert len(readers) - len(data.files) <= max_shared


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"])
def test_launcher_variables_are_ignored_if_empty_and_named_if_wrong(
    name: str, converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers leave variables empty, and scripts set 0 processes if nothing is launched."""

    def serve(text: str) -> tuple[int, list[int]]:
        monkeypatch.setenv(name, text)
        with build_loader(converted["shards"], shuffle="window", world_size=2, rank=1) as loader:
            return loader.spec.workers, ids_of(loader)

    monkeypatch.delenv(name, raising=False)
    unset = serve("")
    for text in ("0", "-1", " 1 "):
        assert serve(text) == unset
    for text in ("abc", "1.5", "0x2"):
        with pytest.raises(SettingError, match=f"{name} .*{text}"):
            serve(text)

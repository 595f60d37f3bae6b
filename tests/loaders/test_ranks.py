"""Ranks as torchrun starts them: real processes, gloo, one loader each, nothing passed but the path."""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from precache import convert
from precache.sample import make_sample
from tests.command import ROOT
from tests.conftest import IMAGES, small_recipe

PROGRAM = """
import json, sys
import torch.distributed as dist
import loaders

dist.init_process_group("gloo")
path, out = sys.argv[1:]
served = {}
for last in ("partial", "pad", "drop"):
    with loaders.build(path, batch_size=4, last=last, workers=1) as loader:
        served[last] = [[batch.ids.tolist() for batch in loader] for _ in range(2)]
        assert [len(epoch) for epoch in served[last]] == [len(loader)] * 2
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


def run_ranks(path: Path, world_size: int, folder: Path) -> list[dict[str, list[list[list[int]]]]]:
    launch(PROGRAM, world_size, folder, path, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5 pictures: fewer than 8 ranks."""
    root = tmp_path_factory.mktemp("tiny")
    make_sample(root / "tree", images=5, classes=2, workers=0)
    convert(root / "tree", root / "out", small_recipe("shards"), workers=0)
    return root / "out"


@pytest.mark.parametrize("world_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 8))])
def test_ranks_serve_each_sample_once(
    world_size: int, converted: dict[str, Path], tiny: Path, tmp_path: Path
) -> None:
    path, count = (tiny, 5) if world_size == 8 else (converted["shards"], IMAGES)
    ranks = run_ranks(path, world_size, tmp_path)
    for epoch in range(2):
        served = {
            last: [[i for batch in rank[last][epoch] for i in batch] for rank in ranks]
            for last in ("partial", "pad", "drop")
        }
        assert sorted(chain(*served["partial"])) == list(range(count))
        assert set(chain(*served["pad"])) == set(range(count))
        assert len({len(ids) for ids in served["pad"]}) == 1
        dropped = list(chain(*served["drop"]))
        assert len(dropped) == len(set(dropped)) == count // (4 * world_size) * 4 * world_size

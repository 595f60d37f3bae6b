"""Other libraries' loaders do the work that ours do: every picture, its label, uint8, the size asked for."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.measure.candidates import Candidate
from bench.measure.comparison import compare
from bench.measure.peers import PeerCandidate, choose_peers, limits, run_peer, write_data
from bench.measure.settings import Settings
from bench.peers import serving, writing
from bench.peers.serving import PEERS, Work
from precache.errors import DatasetError, WorkerError
from precache.sources.tree import scan_tree
from tests.command import ROOT
from tests.conftest import IMAGES, STORED_SIZE
from tests.test_layers import imports

SIZE, BATCH = 42, 16  # 42 is what validation shows of 48, which is stored
INSTALLED_WITH_TESTS = [
    ("gather", "shards"), ("npy", "npy"), ("webdataset-pil", "webdataset"),
    ("dali-files", "dali"), ("dali-files", "webdataset"), ("dali-raw", "raw"), ("imagefolder", "raw"),
]  # fmt: skip
TRIAL = {"batch_size": BATCH, "size": SIZE, "workers": 1, "warmup": 0}


@pytest.fixture(scope="module")
def folders(
    raw_tree: Path, converted: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """What the peers read that are installed with the tests."""
    (peer,) = choose("npy", [raw_tree, converted["shards"]], tmp_path_factory.mktemp("peers"))
    write_data(peer, 2)
    return {**converted, "raw": raw_tree, "npy": peer.path}


def choose(name: str, paths: list[Path], peer_data: Path) -> list[PeerCandidate]:
    return choose_peers([name], paths, SIZE, sys.executable, peer_data)


@pytest.mark.parametrize(("name", "folder"), INSTALLED_WITH_TESTS)
def test_each_epoch_has_every_picture_with_its_label(
    name: str, folder: str, folders: dict[str, Path]
) -> None:
    if name.startswith("dali"):
        pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    stored = 0 if folder == "raw" else STORED_SIZE
    start_epoch = PEERS[name].open(Work(folders[folder], stored, SIZE, BATCH, 2))
    expected = Counter(sample.label for sample in scan_tree(folders["raw"]).samples)
    orders = []
    for _ in range(2):
        served: list[int] = []
        for images, labels in start_epoch():
            assert len(images) == len(labels) <= BATCH
            assert str(images.dtype).endswith("uint8")
            assert tuple(images.shape[1:]) in ((SIZE, SIZE, 3), (3, SIZE, SIZE))
            served.extend(np.asarray(labels).ravel().tolist())
        if name.startswith("dali"):  # its shuffle buffer holds pictures back over the end of an epoch
            assert len(served) == IMAGES
            assert set(served) <= expected.keys()
        else:
            assert Counter(served) == expected
        orders.append(served)
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


def test_the_scripts_run_alone_and_import_nothing_of_ours(converted: dict[str, Path], tmp_path: Path) -> None:
    for module in (serving, writing):
        names = imports(Path(str(module.__file__)))
        assert not {name for name in names if name.split(".")[0] in ("precache", "loaders", "bench")}, module
    command = [sys.executable, ROOT / "bench/peers/serving.py", "gather", converted["shards"]]
    flags = f"--stored {STORED_SIZE} --size {SIZE} --batch-size {BATCH} --batches 7 --warmup 1 --workers 2"
    run = subprocess.run(
        [*command, *flags.split()], cwd=tmp_path, capture_output=True, check=True, timeout=60
    )
    answer = json.loads(run.stdout)
    # two batches went before: 16 16 6 of the first epoch, 16 16 16 16 of the second
    assert answer["images"] == 6 * BATCH + IMAGES % BATCH
    assert (len(answer["batch_s"]), answer["epoch_starts"]) == (7, [3])


def test_data_is_written_once_and_only_from_the_same_tree_and_bad_peers_are_named(
    raw_tree: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    (peer,) = choose("npy", [raw_tree], folders["npy"].parent)
    images = peer.path / "images.npy"
    assert np.load(images, mmap_mode="r").shape == (IMAGES, STORED_SIZE, STORED_SIZE, 3)
    written_ns = images.stat().st_mtime_ns
    write_data(peer, 1)
    assert images.stat().st_mtime_ns == written_ns
    with pytest.raises(DatasetError, match=r"was written from .*/tree, not from .*/other; remove it"):
        write_data(replace(peer, source=tmp_path / "other"), 1)
    with pytest.raises(DatasetError, match="peer dali-files reads dali or webdataset, and"):
        choose("dali-files", [raw_tree], tmp_path)
    (limit,) = limits([folders["shards"], raw_tree])
    with pytest.raises(WorkerError, match=r"size 64 is more than .* stores \(48\)"):
        run_peer(limit, batches=1, **{**TRIAL, "size": 64})


@pytest.mark.usefixtures("trials_here")
def test_peers_are_rows_and_what_ours_are_compared_with(folders: dict[str, Path], tmp_path: Path) -> None:
    paths = [folders["raw"], folders["shards"]]
    peers = [*limits(paths), *choose("npy", paths, folders["npy"].parent)]
    missing = replace(peers[-1], path=tmp_path / "gone", source=tmp_path / "nowhere")
    settings = Settings(trainer="none", device=torch.device("cpu"), repeats=1, batches=7, **TRIAL)
    result = compare([Candidate("shards", folders["shards"])], settings, peers=[*peers, missing])
    ours, limit, npy = result.rows
    assert [row.peer for row in result.rows] == [False, True, True]
    assert missing.label in result.skipped
    assert ours.of_limit is not None
    assert ours.of_limit.median == pytest.approx(ours.loader.median / limit.loader.median)
    assert (ours.over.keys(), npy.over) == ({"npy"}, {})
    # 7 timed batches after the first, epochs of 5: one begins
    assert all(row.epoch_gap_s is not None and row.epoch_gap_s > 0 for row in result.rows)

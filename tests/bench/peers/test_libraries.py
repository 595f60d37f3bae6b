"""Loaders of other libraries serve every picture with its label, as uint8, in the size asked for."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from bench.measure.candidates import Candidate
from bench.measure.comparison import Comparison, compare
from bench.measure.peers import (
    PeerCandidate,
    choose_peers,
    limit_candidates,
    read_version,
    run_peer,
    write_data,
    write_squares,
)
from bench.measure.settings import Settings
from bench.peers import libraries
from bench.peers.libraries import PEERS, Work
from bench.report.loaders import LIMIT
from precache.errors import DatasetError, SettingError, WorkerError
from precache.formats import FORMATS
from precache.sources.tree import scan_tree
from tests.command import ROOT
from tests.conftest import IMAGES, STORED_SIZE
from tests.test_layers import imports

SIZE, BATCH = 42, 16  # validation crops 42 pixels out of 48, which are stored
TRIAL = {"batch_size": BATCH, "size": SIZE, "workers": 1, "warmup": 0}


def choose(name: str, paths: list[Path], peer_data: Path) -> PeerCandidate:
    (peer,) = choose_peers([name], paths, SIZE, sys.executable, peer_data)
    return peer


@pytest.fixture
def missing_python(tmp_path: Path) -> str:
    """Return the path of a Python that has none of the libraries."""
    folder = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (python,) = [*folder.glob("bin/python"), *folder.glob("Scripts/python.exe")]
    return str(python)


@pytest.mark.parametrize("name", PEERS)
def test_each_epoch_serves_every_picture_with_its_label(
    name: str, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    peer = PEERS[name]
    for module in peer.modules:
        pytest.importorskip(module, reason=f"pip install {peer.package}")
    candidate = choose(name, [raw_tree, converted["shards"], converted["webdataset"]], tmp_path)
    write_data(candidate, 2)
    start_epoch = peer.serve(Work(candidate.path, STORED_SIZE, SIZE, BATCH, 2))
    expected = Counter(sample.label for sample in scan_tree(raw_tree).samples)
    orders = []
    for _ in range(2):
        epoch_labels: list[int] = []
        for images, labels in start_epoch():
            assert len(images) == len(labels) <= BATCH
            assert str(images.dtype).endswith("uint8")
            assert tuple(images.shape[1:]) in ((SIZE, SIZE, 3), (3, SIZE, SIZE))
            epoch_labels.extend(np.asarray(labels).ravel().tolist())
        assert Counter(epoch_labels) == expected
        orders.append(epoch_labels)
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


def test_libraries_imports_nothing_of_this_project() -> None:
    names = imports(Path(str(libraries.__file__)))
    assert not {name for name in names if name.split(".")[0] in ("precache", "loaders", "bench")}


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_reads_a_format_that_precache_or_a_peer_writes(name: str) -> None:
    reads = PEERS[name].reads
    assert reads in FORMATS or PEERS[reads].write is not None


def test_serve_prints_timed_batches_and_starts_of_epochs(converted: dict[str, Path], tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "bench/peers/libraries.py", "serve", LIMIT, converted["shards"]]
    flags = f"--stored {STORED_SIZE} --size {SIZE} --batch-size {BATCH} --batches 7 --warmup 1 --workers 2"
    run = subprocess.run(
        [*command, *flags.split()], cwd=tmp_path, capture_output=True, check=True, timeout=60
    )
    answer = json.loads(run.stdout)
    # after two untimed batches: 16 16 6 of the first epoch, 16 16 16 16 of the second
    assert answer["images"] == 6 * BATCH + IMAGES % BATCH
    assert (len(answer["batch_s"]), answer["epoch_starts"]) == (7, [3])


def measure_batch(images: np.ndarray, labels: int, folder: Path) -> dict[str, Any]:
    """Measure a peer that serves this batch, with so many labels, again and again."""
    peer = replace(PEERS[LIMIT], serve=lambda work: lambda: [(images, np.zeros(labels))])
    return libraries.measure(peer, Work(folder, STORED_SIZE, SIZE, 4, 1), warmup=0, batches=2)


@pytest.mark.parametrize(
    ("shape", "dtype", "labels", "mention"),
    [
        ((4, SIZE, SIZE, 3), "float32", 4, "float32"),
        ((4, 3, SIZE + 1, SIZE), "uint8", 4, f"{SIZE}x{SIZE}"),
        ((4, SIZE, SIZE, 3), "uint8", 3, "4 pictures with 3 labels"),
    ],
)
def test_a_peer_that_serves_another_form_is_refused(
    shape: tuple[int, ...], dtype: str, labels: int, mention: str, tmp_path: Path
) -> None:
    with pytest.raises(libraries.PeerError, match=mention):
        measure_batch(np.zeros(shape, dtype), labels, tmp_path)


@pytest.mark.parametrize("shape", [(4, SIZE, SIZE, 3), (4, 3, SIZE, SIZE)])
def test_a_peer_may_serve_channels_first_or_last(shape: tuple[int, ...], tmp_path: Path) -> None:
    assert measure_batch(np.zeros(shape, np.uint8), 4, tmp_path)["images"] == 8


def test_writers_get_upright_squares_and_grey_for_damage(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # a quarter turn
    lying = Image.new("RGB", (40, 20), "red")
    lying.paste("blue", (0, 0, 20, 20))
    lying.save(tmp_path / "lying.png", exif=exif)
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8 no picture")
    pictures = libraries.PictureDataset(
        [str(tmp_path / name) for name in ("lying.png", "broken.jpg")], [3, 4], 8
    )
    (upright, label), (grey, _) = pictures[0], pictures[1]
    assert label == 3
    assert upright[0, 0].tolist() == [0, 0, 255], "blue is above"
    assert upright[0, -1].tolist() == [0, 0, 255], "blue is above"
    assert grey.tolist() == np.full((8, 8, 3), 128).tolist()


@pytest.mark.skipif(sys.platform == "win32", reason="runs a shell script")
def test_a_writer_that_leaves_pictures_out_is_refused(raw_tree: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\nmkdir "$5"; echo x > "$5/data"; echo '{"version": "none"}'\n""")
    python.chmod(0o755)
    with pytest.raises(WorkerError, match=f"mds wrote 2 bytes .* {IMAGES} pictures of 48x48"):
        write_squares("mds", scan_tree(raw_tree), tmp_path / "out", 48, 1, str(python))


def test_data_of_another_tree_is_refused_and_kept(raw_tree: Path, tmp_path: Path) -> None:
    peer = choose("mds", [raw_tree], tmp_path)
    assert peer.path == tmp_path / f"mds-{STORED_SIZE}"
    peer.path.mkdir()
    (peer.path / "made-from.json").write_text(json.dumps(str(peer.source)))
    write_data(peer, 1)  # the folder is there
    with pytest.raises(DatasetError, match=r"/tree.*/other") as raised:
        write_data(replace(peer, source=tmp_path / "other"), 1)
    assert raised.value.path == peer.path
    assert "--peer-data" in raised.value.remedy
    assert [path.name for path in peer.path.iterdir()] == ["made-from.json"]


def test_a_peer_without_a_folder_of_its_format_is_refused(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match="peer webdataset-pil reads webdataset") as raised:
        choose("webdataset-pil", [raw_tree, converted["shards"]], tmp_path)
    assert "DATA" in raised.value.remedy


def test_a_peer_without_a_tree_to_write_from_is_refused(converted: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="peer ffcv") as raised:
        choose("ffcv", [converted["shards"]], tmp_path)
    assert "raw tree" in raised.value.remedy


def test_an_unknown_peer_is_refused(raw_tree: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="unknown peer 'fcv'"):
        choose("fcv", [raw_tree], tmp_path)


def test_a_missing_library_is_named_with_its_install_command(missing_python: str) -> None:
    with pytest.raises(WorkerError, match=r"ffcv .*python -m pip install ffcv"):
        read_version("ffcv", missing_python)


def test_a_peer_refuses_a_size_above_the_stored_one(converted: dict[str, Path], raw_tree: Path) -> None:
    (limit,) = limit_candidates([converted["shards"], raw_tree])
    with pytest.raises(WorkerError, match=r"size 64 .*\(48\)"):
        run_peer(limit, batches=1, **{**TRIAL, "size": 64})


@pytest.mark.usefixtures("trials_here")
def test_compare_has_a_row_for_each_peer_and_skips_missing_ones(
    raw_tree: Path, converted: dict[str, Path], missing_python: str, tmp_path: Path
) -> None:
    shards = converted["shards"]
    missing = PeerCandidate("mds", tmp_path / "mds", STORED_SIZE, missing_python, raw_tree)
    settings = Settings(trainer="none", device=torch.device("cpu"), repeats=1, batches=7, **TRIAL)
    comparison = Comparison(
        candidates=[Candidate("shards", shards)],
        settings=settings,
        peers=[*limit_candidates([shards]), missing],
    )
    result = compare(comparison)
    shards_row, limit_row = result.rows
    assert [bool(row.key.get("peer")) for row in result.rows] == [False, True]
    assert "-m pip install mosaicml-streaming" in result.skipped[missing.label]
    shards_rate, limit_rate = [row.values["loader_images_per_s"].median for row in result.rows]
    assert shards_row.values["limit_ratio"].median == pytest.approx(shards_rate / limit_rate)
    # an epoch has 5 batches: a second one begins within 7 timed batches after the first
    assert "epoch_gap_ratio" in limit_row.values
    assert all(row.values["epoch_gap_ratio"].median > 0 for row in result.rows)

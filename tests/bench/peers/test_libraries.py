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

SIZE, BATCH = 42, 16  # 42 is what validation shows of 48, which is stored
TRIAL = {"batch_size": BATCH, "size": SIZE, "workers": 1, "warmup": 0}


def choose(name: str, paths: list[Path], peer_data: Path) -> PeerCandidate:
    (peer,) = choose_peers([name], paths, SIZE, sys.executable, peer_data)
    return peer


@pytest.fixture
def missing_python(tmp_path: Path) -> str:
    """A Python that has none of the libraries."""
    folder = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (python,) = [*folder.glob("bin/python"), *folder.glob("Scripts/python.exe")]
    return str(python)


@pytest.mark.parametrize("name", PEERS)
def test_each_epoch_has_every_picture_with_its_label(
    name: str, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    peer = PEERS[name]
    for module in peer.modules:
        pytest.importorskip(module, reason=f"pip install {peer.package}")
    chosen = choose(name, [raw_tree, converted["shards"], converted["webdataset"]], tmp_path)
    write_data(chosen, 2)
    start_epoch = peer.serve(Work(chosen.path, STORED_SIZE, SIZE, BATCH, 2))
    expected = Counter(sample.label for sample in scan_tree(raw_tree).samples)
    orders = []
    for _ in range(2):
        served: list[int] = []
        for images, labels in start_epoch():
            assert len(images) == len(labels) <= BATCH
            assert str(images.dtype).endswith("uint8")
            assert tuple(images.shape[1:]) in ((SIZE, SIZE, 3), (3, SIZE, SIZE))
            served.extend(np.asarray(labels).ravel().tolist())
        assert Counter(served) == expected
        orders.append(served)
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


def test_the_file_of_peers_imports_nothing_of_ours() -> None:
    names = imports(Path(str(libraries.__file__)))
    assert not {name for name in names if name.split(".")[0] in ("precache", "loaders", "bench")}


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_reads_our_format_or_what_a_peer_writes(name: str) -> None:
    reads = PEERS[name].reads
    assert reads in FORMATS or PEERS[reads].write is not None


def test_timed_batches_and_starts_of_epochs_are_told(converted: dict[str, Path], tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "bench/peers/libraries.py", "serve", LIMIT, converted["shards"]]
    flags = f"--stored {STORED_SIZE} --size {SIZE} --batch-size {BATCH} --batches 7 --warmup 1 --workers 2"
    run = subprocess.run(
        [*command, *flags.split()], cwd=tmp_path, capture_output=True, check=True, timeout=60
    )
    answer = json.loads(run.stdout)
    # two batches went before: 16 16 6 of the first epoch, 16 16 16 16 of the second
    assert answer["images"] == 6 * BATCH + IMAGES % BATCH
    assert (len(answer["batch_s"]), answer["epoch_starts"]) == (7, [3])


@pytest.mark.parametrize(
    ("shape", "dtype", "labels", "said"),
    [
        ((4, SIZE, SIZE, 3), "float32", 4, "expected uint8"),
        ((4, 3, SIZE + 1, SIZE), "uint8", 4, f"expected uint8 of {SIZE}x{SIZE}"),
        ((4, SIZE, SIZE, 3), "uint8", 3, "4 pictures with 3 labels"),
        ((4, SIZE, SIZE, 3), "uint8", 4, None),
        ((4, 3, SIZE, SIZE), "uint8", 4, None),
    ],
)
def test_a_loader_that_does_other_work_is_refused(
    shape: tuple[int, ...], dtype: str, labels: int, said: str | None, tmp_path: Path
) -> None:
    batch = (np.zeros(shape, dtype), np.zeros(labels))
    peer = replace(PEERS[LIMIT], serve=lambda work: lambda: [batch])
    work = Work(tmp_path, STORED_SIZE, SIZE, 4, 1)
    if said is None:
        assert libraries.measure(peer, work, warmup=0, batches=2)["images"] == 8
    else:
        with pytest.raises(libraries.PeerError, match=said):
            libraries.measure(peer, work, warmup=0, batches=2)


def test_writers_are_handed_upright_squares_also_of_damage(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # to be turned by a quarter
    lying = Image.new("RGB", (40, 20), "red")
    lying.paste("blue", (0, 0, 20, 20))
    lying.save(tmp_path / "lying.png", exif=exif)
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8 no picture")
    pictures = libraries.PictureDataset(
        [str(tmp_path / name) for name in ("lying.png", "broken.jpg")], [3, 4], 8
    )
    (upright, label), (grey, _) = pictures[0], pictures[1]
    assert label == 3
    assert upright[0, 0].tolist() == upright[0, -1].tolist() == [0, 0, 255], "blue is above"
    assert grey.tolist() == np.full((8, 8, 3), 128).tolist()


@pytest.mark.skipif(sys.platform == "win32", reason="runs a shell script")
def test_a_writer_that_leaves_pictures_out_is_refused(raw_tree: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\nmkdir "$5"; echo x > "$5/data"; echo '{"version": "none"}'\n""")
    python.chmod(0o755)
    with pytest.raises(WorkerError, match=f"mds wrote 2 bytes .*; {IMAGES} pictures of 48x48 have"):
        write_squares("mds", scan_tree(raw_tree), tmp_path / "out", 48, 1, str(python))


def test_data_of_another_tree_is_refused_and_left_alone(raw_tree: Path, tmp_path: Path) -> None:
    chosen = choose("mds", [raw_tree], tmp_path)
    assert chosen.path == tmp_path / f"mds-{STORED_SIZE}"
    chosen.path.mkdir()
    (chosen.path / "made-from.json").write_text(json.dumps(str(chosen.source)))
    write_data(chosen, 1)  # it is there
    with pytest.raises(DatasetError, match=r"was written from .*/tree, not from .*/other; remove it"):
        write_data(replace(chosen, source=tmp_path / "other"), 1)
    assert [path.name for path in chosen.path.iterdir()] == ["made-from.json"]


def test_what_a_peer_lacks_is_named_with_the_remedy(
    raw_tree: Path, converted: dict[str, Path], missing_python: str, tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match="peer webdataset-pil reads webdataset, and no such folder"):
        choose("webdataset-pil", [raw_tree, converted["shards"]], tmp_path)
    with pytest.raises(DatasetError, match="does not exist; name the raw tree"):
        choose("ffcv", [converted["shards"]], tmp_path)
    with pytest.raises(SettingError, match="unknown peer 'fcv'"):
        choose("fcv", [raw_tree], tmp_path)
    with pytest.raises(WorkerError, match=r"lacks ffcv .*; run: .*python -m pip install ffcv"):
        read_version("ffcv", missing_python)
    (limit,) = limit_candidates([converted["shards"], raw_tree])
    with pytest.raises(WorkerError, match=r"size 64 is more than .* stores \(48\)"):
        run_peer(limit, batches=1, **{**TRIAL, "size": 64})


@pytest.mark.usefixtures("trials_here")
def test_peers_are_rows_that_ours_are_compared_with(
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
    ours, limit = result.rows
    assert [bool(row.key.get("peer")) for row in result.rows] == [False, True]
    assert "-m pip install mosaicml-streaming" in result.skipped[missing.label]
    rates = [row.values["loader_images_per_s"].median for row in (ours, limit)]
    assert ours.values["limit_ratio"].median == pytest.approx(rates[0] / rates[1])
    # 7 timed batches after the first, epochs of 5: one begins
    assert all(row.values["epoch_gap_ratio"].median > 0 for row in result.rows)

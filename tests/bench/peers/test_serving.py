"""Other libraries' loaders do the work that ours do: every picture, its label, uint8, the size asked for."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.measure.comparison import Arm, RunSettings, compare
from bench.measure.peer_arm import PeerArm, choose_peers, limits, run_peer, write_data
from bench.peers import libraries, serving
from bench.peers.libraries import Work
from bench.peers.serving import LIMIT, PEERS
from bench.report import loaders_page as page
from bench.report import table as report
from bench.report.result import Result
from precache.errors import DatasetError, SettingError, WorkerError
from precache.formats import FORMATS
from precache.sources.tree import scan_tree
from tests.command import ROOT
from tests.conftest import IMAGES, STORED_SIZE
from tests.test_layers import imports

SIZE, BATCH = 42, 16  # 42 is what validation shows of 48, which is stored
INSTALLED_WITH_TESTS = [
    ("gather", "shards"),
    ("gather-crop", "shards"),
    ("npy", "npy"),
    ("webdataset-pil", "webdataset"),
    ("dali-files", "dali"),
    ("dali-files", "webdataset"),
    ("dali-raw", "raw"),
    ("imagefolder", "raw"),
    ("imagefolder-turbo", "raw"),
]
OTHERS = [
    ("ffcv-raw", "ffcv"), ("ffcv-rrc", "ffcv"), ("ffcv-jpeg", "ffcv"), ("litdata-raw", "litdata"),
    ("litdata-jpeg", "litdata"), ("mds-raw", "streaming"), ("spdl", "spdl.io"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(
    raw_tree: Path, converted: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """What the peers read that are installed with the tests."""
    (arm,) = choose("npy", [raw_tree, converted["shards"]], tmp_path_factory.mktemp("peers"))
    write_data(arm, 2)
    return {**converted, "raw": raw_tree, "npy": arm.path}


def choose(name: str, paths: list[Path], peer_data: Path) -> list[PeerArm]:
    return choose_peers([name], paths, SIZE, sys.executable, peer_data)


def spec(**settings: object) -> RunSettings:
    defaults = {
        "trainers": ("none",), "batch_size": BATCH, "workers": 1, "size": SIZE, "warmup": 0, "batches": 7,
        "repeats": 2, "device": torch.device("cpu"),
    }  # fmt: skip
    return RunSettings(**{**defaults, **settings})


@pytest.mark.parametrize(("name", "folder"), INSTALLED_WITH_TESTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_has_every_picture_with_its_label(
    name: str, folder: str, workers: int, folders: dict[str, Path]
) -> None:
    if name.startswith("dali"):
        pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    stored = 0 if folder == "raw" else STORED_SIZE
    start_epoch = PEERS[name].open(Work(folders[folder], stored, SIZE, BATCH, workers))
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


def test_the_limit_copies_what_the_shards_hold(converted: dict[str, Path]) -> None:
    shards = [
        shard
        for path in sorted(converted["shards"].glob("train-*.safetensors"))
        for shard in FORMATS["shards"].read_shard(path)
    ]
    margin = (STORED_SIZE - SIZE) // 2
    centre = slice(margin, margin + SIZE)
    stored = {(sample.label, np.asarray(sample.data)[centre, centre].tobytes()) for sample in shards}
    start_epoch = libraries.gather(Work(converted["shards"], STORED_SIZE, SIZE, BATCH, 2))
    served = {
        (label, image.tobytes())
        for images, labels in start_epoch()
        for image, label in zip(images, labels.tolist(), strict=True)
    }
    assert served == stored


@pytest.mark.timeout(300)  # FFCV compiles its pipelines
@pytest.mark.parametrize(("name", "module"), OTHERS)
def test_libraries_that_are_installed_serve_too(
    name: str, module: str, raw_tree: Path, tmp_path: Path
) -> None:
    pytest.importorskip(module)
    (arm,) = choose(name, [raw_tree], tmp_path)
    write_data(arm, 1)
    trial, _ = run_peer(arm, batch_size=BATCH, size=SIZE, workers=1, warmup=0, batches=4)
    assert trial.images == 3 * BATCH + IMAGES % BATCH  # the rest of the first epoch


def test_the_script_runs_alone_and_imports_nothing_else_of_ours(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    for module in (serving, libraries):
        ours = {
            name for name in imports(Path(module.__file__)) if name.split(".")[0] in ("precache", "loaders")
        }
        assert not ours
        used = {name.rsplit(".", 1)[0] for name in imports(Path(module.__file__)) if name.startswith("bench")}
        assert used <= {"bench.peers.libraries"}
    command = [sys.executable, ROOT / "bench/peers/serving.py", "gather", converted["shards"]]
    flags = f"--stored {STORED_SIZE} --size {SIZE} --batch-size {BATCH} --batches 7 --warmup 1 --workers 2"
    run = subprocess.run(
        [*command, *flags.split()], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    answer = json.loads(run.stdout)
    # two batches went before: 16 16 6 of the first epoch, 16 16 16 16 of the second
    assert answer["images"] == 6 * BATCH + IMAGES % BATCH
    assert len(answer["batch_s"]) == 7
    assert answer["epoch_starts"] == [3]
    assert (answer["size"], answer["dtype"]) == (SIZE, "uint8")
    assert answer["first_batch_s"] > 0


def test_a_peer_serves_no_more_than_is_stored(converted: dict[str, Path]) -> None:
    (arm,) = limits([converted["shards"]])
    with pytest.raises(WorkerError, match=r"size 64 is more than .* stores \(48\)"):
        run_peer(arm, batch_size=BATCH, size=64, workers=1, warmup=0, batches=1)


@pytest.fixture(scope="module")
def result(folders: dict[str, Path]) -> Result:
    paths = [folders["raw"], folders["shards"]]
    peers = [*limits(paths), *choose("npy", paths, folders["npy"].parent)]
    arms = [Arm("shards", folders["shards"]), Arm("synthetic", folders["shards"])]
    return compare(arms, spec(), peers=peers)


def test_peers_are_rows_and_what_ours_are_compared_with(result: Result) -> None:
    assert not result.skipped
    rows = {row.backend: row for row in result.rows}
    assert list(rows) == ["shards", "synthetic", "gather", "npy"]
    assert [row.peer for row in rows.values()] == [False, False, True, True]
    for name in ("gather", "npy"):
        assert (rows[name].trainer, rows[name].together, rows[name].ratio) == (None, None, None)
        assert rows[name].loader.low > 0
    ours, limit, npy = rows["shards"], rows[LIMIT], rows["npy"]
    assert ours.rates.of_limit is not None
    assert npy.rates.of_limit is not None
    assert (
        ours.loader.low / limit.loader.high
        <= ours.rates.of_limit.median
        <= ours.loader.high / limit.loader.low
    )
    assert ours.rates.over.keys() == {"npy"}
    assert rows["synthetic"].rates.of_limit is None
    assert rows["synthetic"].rates.over == npy.rates.over == {}
    # 7 timed batches after the first, epochs of 5: one begins
    assert all(row.batches.epoch_gap_s is not None and row.batches.epoch_gap_s > 0 for row in rows.values())
    assert result.settings["peers"].keys() == {"gather", "npy"}


def test_peers_are_in_every_report(result: Result) -> None:
    again = Result.from_json(json.loads(json.dumps(result.to_json())))
    assert again.rows == result.rows
    titles = ["backend", "data", "loader", "of limit", "first s", "med ms", "p95 ms", "epoch gap"]
    assert report.columns(result) == titles
    (line,) = report.comparisons(result)
    assert line.startswith("shards on shards: ")
    assert "x npy (" in line
    assert line in page.html(result)
    assert line in report.markdown(result)
    assert f"peers: numpy {np.__version__}, torch {torch.__version__.split('+')[0]}" in report.conditions(
        result
    )
    legend = report.legend(result)
    assert all(f"{title}: " in legend for title in ("backend", "of limit", "first s", "med ms", "p95 ms"))


def test_without_an_epoch_in_the_timed_batches_there_is_no_gap(converted: dict[str, Path]) -> None:
    (row,) = compare([Arm("shards", converted["shards"])], spec(batches=3)).rows
    assert row.batches.epoch_gap_s is None
    assert row.rates.of_limit is None


def test_a_result_from_before_there_were_peers_is_read() -> None:
    result = Result.from_json(json.loads(Path(__file__).with_name("result-before-peers.json").read_text()))
    assert not any(row.peer or row.rates.over for row in result.rows)
    assert "verdict" in report.columns(result)
    assert report.comparisons(result) == []


RESULTS = sorted((ROOT / "bench/results").glob("*caltech101-*-xeon-2cpu*.json"))


@pytest.mark.parametrize("path", RESULTS or [Path("none")], ids=lambda p: p.stem)
def test_the_results_of_the_repository_are_read_and_name_no_folder_of_a_machine(path: Path) -> None:
    text = path.read_text()
    result = Result.from_json(json.loads(text))
    assert len(report.markdown(result).splitlines()) > len(result.rows)
    assert not any(f"/{folder}/" in text for folder in ("home", "root", "tmp", "Users"))


def test_data_is_written_once_and_only_from_the_same_tree(raw_tree: Path, tmp_path: Path) -> None:
    (arm,) = choose("npy", [raw_tree], tmp_path)
    assert arm.path == tmp_path / f"npy-{STORED_SIZE}"
    with pytest.raises(DatasetError, match=r"peer npy: .*npy-48 does not exist; name the raw tree"):
        choose("npy", [], tmp_path)
    write_data(arm, 1)
    images = np.load(arm.path / "images.npy", mmap_mode="r")
    assert images.shape == (IMAGES, STORED_SIZE, STORED_SIZE, 3)
    written_ns = (arm.path / "images.npy").stat().st_mtime_ns
    write_data(arm, 1)
    assert (arm.path / "images.npy").stat().st_mtime_ns == written_ns
    assert choose("npy", [], tmp_path)[0].source is None
    other = PeerArm(arm.name, arm.path, arm.stored, arm.quality, arm.python, tmp_path / "other")
    with pytest.raises(DatasetError, match=r"was written from .*/tree, not from .*/other; remove it"):
        write_data(other, 1)


def test_a_peer_that_cannot_run_is_skipped_with_the_reason(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    try:
        import ffcv  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("ffcv is installed")
    peers = choose("ffcv-raw", [raw_tree, converted["shards"]], tmp_path)
    result = compare([Arm("shards", converted["shards"])], spec(repeats=1), peers=peers)
    assert [row.backend for row in result.rows] == ["shards"]
    (reason,) = result.skipped.values()
    assert reason.endswith("No module named 'ffcv'")
    (tmp_path / "ffcv-48").mkdir(exist_ok=True)
    (arm,) = choose("ffcv-raw", [converted["shards"]], tmp_path)
    with pytest.raises(WorkerError, match=r"lacks ffcv .*-m pip install ffcv"):
        run_peer(arm, batch_size=BATCH, size=SIZE, workers=1, warmup=0, batches=1)


def test_bad_peers_are_named(raw_tree: Path, converted: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="unknown peer 'fcv'"):
        choose("fcv", [raw_tree], tmp_path)
    with pytest.raises(DatasetError, match="peer dali-files reads dali or webdataset, and"):
        choose("dali-files", [raw_tree], tmp_path)
    with pytest.raises(SettingError, match=r"/no/python: cannot be run; .*--peer-python"):
        choose_peers(["gather"], [converted["shards"]], SIZE, "/no/python", tmp_path)


def test_a_peer_is_measured_from_a_cold_cache_too(converted: dict[str, Path]) -> None:
    path = converted["shards"]
    result = compare([Arm("shards", path)], spec(repeats=1, cold=True), peers=limits([path]))
    gather = next(row for row in result.rows if row.peer)
    skipped = result.skipped.get(f"cold cache of gather on {path}", "")
    assert (gather.cold is None) == ("stay in memory" in skipped)
    assert (gather.cold is None) == (result.rows[0].cold is None)

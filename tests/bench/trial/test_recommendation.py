"""`bench recommend`: the sample, the command on a small tree, and what it prints. Never how fast."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bench.cli import main
from bench.commands import recommend as command
from bench.findings import forecast as model
from bench.findings import stats
from bench.machine.disk import Disk
from bench.machine.measurements import Hardware, Measurement
from bench.trial import sampling
from bench.trial.recommendation import Check, Recommendation
from bench.trial.sampling import RecommendSpec
from precache import commandline
from precache.converted import open_dataset
from precache.errors import SettingError, SourceError
from precache.source import scan_tree
from tests.bench.findings.test_forecast import INPUTS, RAW, SHARDS, TARS
from tests.command import check_bad_input
from tests.conftest import IMAGES


def spec(scratch: Path, **settings: object) -> RecommendSpec:
    defaults = {
        "stored_size": 48, "quality": 95, "size": 32, "batch_size": 8, "workers": 2, "trainer": "emulated",
        "repeats": 1, "seconds": 0.01, "scratch": scratch,
    }  # fmt: skip
    return RecommendSpec(**{**defaults, **settings})


@pytest.fixture
def result() -> Recommendation:
    machine = {"cpu": "a CPU", "memory": "16 GiB", "accelerator": "none", "date": "2026-11-21"}
    reads = Measurement("disk, sequential read", "direct I/O", "MB/s", None, stats.Estimate(500, 490, 510))
    hardware = Hardware(machine, Disk("sda", False), (reads,), 1e5, None, 3)
    settings = {
        "pictures": 200, "sample_images": 1200, "stored_size": 256, "quality": 95, "batch_size": 64,
        "size": 224, "workers": 2, "trainer": "emulated", "repeats": 3, "others": 0.0,
    }  # fmt: skip
    predictions = model.predict([RAW, SHARDS, TARS], INPUTS)
    values, found = [110e6, 110e6, 112.2e6], [100e6, 99e6, 102e6]
    estimates = stats.estimate(values), stats.estimate(found), stats.ratio(values, found)
    checks = [Check("shards", "size", "B", *estimates)]
    return Recommendation(settings, hardware, INPUTS, [RAW, SHARDS, TARS], predictions, {}, checks)


def test_the_sample_is_like_the_tree_and_fills_all_workers(raw_tree: Path, tmp_path: Path) -> None:
    scan = scan_tree(raw_tree)
    settings = spec(tmp_path, pictures=20, seconds=0.1)
    trees = sampling.make_trees(scan, settings, tmp_path)
    small, large = scan_tree(trees.small), scan_tree(trees.large)
    assert len(small.samples) == trees.small_images == 20
    assert len(large.samples) == trees.large_images
    assert trees.large_images % 20 == 0
    shards = -(-trees.large_images // trees.shard_images)
    assert shards == 4  # two workers, two rounds
    assert settings.recipe("dali", trees.shard_images).samples_per_shard == trees.shard_images
    assert set(large.classes) <= set(scan.classes)
    assert trees.image_bytes == pytest.approx(scan.samples.file_bytes.mean(), rel=0.1)
    assert trees.image_bytes == pytest.approx(large.samples.file_bytes.mean())
    again = sampling.make_trees(scan, spec(tmp_path, pictures=20), tmp_path / "again")
    assert again.image_bytes == trees.image_bytes
    originals = {(raw_tree / ref.path).read_bytes() for ref in scan.samples}
    assert {(trees.large / ref.path).read_bytes() for ref in large.samples} <= originals


def test_a_loader_reads_the_sample_in_as_many_shards_as_the_tree_has(raw_tree: Path, tmp_path: Path) -> None:
    settings = spec(tmp_path, pictures=20)
    trees = sampling.make_trees(scan_tree(raw_tree), settings, tmp_path)
    per_shard = settings.recipe("webdataset").samples_per_shard
    for whole_images, shards in ((3 * per_shard - 5, 3), (10**9, 40)):
        folder = sampling.convert_for_loader(trees, whole_images, "webdataset", settings, tmp_path)
        each = -(-trees.large_images // shards)
        assert len(open_dataset(folder).manifest.shards) == -(-trees.large_images // each)
        shutil.rmtree(folder)


def test_damaged_pictures_are_no_part_of_the_sample(tmp_path: Path) -> None:
    (tmp_path / "tree/class").mkdir(parents=True)
    (tmp_path / "tree/class/bad.jpg").write_bytes(b"<html>")
    with pytest.raises(SourceError, match="none of 1 pictures taken from it can be decoded"):
        sampling.make_trees(scan_tree(tmp_path / "tree"), spec(tmp_path), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.timeout(600)  # four processes that import torch, each twice as long on a busy machine
def test_the_command_predicts_and_checks(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    quick = ["--repeats", "1", "--seconds", "0.1", "--pictures", "30", "--stored-size", "48", "--size", "32"]
    what_if = ["--cpus", "16", "--gpus", "2", "--trainer-rate", "3000", "--disk-mbps", "500"]
    arguments = ["recommend", str(raw_tree), *quick, *what_if, "--format", "webdataset", "--check"]
    paths = ["--scratch", str(tmp_path), "--json", str(tmp_path / "r.json")]
    assert commandline.run(main, "bench", [*arguments, *paths]) == 0
    printed = capfd.readouterr().out
    for mention in ("Predicted from the sample", "What if: 70 pictures, 16 CPUs", "2 x 3,000 images/s"):
        assert mention in printed
    assert all(len(line) <= 100 and "…" not in line for line in printed.splitlines())
    stored = json.loads((tmp_path / "r.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    raw, tars = stored["predictions"]
    assert raw["bytes"] == pytest.approx(sum(f.stat().st_size for f in raw_tree.rglob("*") if f.is_file()))
    assert (raw["conversion_s"], raw["epochs_to_pay"]) == (0, None)
    assert 0 < tars["bytes"] < 70 * 48 * 48 * 3 * 2
    for line in (raw, tars):
        assert 0 < line["cold_images_per_s"] <= line["warm_images_per_s"]
        assert 0 < line["trained_images_per_s"] <= line["warm_images_per_s"]
    assert stored["inputs"]["images"] == IMAGES
    quantities = [(check["name"], check["quantity"]) for check in stored["checks"]]
    both = [("webdataset", "loader"), ("webdataset", "with trainer")]
    assert quantities == [
        ("raw tree", "loader"), ("raw tree", "with trainer"),
        ("webdataset", "size"), ("webdataset", "conversion"), *both,
    ]  # fmt: skip
    assert 0 <= stored["settings"]["others"] <= 1
    assert stored["what_if"]["inputs"]["disk_bytes_per_s"] == 500e6
    assert stored["what_if"]["inputs"]["trainer_images_per_s"] == 3000


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["--gpus", "0"], ["gpus must be positive, got 0"]),
        (["--disk-mbps", "-1"], ["disk_mbps must be positive"]),
        (["--trainer-rate", "nan"], ["trainer_rate must be positive"]),
        (["--format", "tars"], ["unknown format 'tars'", "dali, shards, webdataset"]),
        (["--size", "300"], ["size must be an integer from 1 to 256"]),
        (["--json", "."], [".: is a folder; name a file in it"]),
        (["--seconds", "nan"], ["seconds must be positive, got nan"]),
        (["--scratch", "gone"], ["gone: no such folder"]),
        (["--trainer", "resnet51"], ["unknown trainer 'resnet51'"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], mentions: list[str], raw_tree: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = commandline.run(main, "bench", ["recommend", str(raw_tree), *arguments])
    check_bad_input(subprocess.CompletedProcess(arguments, code, *capfd.readouterr()), *mentions)


def test_the_tables_are_at_most_100_columns(result: Recommendation) -> None:
    huge = result.what_if(replace(INPUTS, images=10**9, train_images=10**9, cpus=1024, gpus=1024))
    for table in (
        command.prediction_table(huge.predictions),
        command.check_table(result),
    ):
        console = Console(width=200, record=True, highlight=False)
        console.print(table)
        lines = [line.rstrip() for line in console.export_text().splitlines()]
        assert max(map(len, lines)) <= 100


def test_the_advice_says_what_it_costs_and_brings(result: Recommendation) -> None:
    advice = command.advice(result.predictions, INPUTS)
    assert advice == (
        "Convert to shards: predicted 2,000 images/s instead of 1,000, of 2,000 that the trainer takes; "
        "converting takes 7.00 s and 1.12 GiB, and pays after 3 epochs."
    )
    slow = result.what_if(replace(INPUTS, trainer_images_per_s=500))
    assert command.advice(slow.predictions, slow.inputs).startswith("Leave the tree as it is")


def test_the_crossover_is_told_with_the_disk_beside_it(result: Recommendation) -> None:
    (sentence,) = command.crossover(result)
    assert "webdataset loads faster than raw pixels where the disk gives less than 600 MB/s" in sentence
    assert sentence.endswith("below that.")  # this disk gives 500
    fast = result.what_if(replace(INPUTS, disk_bytes_per_s=601e6))
    assert command.crossover(fast)[0].endswith("above that.")


def test_errors_are_shares_of_what_was_measured(result: Recommendation) -> None:
    assert result.checks[0].error == pytest.approx(0.1)
    assert result.to_json()["checks"][0]["error"] == pytest.approx(0.1)
    assert np.isclose(result.to_json()["crossovers_bytes_per_s"]["webdataset"], 600e6)


def test_bad_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="repeats must be an integer of at least 1, got 0"):
        spec(tmp_path, repeats=0)

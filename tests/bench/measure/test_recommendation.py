"""`bench recommend`: the sample, the command on a small tree, and what it prints. Never how fast."""

import json
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bench.cli import main
from bench.commands import recommend as command
from bench.machine.disk import Disk
from bench.machine.measurements import Hardware, Measurement
from bench.measure import recommendation, sampling
from bench.measure.loader_run import LoaderRun
from bench.measure.recommendation import Check, Recommendation
from bench.measure.sampling import RecommendSpec, Trees
from bench.report import forecast as model
from bench.report import stats
from bench.report.choice import RISK
from bench.report.forecast import RAW_NAME
from precache.console import commandline
from precache.dataset.converted import open_dataset
from precache.errors import SettingError, SourceError
from precache.sources.tree import scan_tree
from tests.bench.report.test_forecast import INPUTS, RAW, SHARDS, TARS, TODAY
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
        "pictures": 200, "sample_images": 1200, "stored_size": 448, "quality": 95, "batch_size": 64,
        "size": 224, "workers": 2, "trainer": "emulated:2000", "repeats": 3, "other_cpu": 0.0,
        "sample_pictures": 200, "check": "never", "augment": "train",
    }  # fmt: skip
    profiles = [TODAY, RAW, SHARDS, TARS]
    predictions = model.predict(profiles, INPUTS)
    values, found = [110e6, 110e6, 112.2e6], [100e6, 99e6, 102e6]
    estimates = stats.estimate(values), stats.estimate(found), stats.ratio(values, found)
    checks = [Check("shards", "size", "B", *estimates)]
    return Recommendation(settings, hardware, INPUTS, profiles, predictions, {}, checks)


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
    what_if = ["--cpus", "16", "--gpus", "2", "--disk-mbps", "500"]
    arguments = ["recommend", str(raw_tree), *quick, *what_if, "--format", "webdataset", "--check"]
    paths = ["--scratch", str(tmp_path), "--json", str(tmp_path / "r.json")]
    assert commandline.run(main, "bench", [*arguments, *paths]) == 0
    printed = capfd.readouterr().out
    for mention in (
        "Predicted from the sample",
        "What if: 70 pictures, 16 CPUs",
        "trainer 2 x ",
        "Rule: ",
    ):
        assert mention in printed
    assert all(len(line) <= 100 and "…" not in line for line in printed.splitlines())
    stored = json.loads((tmp_path / "r.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    today, raw, tars = stored["predictions"]
    assert (today["name"], today["bytes"]) == ("imagefolder", raw["bytes"])
    assert raw["bytes"] == pytest.approx(sum(f.stat().st_size for f in raw_tree.rglob("*") if f.is_file()))
    assert (raw["conversion_s"], raw["epochs_to_pay"]) == (0, None)
    assert 0 < tars["bytes"] < 70 * 48 * 48 * 3 * 2
    for line in (today, raw, tars):
        assert 0 < line["cold_images_per_s"] <= line["warm_images_per_s"]
        assert 0 < line["trained_images_per_s"] <= line["warm_images_per_s"]
    assert stored["inputs"]["images"] == IMAGES
    quantities = [(check["name"], check["quantity"]) for check in stored["checks"]]
    both = [("webdataset", "loader"), ("webdataset", "with trainer")]
    assert quantities == [
        ("imagefolder", "loader"), ("imagefolder", "with trainer"),
        ("raw tree", "loader"), ("raw tree", "with trainer"),
        ("webdataset", "size"), ("webdataset", "conversion"), *both,
    ]  # fmt: skip
    assert 0 <= stored["settings"]["other_cpu"] <= 1
    assert stored["settings"]["trainer"] == "emulated:h100"
    assert stored["what_if"]["inputs"]["disk_bytes_per_s"] == 500e6
    assert stored["what_if"]["inputs"]["gpus"] == 2


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["--gpus", "0"], ["gpus must be positive, got 0"]),
        (["--disk-mbps", "-1"], ["disk_mbps must be positive"]),
        (["--trainer-rate", "nan"], ["trainer_rate must be positive"]),
        (["--format", "tars"], ["unknown format 'tars'", "dali, shards, webdataset"]),
        (["--size", "300", "--stored-size", "256"], ["size must be an integer from 1 to 256"]),
        (["--size", "0"], ["size must be an integer of at least 1, got 0"]),
        (["--json", "."], [".: is a folder; name a file in it"]),
        (["--seconds", "nan"], ["seconds must be positive, got nan"]),
        (["--scratch", "gone"], ["gone: no such folder"]),
        (["--trainer", "resnet51"], ["unknown trainer 'resnet51'"]),
        (["--batch-size", "71"], ["batch_size 71 is more than the 70 pictures of an epoch"]),
        (["--check", "--batch-size", "71"], ["batch_size 71 is more than the 70 pictures"]),
        (["--repeats", "0"], ["repeats must be an integer of at least 1"]),
        (["--pictures", "0"], ["pictures must be an integer of at least 1"]),
        (["--quality", "101"], ["quality must be an integer from 1 to 100, got 101"]),
        (["--stored-size", "0"], ["size must be"]),
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
        command.prediction_table(huge.predictions, huge.inputs),
        command.check_table(result),
    ):
        console = Console(width=200, record=True, highlight=False)
        console.print(table)
        lines = [line.rstrip() for line in console.export_text().splitlines()]
        assert max(map(len, lines)) <= 100


def shown(result: Recommendation, capsys: pytest.CaptureFixture[str], **options: bool) -> str:
    command.show(result, None, **options)
    return " ".join(capsys.readouterr().out.split())


def test_the_answer_comes_first_and_the_rule_after_the_table(
    result: Recommendation, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(result, capsys)
    assert text.startswith("ImageFolder and DataLoader keep an accelerator of 2,000 images/s busy 30%")
    assert text.index("Change that line to `loaders.build`") < text.index("Convert to shards (7.00 s")
    assert text.index("shards *") < text.index("Rule: plenty of disk: shards (1.12 GiB, trainer busy 100%)")
    assert "trainer emulated:2000" in text
    assert "From a cold cache" not in text
    assert "From a cold cache" in shown(result, capsys, details=True)


def test_the_conditions_say_whether_checksums_are_compared(
    result: Recommendation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "page cache warm, checksums not compared" in shown(result, capsys)
    comparing = replace(result, settings={**result.settings, "check": "first-read"})
    assert "checksums" not in shown(comparing, capsys)


def test_a_smaller_stored_side_is_said_to_risk_accuracy(
    result: Recommendation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert RISK not in shown(result, capsys)
    assert RISK in shown(replace(result, settings={**result.settings, "stored_size": 256}), capsys)


def test_beside_other_busy_processes_no_format_is_named(
    result: Recommendation, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(replace(result, settings={**result.settings, "other_cpu": 0.31}), capsys)
    assert text.startswith("ImageFolder and DataLoader keep an accelerator of 2,000 images/s busy 30%")
    assert "of the time. Other processes took 31% of the CPUs" in " ".join(text.split())
    assert "Convert to" not in text
    assert "*" not in text
    busy = replace(result, settings={**result.settings, "other_cpu": 0.31})
    command.show(busy, busy.what_if(replace(INPUTS, gpus=2)))
    text = " ".join(capsys.readouterr().out.split())
    assert "What if" in text
    assert text.count("Other processes took") == text.count("Rule:") == 1


def test_no_error_is_printed_as_minus_zero(
    result: Recommendation, capsys: pytest.CaptureFixture[str]
) -> None:
    values = [99.99, 99.999]
    near = Check("dali", "size", "B", *map(stats.estimate, (values, [100.0] * 2, [0.9999, 0.99999])))
    assert "+0.0% +0% to +0%" in shown(replace(result, checks=[near]), capsys)


def test_a_prediction_that_is_far_off_says_so_and_why(
    result: Recommendation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "too high" not in shown(result, capsys)  # 10%
    found = [1e8, 1e8, 1e8]
    estimates = map(stats.estimate, ([1.4e8] * 3, found, [1.4] * 3))
    far = Check("dali", "loader", "images/s", *estimates)
    assert "loader of dali: the prediction is 40% too high: a run this short" in shown(
        replace(result, checks=[*result.checks, far]), capsys
    )


def test_a_turn_that_would_end_after_the_limit_is_not_begun(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little time there is, one is taken."""
    run = LoaderRun(1000.0, 2000.0, 900.0, 0.0)

    def measure(runs: Any, name: str, *_: object) -> None:
        runs.loaders.append(run)

    monkeypatch.setattr(recommendation, "_measure", measure)
    for limit_s, turns in ((1e-9, 1), (float("inf"), 3)):
        asked = spec(tmp_path, repeats=3, limit_s=limit_s)
        trees = Trees(tmp_path, tmp_path, 1, 2, 1, 1, 1e5)
        now_s = time.perf_counter()
        found, _ = recommendation._take_turns(
            [RAW_NAME], trees, scan_tree(raw_tree), asked, tmp_path, False, now_s, lambda: None
        )
        assert len(found[RAW_NAME].loaders) == turns


def test_large_pictures_are_fewer_where_time_is_short(raw_tree: Path, tmp_path: Path) -> None:
    scan = scan_tree(raw_tree)
    (tmp_path / "short").mkdir()
    trees = sampling.make_trees(scan, spec(tmp_path, pictures=60, limit_s=1e-9), tmp_path / "short")
    assert trees.pictures == sampling.SMALL_IMAGES
    trees = sampling.make_trees(scan, spec(tmp_path, pictures=60), tmp_path)
    assert trees.pictures == 60


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

"""The comparison on real loaders, with trainers slow enough to tell."""

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
import torch

from bench.machine import page_cache
from bench.measure.comparison import Arm, RunSettings, choose_arms, compare
from bench.measure.fresh import run_fresh
from bench.report import table as report
from bench.report.result import Result
from bench.report.verdict import LOADER_BINDS, NO_TRAINER
from loaders import dataset
from loaders.dataset import open_split
from precache.errors import DatasetError, SettingError, WorkerError
from precache.example_data.sample_tree import make_sample
from precache.sources.tree import scan_tree
from tests.conftest import IMAGES, STORED_SIZE

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
    ),
]


def spec(*trainers: str, **settings: object) -> RunSettings:
    defaults = {
        "batch_size": 8, "workers": 1, "size": 32, "warmup": 1, "batches": 4, "repeats": 2,
        "device": torch.device("cpu"),
    }  # fmt: skip
    return RunSettings(trainers=trainers, **{**defaults, **settings})


@pytest.fixture(scope="module")
def result(raw_tree: Path, converted: dict[str, Path]) -> Result:
    arms = choose_arms([raw_tree, *converted.values()], ["all"], Path("unused"))
    return compare(arms, spec("emulated:200", repeats=1))


def test_every_backend_reads_every_folder_that_it_can(result: Result) -> None:
    pairs = {(row.backend, row.data) for row in result.rows} | {
        (name.split(" on ")[0], "skipped") for name in result.skipped
    }
    assert pairs >= {("pytorch", "raw tree"), ("shards", "shards"), ("webdataset", "webdataset")}
    assert {data for backend, data in pairs if backend == "dali"} in (
        {"raw tree", "webdataset", "dali"},
        {"skipped"},
    )
    assert {data for backend, data in pairs if backend == "synthetic"} == {
        "raw tree", "shards", "webdataset", "dali",
    }  # fmt: skip


def test_the_result_says_which_pictures_each_arm_served(
    result: Result, raw_tree: Path, converted: dict[str, Path]
) -> None:
    assert 0 <= result.settings["other_cpu"] <= 1
    data = result.settings["data"]
    assert data.keys() == {f"{row.backend} on {row.data}" for row in result.rows}
    for name, path in (("pytorch on raw tree", raw_tree), ("shards on shards", converted["shards"])):
        split = open_split(path, "train")
        assert data[name] == {"samples": len(split.ids), "digest": split.digest}


def test_the_result_says_how_many_bytes_a_picture_takes(
    result: Result, raw_tree: Path, converted: dict[str, Path]
) -> None:
    found = {(row.backend, row.data): row.image_bytes for row in result.rows}
    scan = scan_tree(raw_tree)
    assert found["pytorch", "raw tree"] == scan.samples.file_bytes.sum() / IMAGES
    for name in ("shards", "webdataset"):
        assert found[name, name] == sum(open_split(converted[name], "train").shard_bytes) / IMAGES
    assert found["shards", "shards"] >= STORED_SIZE**2 * 3
    assert found["synthetic", "shards"] is None


def test_from_a_cache_nothing_is_read_or_decoded(raw_tree: Path) -> None:
    result = compare([Arm("pytorch", raw_tree)], spec("emulated:200", cache="ram", repeats=1))
    (row,) = result.rows
    assert result.settings["cache"] == "ram"
    assert row.image_bytes is None
    assert row.stages.rates.keys() == {"collate", "transfer", "compute"}
    assert "cache ram" in report.conditions(result)


def test_a_slow_trainer_is_kept_busy_by_fast_loaders(result: Result) -> None:
    for row in result.rows:
        assert row.trainer is not None
        assert row.ratio is not None
        assert 150 < row.trainer.median <= 200
        assert row.together.median <= 200.5
        assert row.loader.low > 0
        assert row.batches.first_batch_s.median > 0
        assert 0.04 <= row.batches.batch_s_median <= row.batches.batch_s_p95
    by_backend = {(row.backend, row.data): row for row in result.rows}
    ratio = by_backend["shards", "shards"].ratio
    assert ratio is not None
    assert ratio.median > 0.6, "of four batches a busy machine may delay one"


def test_a_trainer_faster_than_any_decoder_waits(raw_tree: Path) -> None:
    (row,) = compare([Arm("pytorch", raw_tree)], spec("emulated:1000000", size=224)).rows
    assert row.verdict == LOADER_BINDS
    assert row.ratio is not None
    assert row.ratio.high < 0.5


def test_without_a_trainer_the_loader_is_measured_alone(converted: dict[str, Path]) -> None:
    (row,) = compare([Arm("shards", converted["shards"])], spec("none")).rows
    assert (row.trainer, row.ratio, row.verdict) == (None, None, NO_TRAINER)
    assert row.loader == row.together


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_the_real_step_runs_in_the_same_comparison(converted: dict[str, Path], device: str) -> None:
    settings = {"batch_size": 2, "batches": 2, "repeats": 1, "device": torch.device(device)}
    rows = compare([Arm("shards", converted["shards"])], spec("emulated", "resnet50", **settings)).rows
    assert [row.trainer_name for row in rows] == ["emulated:h100", "resnet50"]
    assert all(row.trainer is not None and row.trainer.median > 0 for row in rows)


def test_what_cannot_run_is_skipped_with_the_reason(converted: dict[str, Path], tmp_path: Path) -> None:
    arms = [Arm("shards", converted["shards"]), Arm("webdataset", tmp_path / "webdataset")]
    result = compare(arms, spec("none"))
    assert len(result.rows) == 1
    assert list(result.skipped) == [f"webdataset on {tmp_path / 'webdataset'}"]
    with pytest.raises(DatasetError, match="nothing to measure: webdataset on"):
        compare(arms[1:], spec("none"))


def test_default_arms_are_the_folders_that_backends_are_made_for() -> None:
    arms = {arm.backend: arm.path.name for arm in choose_arms([], ["all"], Path("data"))}
    assert list(arms)[:2] == ["imagefolder", "pytorch"]
    assert arms == {
        "imagefolder": "raw",
        "dali": "dali", "nvjpeg": "raw", "pytorch": "raw", "shards": "shards", "synthetic": "raw",
        "webdataset": "webdataset",
    }  # fmt: skip


def test_a_folder_named_twice_is_measured_once(converted: dict[str, Path]) -> None:
    path = converted["shards"]
    assert choose_arms([path, path], ["shards"], Path("data")) == [Arm("shards", path)]


def test_a_tree_is_scanned_once_by_a_comparison(
    raw_tree: Path, converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned: list[Path] = []
    monkeypatch.setattr(dataset, "scan_tree", lambda path: scanned.append(path) or scan_tree(path))
    arms = choose_arms([raw_tree, *converted.values()], ["pytorch", "shards", "synthetic"], Path("unused"))
    compare(arms, spec("emulated:200", repeats=1))
    assert scanned == [raw_tree]


def test_pipes_and_dangling_links_in_a_tree_do_no_harm(raw_tree: Path, tmp_path: Path) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    os.mkfifo(tree / "001.anchor" / "pipe")
    (tree / "001.anchor" / "link.jpg").symlink_to("nowhere")
    assert len(compare([Arm("pytorch", tree)], spec("none")).rows) == 1


def test_a_folder_that_no_chosen_backend_reads_is_an_error(converted: dict[str, Path]) -> None:
    with pytest.raises(DatasetError, match="holds shards: none of it is read by backend webdataset"):
        choose_arms([converted["shards"]], ["webdataset"], Path("data"))
    with pytest.raises(SettingError, match="unknown backend 'dalli'"):
        choose_arms([], ["dalli"], Path("data"))


def test_a_result_survives_json(result: Result) -> None:
    again = Result.from_json(json.loads(json.dumps(result.to_json())))
    assert again.rows == result.rows
    assert again.machine == result.machine
    with pytest.raises(SettingError, match="not a result of 'bench loaders'"):
        Result.from_json({"rows": [{}]})


def test_a_result_says_what_one_needs_to_repeat_it(result: Result) -> None:
    text = report.conditions(result)
    for mention in ("CPUs", "torch", "batch 8 of 32x32", "1 workers", "page cache warm", "median of 1"):
        assert mention in text
    assert result.machine["date"] in text


def test_markdown_has_a_row_per_row(result: Result) -> None:
    lines = report.markdown(result).splitlines()
    assert len([line for line in lines if line.startswith("|")]) == len(result.rows) + 2
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [("batch_size", 0), ("batches", 0), ("repeats", 0), ("warmup", -1), ("size", 0), ("size", 8193)],
)
def test_a_bad_setting_is_named(setting: str, value: int) -> None:
    with pytest.raises(SettingError, match=f"{setting} must be an integer .*, got {value}"):
        spec("none", **{setting: value})


def test_an_arm_that_meets_a_damaged_picture_is_skipped_and_named(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    bad = sorted(tree.glob("*/*.jpg"))[5]
    bad.write_bytes(b"<html>")
    arms = choose_arms([tree, converted["shards"]], ["pytorch", "shards"], Path("unused"))
    result = compare(arms, spec("none", batches=20))
    assert [row.backend for row in result.rows] == ["shards"]
    assert list(result.skipped) == [f"pytorch on {tree}"]
    assert str(bad) in result.skipped[f"pytorch on {tree}"]
    with pytest.raises(DatasetError, match=f"nothing to measure: .*{bad}"):
        compare(arms[:1], spec("none", batches=20))


def test_a_batch_of_more_than_an_epoch_is_one_line(converted: dict[str, Path]) -> None:
    arms = choose_arms([converted["shards"]], ["shards", "synthetic"], Path("unused"))
    with pytest.raises(
        SettingError, match=r"batch_size 71 is more than the 70 pictures .*; choose a smaller"
    ):
        compare(arms, spec("none", batch_size=71))


def test_folders_of_different_trees_are_refused(converted: dict[str, Path], tmp_path: Path) -> None:
    smaller = tmp_path / "smaller"
    make_sample(smaller, images=40, classes=5, seed=1, like="caltech", workers=0)
    arms = [Arm("pytorch", smaller), Arm("shards", converted["shards"])]
    with pytest.raises(DatasetError, match=r"unequal work .*: 40 pictures; .*: 70 pictures"):
        compare(arms, spec("none"))


def test_a_cold_cache_is_measured_or_said_to_be_none(converted: dict[str, Path]) -> None:
    path = converted["shards"]
    result = compare([Arm("shards", path)], spec("none", cold=True))
    skipped = result.skipped.get(f"cold cache of shards on {path}", "")
    assert (result.rows[0].cold is None) == ("stay in memory" in skipped)
    assert result.settings["cold"] is True


def test_storage_is_not_told_apart_where_the_files_are_too_large_to_warm(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "warm", lambda path: False)
    arms = [Arm("shards", converted["shards"]), Arm("synthetic", converted["shards"])]
    result = compare(arms, spec("none"))
    assert result.settings["page_cache"].startswith("not warmed")
    shards, synthetic = result.rows
    assert "storage or collate" in shards.stages.rates
    assert "storage or collate" not in synthetic.stages.rates


def test_each_trial_is_a_process_of_its_own_that_starts_others_as_a_training_does() -> None:
    found = [run_fresh(process) for _ in range(2)]
    assert len({pid for pid, _ in found} | {os.getpid()}) == 3
    assert {method for _, method in found} == {multiprocessing.get_start_method()}


def process() -> tuple[int, str]:
    return os.getpid(), multiprocessing.get_start_method()


def test_a_trial_whose_process_dies_is_an_error() -> None:
    with pytest.raises(WorkerError, match="the process of a trial died"):
        run_fresh(os._exit, 1)


def test_a_fed_trainer_has_a_wait_and_a_step_of_every_batch(result: Result) -> None:
    for row in result.rows:
        assert len(row.batches.wait_s) == len(row.batches.step_s) == 4
        assert min(row.batches.step_s) >= 8 / 200
        assert all(0 <= first < 4 for first in row.batches.epoch_starts)
        assert row.batches.data_wait is not None
        assert row.batches.utilisation is not None
        assert 0 <= row.batches.data_wait.median <= 1
        assert 0 < row.batches.utilisation.median <= 1
        assert row.batches.first_step_s is not None
        assert row.batches.first_step_s.low >= 8 / 200
        assert row.stages.predicted == min(row.loader.median, row.trainer.median)
        assert row.stages.stalls.keys() == {"fetch", "prep", "transfer"}
        assert row.monitor is not None
        assert len(row.monitor.time_s) == len(row.monitor.series["cpu_share"]) > 0
        assert (row.advice.text == "") == (row.advice.changes == ()) == (row.backend == "synthetic")


def test_a_result_of_before_changes_were_kept_is_read(result: Result) -> None:
    older = json.loads(json.dumps(result.to_json()))
    for row in older["rows"]:
        assert (row.pop("changes") == []) == (row["backend"] == "synthetic")
    assert all(row.advice.changes == () for row in Result.from_json(older).rows)

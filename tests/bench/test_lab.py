"""Programs of `bench.lab`: the tables that they print; and the bottleneck that a comparison names."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import click
import cv2
import pytest
import torch
from click.testing import CliRunner

from bench.lab import (
    conversion,
    launching,
    libraries,
    listing,
    object_storage,
    operations,
    peers,
    recipes,
    stored_sizes,
    watch,
)
from bench.machine.hardware import is_installed
from bench.measure.candidates import Candidate
from bench.measure.comparison import Comparison, compare
from loaders.settings import AugmentName
from precache import Recipe, convert
from precache.errors import DatasetError
from precache.packages import DALI
from precache.pictures import images
from tests.bench.settings import quick
from tests.command import ROOT
from tests.test_layers import imports


def print_table(command: click.Command, *words: object) -> dict[str, list[str]]:
    """Run a program, and return the cells of each row of its table, by the first cell."""
    result = CliRunner().invoke(command, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    lines = [line.strip("| ").split(" | ") for line in result.output.splitlines() if line.startswith("|")]
    return {first: others for first, *others in lines[2:]}


def run_here(function: Callable[..., Any], *arguments: Any) -> Any:
    """Stand for `run_in_process`, since a new process imports torch for a second or two."""
    return function(*arguments)


@pytest.mark.usefixtures("trials_here")
def test_object_storage_compares_each_format_with_a_download(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("obstore")
    for name in ("shards", "webdataset"):
        shutil.copytree(converted[name], tmp_path / "data" / name)
    options = ("--repeats", 1, "--size", 32, "--batch-size", 16, "--latency-ms", 1)
    cells = print_table(object_storage.command, tmp_path / "data", *options)
    assert list(cells) == ["plain download", "shards", "webdataset"]
    assert cells["plain download"][2] == "1.00"


@pytest.mark.usefixtures("trials_here")
def test_peers_measures_each_loader_from_disk_and_from_memory(other: dict[str, Path]) -> None:
    options = ("--all", "--repeats", 1, "--batch-size", 8, "--photographs", 16, "--workers", 1)
    cells = print_table(peers.command, other["raw"], *options)
    assert libraries.PEERS["webdataset"].title in cells
    for name, (_, *figures) in cells.items():
        if "alone" not in name:  # a loader
            assert not any(figure.startswith("-") for figure in figures), name


def test_peers_counts_an_epoch_from_the_start_of_its_iteration() -> None:
    def epoch() -> Iterator[tuple[bytes, bytes]]:
        time.sleep(0.2)  # as a loader that compiles
        yield from [(bytes(8), bytes(8))] * 5

    times = libraries.time_epoch(epoch())
    assert times.first_batch_s >= 0.2
    assert 20 < times.images_per_s <= 40 / 0.2


def test_libraries_imports_nothing_of_this_project() -> None:
    names = imports(Path(str(libraries.__file__)))
    assert not {name for name in names if name.split(".")[0] in ("precache", "loaders", "bench")}


@pytest.mark.parametrize("format_name", ["shards", "webdataset"])
def test_conversion_shares_a_workers_time_among_all_stages(format_name: str, raw_tree: Path) -> None:
    options = ("--format", format_name, "--repeats", 1, "--pictures", 10, "--workers", 1)
    worker, whole = print_table(conversion.command, raw_tree, *options).values()
    shares = [int(cell.partition("%")[0]) for cell in worker[1:]]
    assert sum(shares) == pytest.approx(100, abs=5)
    assert (shares[3] > 0) == (format_name == "webdataset"), "encode"
    assert whole[1:] == ["-"] * len(shares)


def test_accuracy_trains_each_loader_once_and_compares_it(raw_tree: Path, tmp_path: Path) -> None:
    accuracy = pytest.importorskip("bench.lab.accuracy", reason="pip install scipy")
    print_table(accuracy.command, "splits", raw_tree, tmp_path / "splits.csv", "--per-class", 5)
    recipe = Recipe(format="shards", size=32)
    convert(raw_tree, tmp_path / "keep", recipe, workers=0, split_list=tmp_path / "splits.csv")
    options = ("--seeds", 2, "--size", 16, "--epochs", 1, "--batch-size", 8, "--workers", 0)
    words = ("train", raw_tree, "pytorch", f"keep=shards:{tmp_path / 'keep'}", *options)
    cells = print_table(accuracy.command, *words, "--json", tmp_path / "a.json")
    assert list(cells) == ["imagefolder", "pytorch", "keep"]
    first_run = (tmp_path / "a.json").read_bytes()
    assert print_table(accuracy.command, *words, "--json", tmp_path / "a.json") == cells
    assert (tmp_path / "a.json").read_bytes() == first_run, "nothing is trained again"


@pytest.mark.parametrize("name", ["epyc-2cpu", "epyc-2cpu-30-seeds", "xeon-2cpu-torchvision-recipe"])
def test_accuracy_shows_the_trainings_of_the_page_of_results(name: str) -> None:
    accuracy = pytest.importorskip("bench.lab.accuracy", reason="pip install scipy")
    results = ROOT / "bench/results"
    path = results / f"accuracy-caltech101-{name}.json"
    cells = print_table(accuracy.command, "show", path, "--margin", 0.5)
    page = (results / "README.md").read_text()
    for _, top1, *difference in cells.values():
        assert " | ".join([f"| {top1}", *difference]) in page


@pytest.mark.slow
def test_watch_shows_the_wait_put_in_beside_the_one_found() -> None:
    """The training is one of `bench.lab.trainings`, in a process of its own."""
    cells = print_table(watch.command, "--kinds", "plain", "--waits", 0.5, "--batches", 20)
    workers, put_in, found_share, stage, found_stage = cells["plain"]
    assert (workers, put_in, stage, found_stage) == ("0", "50%", "read", "read")
    assert 20 < int(found_share.removesuffix("%")) < 80


def test_listing_compares_loaders_and_convert_with_imagefolder(raw_tree: Path) -> None:
    cells = print_table(listing.command, raw_tree, "--repeats", 1)
    assert list(cells) == ["torchvision's ImageFolder", "loaders.build", "precache convert"]
    assert cells["torchvision's ImageFolder"][1] == "1.00"


def test_launching_counts_the_operations_of_a_step() -> None:
    for total, *parts in print_table(launching.command, "--count").values():
        called, autograd = (int(part.replace(",", "")) for part in parts)
        assert int(total.replace(",", "")) == called + autograd
        assert called > 161, "ResNet-50 has as many weights"


def test_launching_compares_threads_and_processes_with_a_step_alone(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "run_in_process", run_here)
    monkeypatch.setattr(launching, "_LAUNCHES", 100)
    options = ("--repeats", 1, "--seconds", 0.2, "--rate", 400, "--batch-size", 8, "--size", 32)
    cells = print_table(launching.command, converted["shards"], *options)
    alone, *others = cells
    assert [name.rpartition(", ")[2] for name in others] == ["threads", "processes"]
    assert cells[alone][2] == "1.00"
    for images_per_s, _, times, *_ in cells.values():
        assert 0 < float(images_per_s) < 800
        assert float(times) > 0


def test_recipes_compares_loaders_by_recipe(
    raw_tree: Path, converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "run_in_process", run_here)
    monkeypatch.setattr(recipes, "_SIZE", 32)
    options = ("--repeats", 1, "--seconds", 0.1, "--batch-size", 4, "--workers", 0)
    cells = print_table(recipes.command, raw_tree, converted["shards"], *options)
    assert list(cells) == [name for name in get_args(AugmentName) if name not in ("crop", "eval")]
    due = {*cells} if any(map(is_installed, DALI)) else set()
    assert {recipe for recipe, rates in cells.items() if rates[2] != "-"} == due
    due = {"train", "timm-a1", "timm-a2", "timm-a3", "deit3"} if is_installed("timm") else set()
    assert {recipe for recipe, rates in cells.items() if rates[1] != "-"} == due
    for torchvision_per_s, _, _, build_per_s, times in cells.values():
        ratio = float(build_per_s.replace(",", "")) / float(torchvision_per_s.replace(",", ""))
        assert float(times) == pytest.approx(ratio, rel=0.1, abs=0.1)


def test_operations_times_each_operation(converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((torch, "set_num_threads"), (cv2, "setNumThreads")):
        monkeypatch.setattr(module, name, lambda threads: None)
    cells = print_table(operations.command, converted["shards"], "--repeats", 2)
    assert len(cells) == 19
    for here, torchvision in cells.values():
        assert float(here.split()[0].replace(",", "")) > 0
        assert torchvision == "-" or float(torchvision.split()[0].replace(",", "")) > 0


def test_recipes_refuses_batches_larger_than_an_epoch(raw_tree: Path) -> None:
    with pytest.raises(DatasetError, check=lambda error: "--batch-size" in error.remedy):
        recipes.measure(recipes._TORCHVISION, raw_tree, "train", 0, 10_000, 0.1)


def test_stored_sizes_finds_more_distance_in_smaller_pictures(raw_tree: Path, tmp_path: Path) -> None:
    methods = {method.name: method for method in stored_sizes.METHODS}
    means = []
    for name in ("8/7", "twice", "all pixels"):
        path = tmp_path / str(len(means))
        convert(raw_tree, path, methods[name].recipe(32))
        means.append(mean(stored_sizes.distances(raw_tree, path, 32, random=True).values()))
    assert means == sorted(means)
    assert means[-1] > 45


@pytest.mark.usefixtures("trials_here")
@pytest.mark.parametrize(("stage", "function"), [("storage", "read_bytes"), ("decode", "decode_for")])
def test_a_stage_that_is_slowed_down_is_the_bottleneck(
    raw_tree: Path, stage: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable[..., Any] = getattr(images, function)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.03)
        return original(*args, **kwargs)

    monkeypatch.setattr(images, function, slow)
    settings = quick(trainer="emulated:1000", repeats=2, workers=0)  # all in this process
    (row,) = compare(Comparison(candidates=[Candidate("pytorch", raw_tree)], settings=settings)).rows
    assert row.bottleneck == stage, row.sentences

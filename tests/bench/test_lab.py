"""The programs of the lab print their tables; the stage that is slowed down is the one that is named."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import click
import pytest
from click.testing import CliRunner

from bench.lab import converting, epochs, listing, object_storage, stored_sizes
from bench.measure.candidates import Candidate
from bench.measure.comparison import Comparison, compare
from precache import convert
from precache.pictures import images
from tests.bench.settings import quick


def rows(command: click.Command, *words: object) -> dict[str, list[str]]:
    """The table that a program prints: the cells of each row, by the first."""
    found = CliRunner().invoke(command, list(map(str, words)), catch_exceptions=False)
    assert found.exit_code == 0, found.output
    lines = [line.strip("| ").split(" | ") for line in found.output.splitlines() if line.startswith("|")]
    return {first: others for first, *others in lines[2:]}


@pytest.mark.usefixtures("trials_here")
def test_object_storage_sets_each_format_beside_a_download(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("obstore")
    for name in ("shards", "webdataset"):
        shutil.copytree(converted[name], tmp_path / "data" / name)
    options = ("--repeats", 1, "--size", 32, "--batch-size", 16, "--latency-ms", 1)
    found = rows(object_storage.command, tmp_path / "data", *options)
    assert list(found) == ["plain download", "shards", "webdataset"]
    assert found["plain download"][2] == "1.00 (1.00-1.00)"


def test_converting_trains_on_tree_on_both_and_on_shards(raw_tree: Path) -> None:
    options = ("--repeats", 1, "--batch-size", 8, "--trainer-rate", 1e6)
    found = rows(converting.command, raw_tree, *options)
    assert list(found) == ["the tree alone", "converted while training", "converted first"]
    assert found["the tree alone"][1] == found["converted first"][4] == "1.00 (1.00-1.00)"


@pytest.mark.usefixtures("trials_here")
def test_epochs_prints_each_loader_in_each_state_of_the_files(raw_tree: Path) -> None:
    options = ("--repeats", 1, "--batch-size", 8, "--photographs", 20)
    found = rows(epochs.command, raw_tree, *options)
    assert len(found) == 9
    assert all(
        "-" not in [cell.split(" ")[0] for cell in cells] for name, cells in found.items() if "`" in name
    )


def test_listing_sets_loaders_and_convert_beside_imagefolder(raw_tree: Path) -> None:
    found = rows(listing.command, raw_tree, "--repeats", 1)
    assert list(found) == ["torchvision's ImageFolder", "loaders.build", "precache convert"]
    assert found["torchvision's ImageFolder"][1] == "1.00 (1.00-1.00)"


def test_stored_sizes_finds_smaller_pictures_farther(raw_tree: Path, tmp_path: Path) -> None:
    ways = {way.name: way for way in stored_sizes.METHODS}
    means = []
    for name in ("8/7", "twice", "all pixels"):
        path = tmp_path / str(len(means))
        convert(raw_tree, path, ways[name].recipe(32))
        means.append(mean(stored_sizes.distances(raw_tree, path, 32, random=True).values()))
    assert means == sorted(means)
    assert means[-1] > 45


@pytest.mark.usefixtures("trials_here")
@pytest.mark.parametrize(("stage", "slowed"), [("storage", "read_bytes"), ("decode", "decode_for")])
def test_the_stage_that_is_slowed_down_is_named(
    raw_tree: Path, stage: str, slowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual: Callable[..., Any] = getattr(images, slowed)

    def late(*given: Any, **named: Any) -> Any:
        time.sleep(0.03)
        return usual(*given, **named)

    monkeypatch.setattr(images, slowed, late)
    settings = quick(trainer="emulated:1000", repeats=2, workers=0)  # in no process but this one
    (row,) = compare(Comparison(candidates=[Candidate("pytorch", raw_tree)], settings=settings)).rows
    assert row.bottleneck == stage, row.advice

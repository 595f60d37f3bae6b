"""The programs of the lab print their tables; the stage that is slowed down is the one that is named."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from bench.lab import checks, image_dataset, object_storage
from bench.measure.candidates import Candidate
from bench.measure.comparison import compare
from precache.pictures import images
from tests.bench.settings import quick


def rows(command: click.Command, *words: object) -> dict[str, list[str]]:
    """The table that a program prints: the cells of each row, by the first."""
    found = CliRunner().invoke(command, list(map(str, words)), catch_exceptions=False)
    assert found.exit_code == 0, found.output
    lines = [line.strip("| ").split(" | ") for line in found.output.splitlines() if line.startswith("|")]
    return {first: others for first, *others in lines[2:]}


@pytest.mark.usefixtures("trials_here")
def test_each_program_prints_its_table(converted: dict[str, Path], raw_tree: Path, tmp_path: Path) -> None:
    shards = converted["shards"]
    found = rows(checks.command, shards, "--repeats", 1, "--batch-size", 16)
    assert list(found) == ["never", "first-read", "always"]
    assert found["never"][2] == "1.00 (1.00-1.00)"
    options = ("--repeats", 1, "--batch-size", 8, "--batches", 2, "--workers", 0, "--size", 16)
    found = rows(image_dataset.command, raw_tree, shards, *options)
    assert list(found) == ["ImageFolder", f"ImageDataset {raw_tree}", f"ImageDataset {shards}"]
    pytest.importorskip("obstore")
    for name in ("shards", "webdataset"):
        shutil.copytree(converted[name], tmp_path / "data" / name)
    options = ("--repeats", 1, "--size", 32, "--batch-size", 16, "--latency-ms", 1)
    found = rows(object_storage.command, tmp_path / "data", *options)
    assert list(found) == ["plain download", "shards", "webdataset"]


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
    (row,) = compare([Candidate("pytorch", raw_tree)], settings).rows
    assert row.binds == stage, row.advice

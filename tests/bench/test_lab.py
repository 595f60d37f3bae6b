"""The programs of the lab: their turns and tables; the storage of one is as late and narrow as asked."""

import os
import shutil
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bench.lab import checks, image_dataset, object_storage, stored_sizes
from bench.lab.harness import Column, Turns


def test_runs_take_turns_and_each_is_set_beside_the_same_turn_of_another() -> None:
    called: list[str] = []

    def run_of(name: str, rates: list[float]) -> dict[str, float]:
        called.append(name)
        return {"rate": rates[called.count(name) - 1]}

    runs = {
        "slow": lambda: run_of("slow", [9, 10, 20, 40]),
        "fast": lambda: run_of("fast", [9, 30, 40, 200]),
        "none": dict[str, float],
    }
    turns = Turns(runs, 3, uncounted=1)
    assert called == ["slow", "fast"] * 4
    columns = (Column("images/s", "rate"), Column("beside slow", "rate", ".1f", "slow"), Column("x", "other"))
    assert turns.rows(columns) == [
        ["slow", "20 (10-40)", "1.0 (1.0-1.0)", "-"],
        ["fast", "40 (30-200)", "3.0 (2.0-5.0)", "-"],
    ]


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
    assert found["plain download"][2] == "1.00 (1.00-1.00)"


@pytest.mark.slow
@pytest.mark.timeout(600)  # converts twelve times
def test_every_way_to_store_pictures_has_its_bytes_rates_and_distances(raw_tree: Path) -> None:
    options = ("--pictures", "40", "--size", "32", "--repeats", "1", "--workers", "1")
    printed = rows(stored_sizes.command, raw_tree, *options)
    assert list(printed) == [way.name for way in stored_sizes.WAYS]
    assert printed["squares"][4] == "another part"
    assert all(len(row) == 6 and all(row) for row in printed.values())


def test_the_storage_is_late_and_narrow_and_serves_the_bytes(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    from precache.storage.objects import ObjectStore
    from precache.storage.urls import Url

    content = os.urandom(1_000_000)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(content)
    with object_storage.serving(tmp_path, 0.05, 4e6) as server:
        store = ObjectStore(Url(server, "sub"))
        start_s = time.perf_counter()
        assert store.get("a") == content
        assert time.perf_counter() - start_s > 0.05 + 0.9 * len(content) / 4e6  # less is impossible
        assert store.get_range("a", 10, 20) == content[10:30]
        assert store.find("b") is None

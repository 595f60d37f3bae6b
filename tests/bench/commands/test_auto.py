"""`precache auto`: what it decides, converts, says and stores, where loaders have given rates."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import precache
from bench.cli import main as bench
from bench.measure import recommend as measuring
from bench.measure.recommend import Trees, choose
from bench.measure.settings import Settings
from bench.report.forecast import SLACK, Loaded
from bench.report.row import RAW_TREE, TODAY_BACKEND
from precache.cli import commandline
from precache.cli.main import main
from precache.conversion.destination import AUTO_NAME
from precache.conversion.shard_writer import predict_bytes
from precache.errors import SettingError
from precache.recipe import Recipe
from precache.sources.tree import scan_tree
from tests.command import check_bad_input

SMALL = ("--size", "32", "--batch-size", "8", "--trainer-rate", "2000")
TODAY = "ImageFolder and DataLoader keep an emulated accelerator of 2,000 images/s busy 12% of the time."
MEASURED = f"Measured: {TODAY}"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


class Machine:
    """Its loaders have `rates`, in images/s, one after the other; those of what was converted, `after`."""

    def __init__(self) -> None:
        self.rates = {TODAY_BACKEND: [250.0], RAW_TREE: [500.0], "shards": [8000.0], "webdataset": [1500.0]}
        self.after: dict[str, list[float]] = {}
        self.asked: list[str] = []
        self.other_cpu = 0.0

    def convert_twice(
        self, trees: Trees, images: int, recipe: Recipe, workers: int, folder: Path
    ) -> tuple[tuple[float, int], tuple[float, int], float]:
        """Instead of `bench.measure.recommend.convert_twice`; it keeps what it was asked."""
        folder.mkdir()
        self.asked.append(recipe.format)
        return (1.1, trees.small_images), (2.0, trees.large_images), 9000.0

    def serve(self, path: Path, name: str, settings: Settings, first_epoch: bool | None = None) -> Loaded:
        """Instead of `bench.measure.recommend.serve`."""
        rates = {**self.rates, **({} if first_epoch is None else self.after)}[name]
        rates.append(rates.pop(0))
        return Loaded(rates[-1], 2000.0, min(rates[-1], 2000.0), 1e-6)

    def share(self) -> float:
        """Of the CPUs, as `bench.machine.monitor.OtherProcesses` says it."""
        return self.other_cpu


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(measuring, "convert_twice", found.convert_twice)
    monkeypatch.setattr(measuring, "serve", found.serve)
    monkeypatch.setattr(measuring, "OtherProcesses", lambda: found)
    monkeypatch.setattr(measuring, "_measure_disk", lambda folder: (5e8, 0.001))
    return found


@pytest.fixture
def auto(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Runs `precache auto` on the small tree, in an empty folder, without a terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def auto(*words: object) -> "subprocess.CompletedProcess[str]":
        capfd.readouterr()
        code = commandline.run(main, "precache", ["auto", str(raw_tree), *map(str, words), *SMALL])
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return auto


def measured(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / AUTO_NAME).read_text())["measured"]
    return found


def test_it_says_why_converts_measures_and_stores_and_a_second_run_only_measures(
    machine: Machine, auto: Run, raw_tree: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    ended = auto("out", "--yes")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(TODAY)
    assert MEASURED in ended.stdout
    before = precache.open_dataset(out).manifest
    assert before.recipe == Recipe(format="shards", size=64)
    assert precache.verify(out) == []
    for rows in (measured(out)["rows"], measured(out)["predicted"]):
        assert [row["backend"] for row in rows] == ["imagefolder", "pytorch", "shards"]
    assert measured(out)["rows"][-1]["convert_s"] > 0
    typed = ["recommend", str(raw_tree), "--convert", "out", *SMALL]  # is the same call
    assert commandline.run(bench, "bench", typed) == 0
    printed = capfd.readouterr().out
    assert "nothing to do" in printed
    assert MEASURED in printed
    assert machine.asked == ["shards", "webdataset", "shards"], "then what was chosen before"
    assert measured(out)["rows"][-1]["convert_s"] is None, "it is measured, not converted"
    assert precache.open_dataset(out).manifest == before
    precache.convert(raw_tree, out, Recipe(format="dali", size=16), overwrite=True)
    assert not (out / AUTO_NAME).exists(), "it told of other pictures"
    check_bad_input(auto("out", "--yes"), "out: holds a conversion of other pictures", "--overwrite")
    assert auto("out", "--yes", "--overwrite").returncode == 0
    capfd.readouterr()
    assert commandline.run(bench, "bench", ["recommend", str(raw_tree), "--gpus", "2", *SMALL]) == 0
    advised, what_if = capfd.readouterr().out.split("\nWhat if: ")
    assert advised.startswith(TODAY)
    assert "accelerator 2 x 2,000 images/s" in " ".join(what_if.split())


def test_where_the_tree_keeps_up_nothing_is_converted(machine: Machine, auto: Run, tmp_path: Path) -> None:
    fast, usual = [3000.0], machine.rates
    for rates, said in (
        ({RAW_TREE: fast}, "Change that line to `loaders.build`: it is busy 100%"),
        ({RAW_TREE: fast, TODAY_BACKEND: fast}, "DataLoader already keep an emulated accelerator"),
        ({"shards": [400.0, 8000.0]}, "Converting gains no more."),  # within noise
    ):
        machine.rates = {**usual, **rates}
        ended = auto("out", "--yes", "--format", "shards")
        assert (ended.returncode, list(tmp_path.iterdir())) == (0, [])
        assert said in ended.stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_at_a_terminal_it_asks_and_converts_where_convert_would(
    machine: Machine, auto: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for typed, code in (("n\n", 0), ("", 130), ("\n", 0)):
        monkeypatch.setattr(sys, "stdin", Terminal(typed))
        ended = auto()
        assert ended.returncode == code, ended.stderr
        assert "Convert to shards, into data/shards? [Y/n]" in ended.stdout
        assert (tmp_path / "data/shards" / AUTO_NAME).exists() == (typed == "\n")


def test_what_was_killed_goes_on_as_it_was_chosen(
    machine: Machine, auto: Run, raw_tree: Path, tmp_path: Path
) -> None:
    """Whatever would be chosen now; and the time of a part is not taken for that of the whole."""

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total // 2:  # the first of two shards is finished
            raise Stop

    recipe = Recipe(format="webdataset", size=37, quality=90, splits="train=0.5,val=0.5")
    with pytest.raises(Stop):
        precache.convert(raw_tree, tmp_path / "out", recipe, workers=0, on_progress=stop)
    ended = auto("out", "--yes", "--splits", "train=0.5,val=0.5")
    assert ended.returncode == 0, ended.stderr
    assert machine.asked == ["webdataset"]
    assert precache.open_dataset(tmp_path / "out").manifest.recipe == recipe
    assert measured(tmp_path / "out")["rows"][-1]["convert_s"] is None


def test_what_is_slower_than_its_tree_or_larger_than_allowed_is_exit_code_1(
    machine: Machine, auto: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine.after = {"shards": [100.0]}
    ended = auto("out", "--yes")
    assert ended.returncode == 1
    assert "Converting lost: from shards the trainer gets 100 images/s, by `loaders.build`" in ended.stdout
    monkeypatch.setattr(measuring, "predict_bytes", lambda *_: 1)
    ended = auto("larger", "--yes", "--max-bytes", "1kB")
    assert ended.returncode == 1
    assert re.search(r"larger: takes .*, more than --max-bytes 1kB; make room, or remove it", ended.stderr)
    machine.other_cpu = 0.6
    assert auto("beside", "--yes").returncode == 0, "nothing is known of a busy machine"
    assert "Other processes took 60% of the CPUs" in caplog.text


def test_what_is_chosen_fits_and_nothing_better_does(raw_tree: Path) -> None:
    scan, names = scan_tree(raw_tree), ("shards", "webdataset")
    room, every = 1e9, []
    for _ in range(5):
        recipe, fitting = choose(scan, 96, names, room, "the disk")
        needs = [SLACK * predict_bytes(scan, replace(recipe, format=name), 100) for name in fitting]
        assert max(needs) <= room
        every.append((recipe.size, recipe.quality, fitting))
        room = max(needs) - 1
    rest = ((192, 95), (192, 90), (192, 75), (110, 75))
    assert every == [(192, 95, names), *((size, quality, names[1:]) for size, quality in rest)]
    with pytest.raises(SettingError, match="the smallest, webdataset of at most 110 px, JPEG quality 75"):
        choose(scan, 96, names, room, "the disk")

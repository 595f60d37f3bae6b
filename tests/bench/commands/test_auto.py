"""`precache auto`: what it decides, converts, says and stores. Rates are given, but in the slow tests."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precache
from bench.cli import main as bench
from bench.commands import recommend as command
from bench.measure import recommend as measuring
from bench.report.row import RAW_TREE, TODAY_BACKEND
from precache.cli import commandline
from precache.cli.main import main
from precache.conversion.destination import AUTO_NAME
from tests.bench.given import Machine
from tests.command import check_bad_input

SMALL = ("--size", "32", "--batch-size", "8")
TODAY = "ImageFolder and DataLoader keep an emulated accelerator of 2,000 images/s busy 12% of the time."
MEASURED = f"Measured: {TODAY}"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(command, "recommend", found.recommend)
    monkeypatch.setattr(measuring, "serve", found.serve)
    monkeypatch.setattr(measuring, "OtherProcesses", lambda: found)
    return found


@pytest.fixture
def auto(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Runs `precache auto` on the small tree, in an empty folder, without a terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def auto(*words: object, src: object = raw_tree) -> "subprocess.CompletedProcess[str]":
        capfd.readouterr()
        code = commandline.run(main, "precache", ["auto", str(src), *map(str, words), *SMALL])
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return auto


def report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / AUTO_NAME).read_text())
    return content


def words(said: str) -> str:
    """Without what converting took, which is predicted and then measured."""
    return re.sub(r"\([^)]*\)|after [\d,]+ epochs?", "", said)


def converted_row(folder: Path) -> dict[str, Any]:
    """What was measured of the converted pictures."""
    row: dict[str, Any] = report(folder)["measured"]["rows"][-1]
    return row


def test_it_says_why_converts_measures_and_stores(machine: Machine, auto: Run, tmp_path: Path) -> None:
    ended = auto("out", "--yes")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].startswith(TODAY)
    proof = [line.removeprefix("Measured: ") for line in lines[lines.index(MEASURED) :][:4]]
    assert words(" ".join(proof)) == words(lines[0]), "but for times"
    recipe = precache.Recipe(format="shards", size=64)
    assert precache.open_dataset(tmp_path / "out").manifest.recipe == recipe
    assert precache.verify(tmp_path / "out") == []
    measured = report(tmp_path / "out")["measured"]
    for rows in (measured["rows"], measured["predicted"]):
        assert [row["backend"] for row in rows] == ["imagefolder", "pytorch", "shards"]
    before, after = measured["predicted"][-1], converted_row(tmp_path / "out")
    assert after["convert_s"] > 0
    assert before["size_bytes"] == pytest.approx(after["size_bytes"], rel=0.15)
    assert report(tmp_path / "out")["median_error"] < 0.15


def test_a_second_run_converts_nothing_and_measures_again(
    machine: Machine, auto: Run, raw_tree: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    typed = ["recommend", str(raw_tree), "--convert", "out", *SMALL]  # is the same call
    assert commandline.run(bench, "bench", typed) == 0
    assert MEASURED in capfd.readouterr().out
    before = precache.open_dataset(tmp_path / "out").manifest
    ended = auto("out", "--yes")
    assert ended.returncode == 0
    assert "nothing to do" in ended.stdout
    assert MEASURED in ended.stdout
    assert machine.asked[1:] == [("shards",)], "what was chosen before"
    row = converted_row(tmp_path / "out")
    assert (row["convert_s"], row["size_bytes"] > 0) == (None, True), "it is measured, not converted"
    assert precache.open_dataset(tmp_path / "out").manifest == before
    precache.convert(raw_tree, tmp_path / "out", precache.Recipe(format="dali", size=16), overwrite=True)
    assert not (tmp_path / "out" / AUTO_NAME).exists(), "it told of other pictures"
    check_bad_input(auto("out", "--yes"), "out: holds a conversion of other pictures", "--overwrite")
    assert auto("out", "--yes", "--overwrite").returncode == 0


def test_where_the_tree_keeps_up_nothing_is_converted(machine: Machine, auto: Run, tmp_path: Path) -> None:
    usual = machine.rates.copy()
    for rates, turns, said in (
        ({RAW_TREE: 3000.0}, [], "Change that line to `loaders.build`: it is busy 100%"),
        ({RAW_TREE: 3000.0, TODAY_BACKEND: 3000.0}, [], "DataLoader already keep an emulated accelerator"),
        ({}, [{}, {"shards": 400.0}], "Converting gains no more."),  # within noise
    ):
        machine.rates, machine.turns = {**usual, **rates}, turns
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
        assert ("nothing was converted" in ended.stdout) == (typed == "n\n")


def test_what_was_killed_goes_on_as_it_was_chosen(
    machine: Machine, auto: Run, raw_tree: Path, tmp_path: Path
) -> None:
    """Whatever would be chosen now; and the time of a part is not taken for that of the whole."""

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total // 2:  # the first of two shards is finished
            raise Stop

    recipe = precache.Recipe(format="webdataset", size=37, quality=90, splits="train=0.5,val=0.5")
    with pytest.raises(Stop):
        precache.convert(raw_tree, tmp_path / "out", recipe, workers=0, on_progress=stop)
    ended = auto("out", "--yes", "--splits", "train=0.5,val=0.5")
    assert ended.returncode == 0, ended.stderr
    assert machine.asked == [("webdataset",)]
    assert "a conversion to webdataset, at most 37 px, JPEG quality 90, is unfinished" in ended.stdout
    assert precache.open_dataset(tmp_path / "out").manifest.recipe == recipe
    assert converted_row(tmp_path / "out")["convert_s"] is None


def test_what_is_slower_than_its_tree_or_larger_than_allowed_is_exit_code_1(
    machine: Machine, auto: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measuring.page_cache, "warm", lambda path: False)
    machine.after = {"shards": 100.0}
    ended = auto("out", "--yes")
    assert ended.returncode == 1
    assert "Converting lost: from shards the trainer gets 100 images/s, by `loaders.build`" in ended.stdout
    assert machine.first_epochs == {False}, "what does not fit into memory is read anew in every epoch"
    monkeypatch.setattr(measuring, "predict_bytes", lambda *_: 1)
    ended = auto("larger", "--yes", "--max-bytes", "1kB")
    assert ended.returncode == 1
    assert re.search(r"larger: takes .*, more than --max-bytes 1kB; make room, or remove it", ended.stderr)
    machine.other_cpu = 0.6
    assert auto("beside", "--yes").returncode == 0
    assert "Other processes took 60% of the CPUs" in caplog.text

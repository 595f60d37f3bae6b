"""`bench recommend` and `precache auto` where loaders have given rates: what they decide, say and keep."""

import io
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import loaders
import precache
from bench.cli import main as bench
from bench.measure import comparison, sample, storing
from bench.measure import recommend as measuring
from bench.measure.sample import Trees
from bench.measure.settings import Settings
from bench.measure.storing import choose
from bench.measure.trial import measure_trainer
from bench.report.forecast import SLACK
from bench.report.gain import TODAY_BACKEND
from bench.report.result import Trial
from precache.cli import commandline
from precache.cli.main import main
from precache.conversion.destination import AUTO_NAME
from precache.errors import SettingError
from precache.recipe import Recipe
from precache.sources.tree import scan_tree
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url
from tests.command import check_bad_input
from tests.damage import damage_tree

SMALL = ("--size", "32", "--batch-size", "8", "--trainer-rate", "2000")
TODAY = "ImageFolder and DataLoader keep an emulated accelerator of 2,000 images/s busy 12% of the time."
Run = Callable[..., "subprocess.CompletedProcess[str]"]


class Machine:
    """Its loaders have `rates`, in images/s, by backend; those of what was converted, `after`."""

    def __init__(self) -> None:
        self.rates = {TODAY_BACKEND: 250.0, "pytorch": 500.0, "shards": 8000.0, "webdataset": 1500.0}
        self.after: dict[str, float] = {}
        self.converted: list[str] = []
        self.trials = 0
        self.stops_after = 10**9
        self.other_cpu = 0.0

    def convert_twice(
        self, trees: Trees, images: int, recipe: Recipe, workers: int, folder: Path
    ) -> tuple[tuple[float, int], tuple[float, int], float]:
        """Instead of `bench.measure.sample.convert_twice`; it keeps what it was asked."""
        precache.convert(trees.small, folder, recipe, workers=0)
        self.converted.append(recipe.format)
        return (1.1, trees.small_images), (2.0, trees.large_images), 9000.0

    def run(self, function: Any, *given: Any) -> Trial:
        """Instead of `bench.measure.fresh.run_fresh`."""
        self.trials += 1
        if self.trials > self.stops_after:
            raise KeyboardInterrupt
        settings: Settings = given[0]
        rates = {**self.rates, **(self.after if len(given) == 1 and settings.batches > 1 else {})}
        rate = 2000.0 if function is measure_trainer else rates.get(settings.backend, 1e6)
        if settings.trainer != "none":
            rate = min(rate, 2000.0)
        return Trial(
            numbers={
                "images_per_s": rate, "serial_s": 1e-6, "images": 8.0, "wait_share": 0.0, "first_step_s": 0.1,
                "first_batch_s": 0.1, "served_ids": 8.0, "served_images": 8.0,
                "read_images_per_s": 1e5, "decode_images_per_s": 1e5,
            },
            series={"wait_s": (0.0,) * 9, "step_s": (8 / rate,) * 9, "epoch_starts": ()},
            facts={"shapes": "3x32x32 torch.uint8"},
        )  # fmt: skip

    def share(self) -> float:
        """Share of the CPUs, as `bench.machine.monitor.OtherProcesses` says it."""
        return self.other_cpu


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    disk = Trial(numbers={"read_bytes_per_s": 5e8, "first_byte_s": 0.001})
    monkeypatch.setattr(measuring, "convert_twice", machine.convert_twice)
    monkeypatch.setattr(measuring, "_measure_disk", lambda folder: disk)
    for module in (measuring, comparison):
        monkeypatch.setattr(module, "run_fresh", machine.run)
        monkeypatch.setattr(module, "OtherProcesses", lambda: machine)
    return machine


def run_here(
    group: Any, name: str, words: list[object], capfd: pytest.CaptureFixture[str]
) -> "subprocess.CompletedProcess[str]":
    capfd.readouterr()
    code = commandline.run(group, name, [*map(str, words)])
    return subprocess.CompletedProcess(words, code, *capfd.readouterr())


@pytest.fixture
def auto(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Runs `precache auto` on a tree, by default the small one, in an empty folder, without a terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def auto(*words: object, tree: object = raw_tree) -> "subprocess.CompletedProcess[str]":
        return run_here(main, "precache", ["auto", tree, *words, *SMALL], capfd)

    return auto


@pytest.fixture
def recommend(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Runs `bench recommend` likewise."""
    monkeypatch.chdir(tmp_path)

    def recommend(*words: object, tree: object = raw_tree) -> "subprocess.CompletedProcess[str]":
        return run_here(bench, "bench", ["recommend", tree, *words, *SMALL], capfd)

    return recommend


def saved(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / AUTO_NAME).read_text())
    return found


def flat(text: str) -> str:
    return " ".join(text.split())


def paste(printed: str) -> list[str]:
    """Run every line that is printed to be pasted; the lines."""
    lines = [line.strip() for line in printed.splitlines() if line.startswith("    ")]
    for line in lines:
        if line.startswith("precache "):
            assert commandline.run(main, "precache", shlex.split(line)[1:]) == 0, line
        else:
            names: dict[str, Any] = {"loaders": loaders}
            exec(line, names)
            with names["loader"] as loader:
                shapes = {(*batch.images.shape[1:], str(batch.images.dtype)) for batch in loader}
            assert shapes == {(3, 32, 32, "torch.uint8")}, line
    return lines


def test_it_says_why_converts_measures_and_keeps_the_result(
    machine: Machine, auto: Run, recommend: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = auto("out", "--yes")
    assert ended.returncode == 0, ended.stderr
    assert flat(ended.stdout).count(TODAY) == 2, "predicted, and measured"
    before = precache.open_dataset(out).manifest
    assert before.recipe == Recipe(format="shards", size=64)
    assert precache.verify(out) == []
    assert [row["of"]["backend"] for row in saved(out)["rows"]] == ["imagefolder", "pytorch", "shards"]
    assert saved(out)["settings"]["data"]["out"]["convert_s"] > 0
    measured = machine.trials
    again = recommend("--convert", "out")  # is the same call
    assert again.returncode == 0, again.stderr
    assert "nothing to do" in again.stdout
    assert TODAY in flat(again.stdout)
    assert machine.trials == measured, "all trials are kept"
    assert saved(out)["settings"]["data"]["out"]["convert_s"] > 0, "and what converting took"
    assert precache.open_dataset(out).manifest == before


def test_another_conversion_in_dst_is_refused_and_replaced_on_request(
    machine: Machine, auto: Run, raw_tree: Path, tmp_path: Path
) -> None:
    precache.convert(raw_tree, tmp_path / "out", Recipe(format="dali", size=16), workers=0)
    check_bad_input(auto("out", "--yes"), "out: holds a conversion of other pictures", "--overwrite")
    assert auto("out", "--yes", "--overwrite").returncode == 0
    assert precache.open_dataset(tmp_path / "out").manifest.recipe.format == "shards"


def test_what_if_options_answer_beside_this_machine(machine: Machine, recommend: Run) -> None:
    for words, inputs, rate in (
        (("--gpus", 2), "accelerator 2 x 2,000 images/s", 250),
        (("--accelerator", "500"), "accelerator 500 images/s", 250),
        (("--workers", 1), "1 CPU", 125),
        (("--disk-mbps", 20), "disk 20.0 MB/s", 250),
    ):
        ended = recommend(*words, "--json", "-")
        assert ended.returncode == 0, ended.stderr
        found = json.loads(ended.stdout)
        assert found["answer"][0].startswith(TODAY)
        assert inputs in found["answer"][-1]
        names = [row["name"] for row in found["rows"]]
        assert names[4:] == [f"{name}, what if" for name in names[:4]]
        assert found["rows"][4]["values"]["loader_images_per_s"]["median"] == rate or words[0] == "--workers"
    check_bad_input(recommend("--gpus", 0), "gpus", "0")


def test_where_the_tree_keeps_up_nothing_is_converted(machine: Machine, auto: Run, tmp_path: Path) -> None:
    usual = machine.rates
    for rates, said in (
        ({"pytorch": 3000.0}, "Change that line to `loaders.build`: it is busy 100%"),
        ({"pytorch": 3000.0, TODAY_BACKEND: 3000.0}, "DataLoader already keep an emulated accelerator"),
        ({"shards": 400.0}, "Converting gains no more."),
    ):
        machine.rates = {**usual, **rates}
        ended = auto("out", "--yes", "--format", "shards")
        assert (ended.returncode, list(tmp_path.iterdir())) == (0, [])
        assert said in flat(ended.stdout)
        assert "precache convert" not in ended.stdout


def test_beside_other_processes_no_winner_is_named_and_nothing_converted(
    machine: Machine, auto: Run, recommend: Run, raw_tree: Path, tmp_path: Path
) -> None:
    machine.other_cpu = 0.6
    tree = tmp_path / "broken"
    damage_tree(raw_tree, tree)
    for ended in (
        auto("out", "--yes", tree=tree),
        recommend("--gpus", 4, tree=tree),
        recommend("--convert", "out", tree=tree),
    ):
        assert ended.returncode == 0, ended.stderr
        assert "Other processes took 60% of the CPUs" in flat(ended.stdout)
        for word in ("sooner", "Change that line", "Convert to", "loader ="):
            assert word not in ended.stdout
        for line in paste(ended.stdout):
            assert line.startswith("precache convert")
            assert "--max-rejects 6%" in line
            shutil.rmtree(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    machine.other_cpu = 0.0
    assert auto("out", "--yes").returncode == 0
    (tmp_path / "out" / AUTO_NAME).unlink()
    machine.other_cpu, machine.after = 0.6, {"shards": 100.0}
    ended = auto("out", "--yes")  # what was converted is slow, or the machine is: who knows
    assert ended.returncode == 0
    assert "Converting lost" not in ended.stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_at_a_terminal_it_asks_and_converts_where_convert_would(
    machine: Machine, auto: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bad_input(auto(), "no terminal to ask at", "--yes")
    for typed, code in (("n\n", 0), ("", 130), ("\n", 0)):
        monkeypatch.setattr(sys, "stdin", Terminal(typed))
        ended = auto()
        assert ended.returncode == code, ended.stderr
        assert "Convert to shards, into data/shards? [Y/n]" in ended.stdout
        assert (tmp_path / "data/shards" / AUTO_NAME).exists() == (typed == "\n")


def test_a_killed_conversion_goes_on_as_it_was_chosen(
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
    assert machine.converted == []
    assert precache.open_dataset(tmp_path / "out").manifest.recipe == recipe
    assert saved(tmp_path / "out")["settings"]["data"]["out"]["convert_s"] is None


def test_killed_at_any_trial_the_same_command_measures_none_twice(
    machine: Machine, auto: Run, recommend: Run, tmp_path: Path
) -> None:
    assert auto("whole", "--yes", "--json", "whole.json").returncode == 0
    total, machine.trials = machine.trials, 0
    calls = 0
    while not (tmp_path / "out" / AUTO_NAME).exists() or "rows" not in saved(tmp_path / "out"):
        machine.stops_after = machine.trials + 11
        ended = auto("out", "--yes", "--json", "state.json")
        machine.trials = min(machine.trials, machine.stops_after)  # the last was broken off
        json.loads((tmp_path / "state.json").read_text())
        calls += 1
        assert ended.returncode in (0, 130), ended.stderr
        assert calls < 30
    assert machine.trials == total
    machine.stops_after = 3
    machine.trials = 0
    assert recommend("--json", "other.json").returncode == 130
    machine.stops_after = 10**9
    assert recommend("--json", "other.json").returncode == 0
    check_bad_input(recommend("--json", "other.json", "--stored-size", 50), "other.json", "stored_size")


def test_what_is_slower_than_its_tree_or_larger_than_allowed_is_exit_code_1(
    machine: Machine, auto: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.after = {"shards": 100.0}
    ended = auto("out", "--yes")
    assert ended.returncode == 1
    assert "Converting lost: from shards the trainer gets 100 images/s, by `loaders.build`" in ended.stdout
    monkeypatch.setattr(storing, "measure_bytes", lambda *_: 1)
    ended = auto("larger", "--yes", "--max-bytes", "1kB")
    assert ended.returncode == 1
    assert "larger: takes " in ended.stderr
    assert "more than --max-bytes 1kB; make room, or remove it" in ended.stderr


def test_every_line_to_paste_runs_on_sound_and_on_broken_trees(
    machine: Machine, auto: Run, recommend: Run, raw_tree: Path, tmp_path: Path
) -> None:
    damage_tree(raw_tree, tmp_path / "it's $broken")
    assert len(paste(recommend().stdout)) == 3
    broken = recommend(tree=Path("it's $broken"))
    assert "cannot read 4 of the 70 pictures" in flat(broken.stdout)
    assert "A training with ImageFolder stops at" in flat(broken.stdout)
    lines = paste(broken.stdout)
    assert "on_error='skip'" in lines[0]
    assert "--max-rejects 6%" in lines[1]
    assert "data/shards-it" in lines[1], "other pictures are in data/shards"
    ended = auto("converted", "--yes", tree=Path("it's $broken"))
    assert ended.returncode == 0, ended.stderr
    assert len(precache.open_dataset(tmp_path / "converted").manifest.rejected) == 4
    assert "4 of 4 that were tried" in flat(ended.stdout)
    paste(ended.stdout)
    assert auto("converted", "--yes", tree=Path("it's $broken")).returncode == 0


def test_of_a_tree_at_a_url_the_line_to_convert_is_given(
    machine: Machine, recommend: Run, raw_tree: Path, bucket: Url
) -> None:
    for path in raw_tree.glob("*/*"):
        ObjectStore(bucket / "photos").upload(path, str(path.relative_to(raw_tree)))
    ended = recommend(tree=bucket / "photos")
    assert ended.returncode == 0, ended.stderr
    assert "Change that line" not in ended.stdout, "loaders.build reads no raw tree there"
    lines = paste(ended.stdout)
    assert lines[0].startswith(f"precache convert {bucket}/photos data/shards")
    assert len(lines) == 2


def test_pictures_without_a_decoder_are_not_left_out_unasked(
    machine: Machine, auto: Run, raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage_tree(raw_tree, tmp_path / "tree")
    monkeypatch.setattr(sample.kinds, "undecodable_kind", lambda data: "WEBP")
    ended = auto("out", "--yes", tree=Path("tree"))
    assert ended.returncode == 2
    assert "3 of 70 pictures that were tried may be intact" in ended.stderr  # the empty one is not
    assert "--max-rejects 6%" in ended.stderr
    assert not (tmp_path / "out").exists()
    assert auto("out", "--yes", "--max-rejects", "6%", tree=Path("tree")).returncode == 0


def test_what_is_chosen_fits_and_nothing_better_does(raw_tree: Path) -> None:
    scan, names = scan_tree(raw_tree), ("shards", "webdataset")
    room, every = 1e9, []
    for _ in range(5):
        recipe, fitting = choose(scan, 96, names, room, "the disk")
        needs = [SLACK * storing.measure_bytes(scan, replace(recipe, format=name)) for name in fitting]
        assert max(needs) <= room
        every.append((recipe.size, recipe.quality, fitting))
        room = max(needs) - 1
    rest = ((192, 95), (192, 90), (192, 75), (110, 75))
    assert every == [(192, 95, names), *((size, quality, names[1:]) for size, quality in rest)]
    with pytest.raises(SettingError, match="the smallest, webdataset of at most 110 px, JPEG quality 75"):
        choose(scan, 96, names, room, "the disk")

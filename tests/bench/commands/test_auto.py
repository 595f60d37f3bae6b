"""`bench recommend` and `precache auto` with loaders of chosen rates: their decisions, output and files."""

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
from bench.measure import recommend as recommendation
from bench.measure.sample import Trees
from bench.measure.settings import Settings
from bench.measure.storing import choose_recipe
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


class ConversionStopped(Exception):
    """Raised by a callback of progress, to stop a conversion."""


class Machine:
    """Stand-in of a machine, whose trials return chosen rates at once.

    Attributes:
        rates: images/s of a loader in the trials of the sample, by backend.
        rates_after: images/s of a loader after the conversion, by backend, where they differ.
        converted: formats that the sample was converted to.
        trials: number of trials so far.
        last_trial: number of trials after which the next one is interrupted.
        other_cpu_share: share of the CPUs, 0 to 1, that other processes take.
    """

    def __init__(self) -> None:
        self.rates = {TODAY_BACKEND: 250.0, "pytorch": 500.0, "shards": 8000.0, "webdataset": 1500.0}
        self.rates_after: dict[str, float] = {}
        self.converted: list[str] = []
        self.trials = 0
        self.last_trial = 10**9
        self.other_cpu_share = 0.0

    def convert_twice(
        self, trees: Trees, images: int, recipe: Recipe, workers: int, folder: Path
    ) -> tuple[tuple[float, int], tuple[float, int], float]:
        """Convert the small tree alone, in the place of `bench.measure.sample.convert_twice`."""
        precache.convert(trees.small, folder, recipe, workers=0)
        self.converted.append(recipe.format)
        return (1.1, trees.small_images), (2.0, trees.large_images), 9000.0

    def run(self, function: Any, *arguments: Any) -> Trial:
        """Return a trial of the chosen rate, in the place of `bench.measure.processes.run_in_process`."""
        self.trials += 1
        if self.trials > self.last_trial:
            raise KeyboardInterrupt
        settings: Settings = arguments[0]
        rates = dict(self.rates)
        if len(arguments) == 1 and settings.batches > 1:  # a trial of the comparison after the conversion
            rates.update(self.rates_after)
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
        """Return the share of the CPUs, in the place of `bench.machine.monitor.OtherProcesses.share`."""
        return self.other_cpu_share


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    disk = Trial(numbers={"read_bytes_per_s": 5e8, "first_byte_s": 0.001})
    monkeypatch.setattr(recommendation, "convert_twice", machine.convert_twice)
    monkeypatch.setattr(recommendation, "_measure_disk", lambda folder: disk)
    for module in (recommendation, comparison):
        monkeypatch.setattr(module, "run_in_process", machine.run)
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
    """Return a function that runs `precache auto` on a tree in an empty folder, without a terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def auto(*words: object, tree: object = raw_tree) -> "subprocess.CompletedProcess[str]":
        return run_here(main, "precache", ["auto", tree, *words, *SMALL], capfd)

    return auto


@pytest.fixture
def recommend(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Return a function that runs `bench recommend` on a tree in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def recommend(*words: object, tree: object = raw_tree) -> "subprocess.CompletedProcess[str]":
        return run_here(bench, "bench", ["recommend", tree, *words, *SMALL], capfd)

    return recommend


def read_result(folder: Path) -> dict[str, Any]:
    """Return the result that `precache auto` has left in the folder."""
    result: dict[str, Any] = json.loads((folder / AUTO_NAME).read_text())
    return result


def join_lines(text: str) -> str:
    return " ".join(text.split())


def run_pasted(printed: str) -> list[str]:
    """Run every line that is printed to be pasted, and return the lines."""
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


def test_auto_converts_measures_and_keeps_the_result(
    machine: Machine, auto: Run, recommend: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = auto("out", "--yes")
    assert ended.returncode == 0, ended.stderr
    assert join_lines(ended.stdout).count(TODAY) == 2, "predicted, and measured"
    before = precache.open_dataset(out).manifest
    assert before.recipe == Recipe(format="shards", size=64)
    assert precache.verify(out) == []
    assert [row["of"]["backend"] for row in read_result(out)["rows"]] == ["imagefolder", "pytorch", "shards"]
    assert read_result(out)["settings"]["data"]["out"]["convert_s"] > 0
    measured = machine.trials
    again = recommend("--convert", "out")  # the same as `precache auto`
    assert again.returncode == 0, again.stderr
    assert "nothing to do" in again.stdout
    assert TODAY in join_lines(again.stdout)
    assert machine.trials == measured, "all trials are kept"
    assert read_result(out)["settings"]["data"]["out"]["convert_s"] > 0, "and what converting took"
    assert precache.open_dataset(out).manifest == before


def test_auto_refuses_another_conversion_in_dst_without_overwrite(
    machine: Machine, auto: Run, raw_tree: Path, tmp_path: Path
) -> None:
    precache.convert(raw_tree, tmp_path / "out", Recipe(format="dali", size=16), workers=0)
    check_bad_input(auto("out", "--yes"), "out: holds a conversion of other pictures", "--overwrite")
    assert auto("out", "--yes", "--overwrite").returncode == 0
    assert precache.open_dataset(tmp_path / "out").manifest.recipe.format == "shards"


@pytest.mark.parametrize(
    ("words", "inputs", "rate"),
    [
        (("--gpus", 2), "accelerator 2 x 2,000 images/s", 250),
        (("--accelerator", "500"), "accelerator 500 images/s", 250),
        (("--workers", 1), "1 CPU", None),  # what one worker gives depends on the CPUs of this machine
        (("--disk-mbps", 20), "disk 20.0 MB/s", 250),
    ],
)
def test_what_if_options_add_predictions_for_another_machine(
    words: tuple[object, ...], inputs: str, rate: int | None, machine: Machine, recommend: Run
) -> None:
    ended = recommend(*words, "--json", "-")
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["answer"][0].startswith(TODAY)
    assert inputs in result["answer"][-1]
    names = [row["name"] for row in result["rows"]]
    assert names[4:] == [f"{name}, what if" for name in names[:4]]
    if rate is not None:
        assert result["rows"][4]["values"]["loader_images_per_s"]["median"] == rate


def test_what_if_options_must_be_positive(machine: Machine, recommend: Run) -> None:
    check_bad_input(recommend("--gpus", 0), "gpus", "0")


@pytest.mark.parametrize(
    ("rates", "sentence"),
    [
        ({"pytorch": 3000.0}, "Change that line to `loaders.build`: it is busy 100%"),
        ({"pytorch": 3000.0, TODAY_BACKEND: 3000.0}, "DataLoader already keep an emulated accelerator"),
        ({"shards": 400.0}, "Converting gains no more."),
    ],
)
def test_auto_converts_nothing_where_the_tree_is_as_fast(
    rates: dict[str, float], sentence: str, machine: Machine, auto: Run, tmp_path: Path
) -> None:
    machine.rates |= rates
    ended = auto("out", "--yes", "--format", "shards")
    assert (ended.returncode, list(tmp_path.iterdir())) == (0, [])
    assert sentence in join_lines(ended.stdout)
    assert "precache convert" not in ended.stdout


def test_beside_busy_processes_nothing_is_recommended_or_converted(
    machine: Machine, auto: Run, recommend: Run, raw_tree: Path, tmp_path: Path
) -> None:
    machine.other_cpu_share = 0.6
    tree = tmp_path / "broken"
    damage_tree(raw_tree, tree)
    for ended in (
        auto("out", "--yes", tree=tree),
        recommend("--gpus", 4, tree=tree),
        recommend("--convert", "out", tree=tree),
    ):
        assert ended.returncode == 0, ended.stderr
        assert "Other processes took 60% of the CPUs" in join_lines(ended.stdout)
        for word in ("sooner", "Change that line", "Convert to", "loader ="):
            assert word not in ended.stdout
        for line in run_pasted(ended.stdout):
            assert line.startswith("precache convert")
            assert "--max-rejects 6%" in line
            shutil.rmtree(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_beside_busy_processes_auto_does_not_say_that_converting_lost(
    machine: Machine, auto: Run, tmp_path: Path
) -> None:
    assert auto("out", "--yes").returncode == 0
    (tmp_path / "out" / AUTO_NAME).unlink()
    machine.other_cpu_share = 0.6
    machine.rates_after = {"shards": 100.0}
    ended = auto("out", "--yes")
    assert ended.returncode == 0
    assert "Converting lost" not in ended.stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_auto_asks_at_a_terminal_and_converts_into_data_format(
    machine: Machine, auto: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bad_input(auto(), "no terminal to ask at", "--yes")
    for typed, code in (("n\n", 0), ("", 130), ("\n", 0)):
        monkeypatch.setattr(sys, "stdin", Terminal(typed))
        ended = auto()
        assert ended.returncode == code, ended.stderr
        assert "Convert to shards, into data/shards? [Y/n]" in ended.stdout
        assert (tmp_path / "data/shards" / AUTO_NAME).exists() == (typed == "\n")


def test_auto_goes_on_with_a_killed_conversion_by_its_recipe(
    machine: Machine, auto: Run, raw_tree: Path, tmp_path: Path
) -> None:
    """The seconds of the second half are not kept as those of the conversion."""

    def stop(done: int, total: int) -> None:
        if done > total // 2:  # the first of two shards is finished
            raise ConversionStopped

    recipe = Recipe(format="webdataset", size=37, quality=90, splits="train=0.5,val=0.5")
    with pytest.raises(ConversionStopped):
        precache.convert(raw_tree, tmp_path / "out", recipe, workers=0, on_progress=stop)
    ended = auto("out", "--yes", "--splits", "train=0.5,val=0.5")
    assert ended.returncode == 0, ended.stderr
    assert machine.converted == []
    assert precache.open_dataset(tmp_path / "out").manifest.recipe == recipe
    assert read_result(tmp_path / "out")["settings"]["data"]["out"]["convert_s"] is None


def test_auto_measures_no_trial_twice_however_often_it_is_killed(
    machine: Machine, auto: Run, tmp_path: Path
) -> None:
    assert auto("whole", "--yes", "--json", "whole.json").returncode == 0
    total, machine.trials = machine.trials, 0
    calls = 0
    while not (tmp_path / "out" / AUTO_NAME).exists() or "rows" not in read_result(tmp_path / "out"):
        machine.last_trial = machine.trials + 11
        ended = auto("out", "--yes", "--json", "state.json")
        machine.trials = min(machine.trials, machine.last_trial)  # the last one was interrupted
        json.loads((tmp_path / "state.json").read_text())
        calls += 1
        assert ended.returncode in (0, 130), ended.stderr
        assert calls < 30
    assert machine.trials == total


def test_recommend_goes_on_after_an_interrupt_with_the_same_settings(
    machine: Machine, recommend: Run
) -> None:
    machine.last_trial = 3
    assert recommend("--json", "other.json").returncode == 130
    machine.last_trial = 10**9
    assert recommend("--json", "other.json").returncode == 0
    check_bad_input(recommend("--json", "other.json", "--stored-size", 50), "other.json", "stored_size")


def test_auto_exits_with_1_where_converting_made_training_slower(machine: Machine, auto: Run) -> None:
    machine.rates_after = {"shards": 100.0}
    ended = auto("out", "--yes")
    assert ended.returncode == 1
    assert "Converting lost: from shards the trainer gets 100 images/s, by `loaders.build`" in ended.stdout


def test_auto_exits_with_1_where_the_dataset_exceeds_max_bytes(
    machine: Machine, auto: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "measure_bytes", lambda *_: 1)
    ended = auto("larger", "--yes", "--max-bytes", "1kB")
    assert ended.returncode == 1
    assert "larger: takes " in ended.stderr
    assert "more than --max-bytes 1kB; make room, or remove it" in ended.stderr


def test_every_line_to_paste_runs_on_a_sound_tree(machine: Machine, recommend: Run) -> None:
    assert len(run_pasted(recommend().stdout)) == 3


def test_every_line_to_paste_runs_on_a_damaged_tree(
    machine: Machine, auto: Run, recommend: Run, raw_tree: Path, tmp_path: Path
) -> None:
    damage_tree(raw_tree, tmp_path / "it's $broken")
    precache.convert(raw_tree, tmp_path / "data/shards", Recipe(format="shards", size=16), workers=0)
    advice = recommend(tree=Path("it's $broken"))
    assert "cannot read 4 of the 70 pictures" in join_lines(advice.stdout)
    assert "A training with ImageFolder stops at" in join_lines(advice.stdout)
    lines = run_pasted(advice.stdout)
    assert "on_error='skip'" in lines[0]
    assert "--max-rejects 6%" in lines[1]
    assert "data/shards-it" in lines[1], "other pictures are in data/shards"
    ended = auto("converted", "--yes", tree=Path("it's $broken"))
    assert ended.returncode == 0, ended.stderr
    assert len(precache.open_dataset(tmp_path / "converted").manifest.rejected) == 4
    assert "4 of 4 that were tried" in join_lines(ended.stdout)
    run_pasted(ended.stdout)
    assert auto("converted", "--yes", tree=Path("it's $broken")).returncode == 0


def test_recommend_gives_the_line_to_convert_a_tree_at_a_url(
    machine: Machine, recommend: Run, raw_tree: Path, bucket: Url
) -> None:
    for path in raw_tree.glob("*/*"):
        ObjectStore(bucket / "photos").upload(path, str(path.relative_to(raw_tree)))
    ended = recommend(tree=bucket / "photos")
    assert ended.returncode == 0, ended.stderr
    assert "Change that line" not in ended.stdout, "loaders.build reads no raw tree there"
    lines = run_pasted(ended.stdout)
    assert lines[0].startswith(f"precache convert {bucket}/photos data/shards")
    assert len(lines) == 2


def test_auto_refuses_to_leave_out_pictures_without_a_decoder(
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


def test_choose_recipe_takes_the_best_that_fits(raw_tree: Path) -> None:
    scan, names = scan_tree(raw_tree), ("shards", "webdataset")
    limit_bytes, choices = 1e9, []
    for _ in range(5):
        recipe, fitting = choose_recipe(scan, 96, names, limit_bytes, "the disk")
        needed = [SLACK * storing.measure_bytes(scan, replace(recipe, format=name)) for name in fitting]
        assert max(needed) <= limit_bytes
        choices.append((recipe.size, recipe.quality, fitting))
        limit_bytes = max(needed) - 1
    smaller = ((192, 95), (192, 90), (192, 75), (110, 75))
    assert choices == [(192, 95, names), *((size, quality, names[1:]) for size, quality in smaller)]
    with pytest.raises(SettingError, match="webdataset of at most 110 px, JPEG quality 75") as raised:
        choose_recipe(scan, 96, names, limit_bytes, "the disk")
    assert "--max-bytes" in raised.value.remedy

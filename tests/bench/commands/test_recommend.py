"""`bench recommend` with loaders of chosen rates: its answer, its lines to paste, its file."""

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loaders
import precache
from bench.cli import main as bench
from bench.measure import comparison
from bench.measure import recommend as recommendation
from bench.measure.sample import Trees
from bench.measure.settings import Settings
from bench.report.gain import TODAY_BACKEND
from bench.report.loaders import TRAINER
from bench.report.result import Trial
from precache.cli import commandline
from precache.cli.main import main
from precache.recipe import Recipe
from tests.command import check_bad_input
from tests.damage import damage_tree

SMALL = ("--size", "32", "--batch-size", "8", "--trainer-rate", "2000")
TODAY = (
    "ImageFolder and DataLoader keep an emulated accelerator of 2,000 images/s busy 11% to 14% of the time."
)
PROGRAMS = {"precache": main, "bench": bench}
Run = Callable[..., "subprocess.CompletedProcess[str]"]


class Machine:
    """Stand-in of a machine, whose trials return chosen rates at once.

    Attributes:
        rates: images/s of a loader, by backend.
        trials: number of trials so far.
        last_trial: number of trials after which the next one is interrupted.
        other_cpu_share: share of the CPUs, 0 to 1, that other processes take.
    """

    def __init__(self) -> None:
        self.rates = {TODAY_BACKEND: 250.0, "pytorch": 500.0, "shards": 8000.0, "webdataset": 1500.0}
        self.trials = 0
        self.last_trial = 10**9
        self.other_cpu_share = 0.0

    def convert_twice(
        self, trees: Trees, images: int, recipe: Recipe, workers: int, folder: Path
    ) -> tuple[tuple[float, int], tuple[float, int], float]:
        """Convert the small tree alone, in the place of `bench.measure.sample.convert_twice`."""
        precache.convert(trees.small, folder, recipe, workers=0)
        return (1.1, trees.small_images), (2.0, trees.large_images), 9000.0

    def run(self, function: Any, kind: str, settings: Settings, *arguments: Any) -> Trial:
        """Return a trial of the chosen rate, in the place of `bench.measure.processes.run_in_process`."""
        self.trials += 1
        if self.trials > self.last_trial:
            raise KeyboardInterrupt
        rate = 2000.0 if kind == TRAINER else self.rates.get(settings.backend, 1e6)
        if settings.trainer != "none":
            rate = min(rate, 2000.0)
        return Trial(
            numbers={
                "images_per_s": rate, "serial_s": 1e-6, "images": 8.0, "wait_share": 0.0, "first_step_s": 0.1,
                "first_batch_s": 0.1, "served_ids": 8.0, "served_images": 8.0,
                "read_images_per_s": 1e5, "decode_images_per_s": 1e5,
            },
            series={"wait_s": (0.0,) * 9, "step_s": (8 / rate,) * 9, "epoch_starts": ()},
            facts={"shapes": "3x32x32 torch.uint8", "sides": "3x32x32"},
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
def recommend(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Return a function that runs `bench recommend` on a tree in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def recommend(*words: object, tree: object = raw_tree) -> "subprocess.CompletedProcess[str]":
        return run_here(bench, "bench", ["recommend", tree, *words, *SMALL], capfd)

    return recommend


def join_lines(text: str) -> str:
    return " ".join(text.split())


def run_pasted(printed: str) -> list[str]:
    """Run every line that is printed to be pasted, commands before code, and return the lines as printed."""
    lines = [line.strip() for line in printed.splitlines() if line.startswith("    ")]
    for line in sorted(lines, key=lambda line: line.startswith("loader =")):
        program = line.partition(" ")[0]
        if program in PROGRAMS:
            assert commandline.run(PROGRAMS[program], program, shlex.split(line)[1:]) == 0, line
        else:
            names: dict[str, Any] = {"loaders": loaders}
            exec(line, names)
            with names["loader"] as loader:
                shapes = {(*batch.images.shape[1:], str(batch.images.dtype)) for batch in loader}
            assert shapes == {(3, 32, 32, "torch.uint8")}, line
    return lines


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
        ({"pytorch": 3000.0}, "Replace them by `loaders.build`: the trainer is busy at least 85%"),
        ({"pytorch": 3000.0, TODAY_BACKEND: 3000.0}, "DataLoader already keep an emulated accelerator"),
        ({"shards": 400.0}, "Converting gains no more."),
    ],
)
def test_no_conversion_is_recommended_where_the_tree_is_as_fast(
    rates: dict[str, float], sentence: str, machine: Machine, recommend: Run, tmp_path: Path
) -> None:
    machine.rates |= rates
    ended = recommend("--format", "shards")
    assert (ended.returncode, list(tmp_path.iterdir())) == (0, [])
    assert sentence in join_lines(ended.stdout)
    assert "precache convert" not in ended.stdout


def test_beside_busy_processes_nothing_is_recommended(machine: Machine, recommend: Run) -> None:
    machine.other_cpu_share = 0.6
    ended = recommend("--gpus", 4)
    assert ended.returncode == 0, ended.stderr
    assert "Other processes took 60% of the CPUs" in join_lines(ended.stdout)
    for word in ("as fast", "Replace them", "Convert to", "precache convert", "loader ="):
        assert word not in ended.stdout


def test_recommend_goes_on_after_an_interrupt_with_the_same_settings(
    machine: Machine, recommend: Run
) -> None:
    machine.last_trial = 3
    assert recommend("--json", "other.json").returncode == 130
    machine.last_trial = 10**9
    assert recommend("--json", "other.json").returncode == 0
    check_bad_input(recommend("--json", "other.json", "--stored-size", 50), "other.json", "stored_size")


def test_every_line_to_paste_runs_on_a_sound_tree(machine: Machine, recommend: Run) -> None:
    *code, convert, measure = run_pasted(recommend().stdout)
    assert len(code) == 2
    assert convert.startswith("precache convert ")
    assert measure.startswith("bench loaders ")


def test_recommend_ends_with_the_commands_to_type(machine: Machine, recommend: Run, raw_tree: Path) -> None:
    options = "--augment train --trainer emulated:2000 --launches 1000 --batch-size 8 --size 32"
    assert recommend().stdout.splitlines()[-2:] == [
        f"    precache convert {raw_tree} data/shards --format shards --size 64",
        f"    bench loaders {raw_tree} data/shards {options}",
    ]


def test_every_line_to_paste_runs_on_a_damaged_tree(
    machine: Machine, recommend: Run, raw_tree: Path, tmp_path: Path
) -> None:
    damage_tree(raw_tree, tmp_path / "it's $broken")
    precache.convert(raw_tree, tmp_path / "data/shards", Recipe(format="shards", size=16), workers=0)
    advice = recommend(tree=Path("it's $broken"))
    assert "cannot read 4 of the 70 pictures" in join_lines(advice.stdout)
    assert "A training with ImageFolder stops at" in join_lines(advice.stdout)
    lines = run_pasted(advice.stdout)
    assert "on_error='skip'" in lines[0]
    assert "--max-rejects 6%" in lines[2]
    assert "data/shards-it" in lines[2], "other pictures are in data/shards"


def test_recommend_refuses_a_tree_at_a_url_with_the_command(machine: Machine, recommend: Run) -> None:
    ended = recommend(tree="s3://bucket/photos")
    assert ended.returncode == 2
    assert "aws s3 sync s3://bucket/photos photos" in ended.stderr

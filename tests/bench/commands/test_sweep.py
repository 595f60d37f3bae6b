"""`bench sweep` for real: killed and gone on with, its file, its page; trials are processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cli import main
from bench.measure import sweep_trial
from bench.measure.refusals import DoesNotFit
from bench.measure.trainers import FromPageable, NullTrainer
from bench.report.grid import Point
from loaders.batch import Batch
from precache.console import commandline
from precache.errors import SettingError
from tests.bench.settings import sweep_settings
from tests.command import ROOT, check_bad_input

# no loader keeps up with this trainer: nothing is pruned
SETTINGS = ("--trainer", "emulated:1e6", "--size", 32, "--batches", 2, "--warmup", 1, "--device", "cpu")
GRID = ("--workers", "0,1", "--batch-size", 4, "--repeats", 1)


def sweep(*arguments: object) -> int:
    return commandline.run(main, "bench", ["sweep", *map(str, arguments)])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def beside_others(path: Path, share: float) -> None:
    """As if other processes had taken that share of the CPUs during each trial: here they take any."""
    found = lines(path)
    for line in found:
        if "trial" in line:
            assert 0 <= line["trial"]["other_cpu"] <= 1
            line["trial"]["other_cpu"] = share
    path.write_text("".join(json.dumps(line) + "\n" for line in found))


@pytest.fixture(scope="module")
def killed(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a sweep of two trials that SIGKILL ended after the first."""
    path = tmp_path_factory.mktemp("sweep") / "killed.jsonl"
    command = [sys.executable, "-m", "bench", "sweep", raw_tree, *SETTINGS, *GRID, "--out", path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        list(map(str, command)), env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    deadline = time.monotonic() + 100
    while not path.exists() or path.read_bytes().count(b"\n") < 2:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert len(lines(path)) == 2
    beside_others(path, 0.0)
    return path


@pytest.fixture(scope="module")
def finished(killed: Path, raw_tree: Path) -> Path:
    """The same file, after the same command was run again."""
    path = killed.with_name("finished.jsonl")
    path.write_text(killed.read_text() + '{"point": {"back')  # what was being written when it was killed
    assert sweep(raw_tree, *SETTINGS, *GRID, "--out", path) == 0
    beside_others(path, 0.0)
    return path


def test_the_header_has_the_settings_that_all_trials_share(killed: Path) -> None:
    """And no others: a file that an earlier version began would be refused."""
    assert lines(killed)[0]["settings"] == {
        "trainer": "emulated:1e6", "device": "cpu", "size": 32, "warmup": 1, "batches": 2,
        "compiled": False, "cache": "none",
    }  # fmt: skip


def test_a_killed_sweep_goes_on_where_it_was(killed: Path, finished: Path) -> None:
    assert finished.read_text().startswith(killed.read_text())
    trials = lines(finished)[1:]
    assert [trial["point"]["workers"] for trial in trials] == [0, 1]
    for trial in trials:
        assert 0 < trial["trial"]["together"] < trial["trial"]["trainer"]


def test_a_finished_sweep_is_shown_again_without_measuring(
    finished: Path, raw_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = finished.read_bytes()
    page = tmp_path / "page.html"
    assert sweep(raw_tree, *SETTINGS, *GRID, "--out", finished, "--html", page) == 0
    assert finished.read_bytes() == before
    shown = capsys.readouterr().out
    assert "--pin changes nothing without CUDA: it is left out" in shown
    assert f"pytorch on {raw_tree}: choose " in shown
    assert "the trainer waits with every number of workers" in shown
    parser = _Page(page.read_text())
    assert {"chart-0-0", "chart-0-1"} <= parser.ids
    assert parser.external == []
    assert any(text.startswith(f"pytorch on {raw_tree}: choose ") for text in parser.texts)


def test_a_second_folder_adds_its_trials_to_the_file_of_the_first(
    finished: Path,
    raw_tree: Path,
    converted: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "sweep.jsonl"
    path.write_bytes(finished.read_bytes())
    assert sweep(converted["shards"], *SETTINGS, *GRID, "--out", path) == 0
    beside_others(path, 0.0)
    both = path.read_bytes()
    assert both.startswith(finished.read_bytes())
    assert [line["point"]["data"] for line in lines(path)[4:]] == [str(converted["shards"])] * 2
    capsys.readouterr()
    for tree, other in ((raw_tree, converted["shards"]), (converted["shards"], raw_tree)):
        assert sweep(tree, *SETTINGS, *GRID, "--out", path) == 0
        shown = capsys.readouterr().out
        assert f" on {tree}: choose " in shown
        assert str(other) not in shown
    assert path.read_bytes() == both, "nothing is measured again"
    path.write_bytes(
        both.replace(json.dumps(lines(path)[3]["data"]).encode(), b'{"%s": "0"}' % bytes(converted["shards"]))
    )
    assert sweep(converted["shards"], *SETTINGS, *GRID, "--out", path) == 2
    assert "on other data (" in capsys.readouterr().err
    assert sweep(raw_tree, *SETTINGS, *GRID, "--out", path) == 0


def test_beside_other_busy_processes_nothing_is_recommended(
    finished: Path, raw_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "sweep.jsonl", tmp_path / "page.html"
    path.write_bytes(finished.read_bytes())
    beside_others(path, 0.31)
    assert sweep(raw_tree, *SETTINGS, *GRID, "--out", path, "--html", page) == 0
    shown = capsys.readouterr().out
    assert "Other processes took 31% of the CPUs" in shown
    assert "choose" not in shown
    assert not any(line.rstrip().endswith(("*", "_")) for line in shown.splitlines())
    texts = _Page(page.read_text()).texts
    assert any(text.startswith("Other processes took 31% of the CPUs") for text in texts)
    assert not any("choose" in text for text in texts)


def test_a_file_that_does_not_tell_of_other_processes_is_read(
    finished: Path, raw_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.jsonl"
    found = lines(finished)
    for line in found[1:]:
        del line["trial"]["other_cpu"]
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    assert sweep(raw_tree, *SETTINGS, *GRID, "--out", path) == 0
    assert "choose" in capsys.readouterr().out


def test_quiet_prints_nothing_and_writes_the_page(
    finished: Path, raw_tree: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert sweep(raw_tree, *SETTINGS, *GRID, "--out", finished, "--html", page, "--quiet") == 0
    assert tuple(capfd.readouterr()) == ("", "")
    assert _Page(page.read_text()).ids >= {"chart-0-0"}


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.external: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids |= {value for name, value in attrs if name == "id" and value}
        self.external += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_more_workers_than_unblock_the_trainer_are_noted_and_not_measured(
    finished: Path, raw_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, first, _ = lines(finished)
    first["trial"]["together"] = first["trial"]["trainer"]
    path = tmp_path / "sweep.jsonl"
    path.write_text(json.dumps(header) + "\n" + json.dumps(first) + "\n")
    assert sweep(raw_tree, *SETTINGS, *GRID, "--out", path) == 0
    assert lines(path)[2]["pruned"] == "the trainer does not wait with 0 workers"
    assert "choose 0 workers, batch 4" in capsys.readouterr().out
    again = path.read_bytes()
    assert sweep(raw_tree, *SETTINGS, *GRID, "--out", path) == 0
    assert path.read_bytes() == again


def _other_machine(header: dict[str, Any]) -> None:
    header["machine"]["cpu"] = "Z80, 1 CPUs"


def _other_data(header: dict[str, Any]) -> None:
    header["data"] = dict.fromkeys(header["data"], "another digest")


def _other_work(header: dict[str, Any]) -> None:
    header["settings"]["size"] = 33


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        (_other_machine, ["on another machine (cpu: Z80, 1 CPUs, here ", "name another --out"]),
        (_other_data, ["on other data (", "another digest"]),
        (_other_work, ["with other settings (size: 33, here 32)"]),
        (dict.clear, ["not a file of 'bench sweep'"]),
    ],
)
def test_the_file_of_another_sweep_is_refused_and_left_as_it_is(
    finished: Path,
    raw_tree: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], None],
    mentions: list[str],
) -> None:
    header, *others = lines(finished)
    change(header)
    path = tmp_path / "sweep.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *others)))
    before = path.read_bytes()
    code = sweep(raw_tree, *SETTINGS, *GRID, "--out", path)
    check_bad_input(subprocess.CompletedProcess([], code, *capfd.readouterr()), str(path), *mentions)
    assert path.read_bytes() == before


def test_a_file_of_something_else_is_not_touched(
    raw_tree: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("do not\nlose this")
    code = sweep(raw_tree, *SETTINGS, *GRID, "--out", path)
    check_bad_input(subprocess.CompletedProcess([], code, *capfd.readouterr()), "notes.txt: not a file of")
    assert path.read_text() == "do not\nlose this"


@pytest.mark.slow
def test_what_a_trial_cannot_do_is_one_line(
    converted: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.jsonl"
    code = sweep(converted["shards"], *SETTINGS, *GRID, "--size", 64, "--out", path)
    result = subprocess.CompletedProcess([], code, *capfd.readouterr())
    assert code == 2
    assert result.stderr.splitlines()[-1].startswith("bench: error: size 64 is more than")
    assert not path.exists(), "refused before anything is measured"


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (["--backend", "dalli"], "unknown backend 'dalli'"),
        (["--workers", "two"], "--workers must be numbers"),
        (["--batch-size", "0"], "batch_size must be"),
        (["--repeats", "0"], "repeats must be"),
        (["--batch-size", "4,71"], "batch_size 71 is more than the 70 pictures of an epoch"),
        (["--amp", "yes"], "unknown amp 'yes'; choose from: auto, bf16, fp16, off"),
        (["--cache", "disk"], "unknown cache 'disk'; choose from: device, none, ram"),
        (["--trainer", "vit_s_16", "--size", "192"], "takes pictures of 224 pixels a side, got size 192"),
        (["--trainer", "emulated", "--compile"], "compile is for trainers that compute"),
        (["--trainer", "resnet51"], "unknown trainer"),
        (["--html", ".", "--batch-size", "4"], "is a folder"),
        (["--out", ".", "--batch-size", "4"], "is a folder"),
    ],
)
def test_bad_input_is_one_line(
    raw_tree: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    mention: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = sweep(raw_tree, *arguments)
    check_bad_input(subprocess.CompletedProcess([], code, *capfd.readouterr()), mention)
    assert list(tmp_path.iterdir()) == []


def test_a_loader_that_cannot_be_built_is_refused_before_another_is_measured(
    raw_tree: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.jsonl"
    assert sweep(raw_tree, "--backend", "pytorch,nvjpeg", *SETTINGS, *GRID, "--out", path) == 2
    assert "nvjpeg" in capfd.readouterr().err.splitlines()[-1]
    assert len(lines(path)) == 1, "the header: pytorch, which comes first, was not measured"


def test_a_batch_that_does_not_fit_is_told_by_the_process_of_its_trial(raw_tree: Path) -> None:
    settings = sweep_settings(trainer="emulated:100", size=32, warmup=0, batches=1)
    point = Point("pytorch", str(raw_tree), 10**9, None, None, 0)
    with pytest.raises(DoesNotFit, match="batch_size 1,000,000,000 of 32x32 does not fit into memory"):
        sweep_trial.run(sweep_trial.at_point(settings, point, 5))


def test_settings_of_a_sweep_are_checked() -> None:
    with pytest.raises(SettingError, match="size must be an integer from 1 to 8,192, got 0"):
        sweep_settings(trainer="emulated:100", size=0, warmup=0, batches=1)


def test_batches_from_pageable_memory_reach_the_trainer_in_its_dtype() -> None:
    class Taking(NullTrainer):
        dtype = torch.bfloat16
        taken: Batch

        def step(self, batch: Batch) -> None:
            self.taken = batch

    trainer = Taking()
    images = torch.zeros(2, 4, 4, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    batch = Batch(images, torch.zeros(2, dtype=torch.int64), torch.arange(2))
    fed = FromPageable(trainer, torch.device("cpu"))
    assert fed.dtype == torch.uint8
    fed.step(batch)
    assert trainer.taken.images.dtype == torch.bfloat16
    assert trainer.taken.images.is_contiguous(memory_format=torch.channels_last)

"""`bench ddp`: real ranks under torchrun with gloo, and what is said of hand-made rates."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.cli import main
from bench.ddp import sentences, summarise
from precache import commandline
from tests.command import ROOT, check_bad_input

QUICK = (
    *("--batch-size", 4, "--size", 32, "--batches", 2, "--warmup", 1, "--workers", 1),
    *("--repeats", 1, "--device", "cpu"),
)


def ddp(*arguments: object) -> int:
    return commandline.run(main, "bench", ["ddp", *map(str, arguments)])


def test_two_ranks_are_measured_alone_at_their_own_pace_and_in_step(
    converted: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out/ddp.json"
    arguments = ("--ranks", 2, "--backend", "shards", "--trainer", "emulated:200", *QUICK, "--json", path)
    assert ddp(converted["shards"], *arguments) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[:3]] == ["rank", "0", "1"]
    assert "times one rank alone" in shown
    assert "The slowest is rank " in shown
    result = json.loads(path.read_text())
    assert len(result["own"]) == len(result["together"]) == 2
    assert result["settings"]["ranks"] == 2
    total = sum(rank["median"] for rank in result["together"])
    assert result["total"]["median"] == pytest.approx(total)
    assert result["ratio"]["median"] == pytest.approx(total / result["one"]["median"])
    for rate in (result["one"], *result["own"], *result["together"]):
        assert 0 < rate["median"] <= 200, "an emulated accelerator is never faster than it is told to be"


def test_the_real_step_averages_gradients_over_the_ranks(
    raw_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ddp(raw_tree, "--ranks", 2, "--trainer", "resnet50", *QUICK, "--batches", 1, "--json", "-") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["settings"]["trainer"] == "resnet50"
    assert all(rate["median"] > 0 for rate in result["together"])


def rank(own: list[float], together: list[float], one: list[float] | None = None) -> dict[str, list[float]]:
    return {"one": one or [], "own": own, "together": together}


def test_the_slowest_rank_is_named_and_the_total_set_against_one_rank() -> None:
    ranks = [
        rank([990, 1000, 1010], [600, 610, 620], one=[1000, 1000, 1000]),
        rank([620, 640, 660], [600, 610, 620]),
        rank([980, 990, 1000], [600, 610, 620]),
    ]
    summary = summarise(ranks)
    assert (summary.slowest, summary.distinct) == (1, True)
    assert summary.total.median == 1830
    assert (summary.ratio.low, summary.ratio.median, summary.ratio.high) == (1.8, 1.83, 1.86)
    together, slowest = sentences(summary)
    assert together == "Together: 1,830 images/s, 1.83 times one rank alone (1,000); from 1.80 to 1.86."
    assert slowest == "The slowest is rank 1: at its own pace 640 images/s, the fastest 1,000."


@pytest.mark.parametrize("slow", [[880, 900, 1020], [985, 986, 987]])
def test_ranks_whose_ranges_overlap_or_nearly_agree_are_not_distinguishable(slow: list[float]) -> None:
    summary = summarise([rank([995, 1000, 1005], [900] * 3, one=[1000] * 3), rank(slow, [900] * 3)])
    assert summary.slowest == 1
    assert not summary.distinct
    assert sentences(summary)[1].endswith("not distinguishable from the others.")


def test_one_rank_has_no_slowest() -> None:
    assert len(sentences(summarise([rank([1000], [990], one=[1000])]))) == 1


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (["--ranks", "0"], "ranks must be an integer of at least 1"),
        (["--backend", "dalli"], "unknown backend 'dalli'"),
        (["--trainer", "emulated:fast"], "unknown rate 'fast'"),
        (["--batches", "0"], "batches must be"),
        (["--json", "."], "is a folder"),
    ],
)
def test_bad_input_is_one_line(
    raw_tree: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], mention: str
) -> None:
    code = ddp(raw_tree, *arguments)
    check_bad_input(subprocess.CompletedProcess([], code, *capfd.readouterr()), mention)


def test_what_a_rank_cannot_do_is_one_line(raw_tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = ddp(raw_tree, "--backend", "shards", "--trainer", "none", *QUICK)
    check_bad_input(
        subprocess.CompletedProcess([], code, *capfd.readouterr()), "backend 'shards' reads format 'shards'"
    )


def test_a_rank_that_is_killed_is_named_and_an_interrupt_leaves_no_process(raw_tree: Path) -> None:
    endless = ["--trainer", "emulated:5", *map(str, QUICK), "--batches", "10000"]
    for number, code, mention in (
        (signal.SIGKILL, 2, "rank 1 ended with exit code -9"),
        (signal.SIGINT, 130, "interrupted"),
    ):
        process = subprocess.Popen(
            [sys.executable, "-m", "bench", "ddp", str(raw_tree), *endless],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        ranks = _ranks_of(process)
        (ranks[1] if number == signal.SIGKILL else process).send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code, errors
        assert mention in errors.splitlines()[-1]
        assert psutil.wait_procs(ranks, timeout=10)[1] == []


def _ranks_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The processes of the two ranks, by rank, once they are there."""
    while process.poll() is None:
        try:
            children = psutil.Process(process.pid).children(recursive=True)
            ranks = {
                int(child.environ()["RANK"]): child
                for child in children
                if "bench.ddp_rank" in child.cmdline() and "RANK" in child.environ()
            }
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if len(ranks) == 2:
            return [ranks[0], ranks[1]]
    raise AssertionError(process.stderr and process.stderr.read())


def test_bench_refuses_to_run_under_torchrun(
    raw_tree: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # as torchrun sets them
    monkeypatch.setenv("WORLD_SIZE", "2")
    code = commandline.run(main, "bench", ["loaders", str(raw_tree)])
    check_bad_input(subprocess.CompletedProcess([], code, *capfd.readouterr()), "run 'bench ddp --ranks 2'")

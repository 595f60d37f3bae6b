"""`bench`, `bench loaders` and `bench quickstart`: their output, their files and their errors."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.commands import loaders as command
from bench.measure.profile import STEP, STEPS, WAIT
from bench.measure.ranks import launch_ranks
from precache.errors import WorkerError
from tests.bench.conftest import Bench
from tests.bench.settings import quick
from tests.command import ROOT, check_bad_input

QUICK = ("--batch-size", 8, "--batches", 2, "--warmup", 1, "--repeats", 1, "--size", 32, "--workers", 1)
SHARDS = ("loaders", "data/shards", "--backend", "shards", "--trainer", "none", "--device", "cpu")


def test_bench_refuses_to_run_in_several_processes_of_torchrun(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_bad_input(
        bench("loaders"), "would measure one another", "'bench loaders --ranks 4' without torchrun"
    )


@pytest.mark.usefixtures("trials_here")
def test_loaders_prints_and_keeps_a_result_that_report_shows(data: Path, bench: Bench) -> None:
    (data / "data/webdataset").unlink()
    words = ("--backend", "webdataset,shards", "--trainer", "none", "--device", "cpu", *QUICK)
    result = bench("loaders", *words, "--json", "out/r.json", "--html", "out/r.html")
    assert result.returncode == 0, result.stderr
    assert "skipped webdataset on data/webdataset: data/webdataset: does not exist" in result.stdout
    assert "wrote out/r.json\nwrote out/r.html" in result.stdout
    stored = (data / "out/r.json").read_text()
    assert [row["key"]["backend"] for row in json.loads(stored)["rows"]] == ["shards"]
    assert "<html" in (data / "out/r.html").read_text()
    shown = bench("report", "out/r.json")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[:4] == result.stdout.splitlines()[:4]
    again = bench("loaders", *words, "--json", "out/r.json", "--quiet")
    assert (again.returncode, again.stdout) == (0, "")
    assert (data / "out/r.json").read_text() == stored, "nothing is measured again"
    printed = bench(*SHARDS, *QUICK, "--json", "-")
    assert json.loads(printed.stdout)["command"] == "loaders"
    check_bad_input(bench("loaders", *words, "--json", "out/r.json", "--size", 48), "size: 32, here 48")


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_ends_loaders_with_a_line_on_the_runs_that_are_kept(
    number: signal.Signals, word: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "compare", lambda *_: signal.raise_signal(number))
    for options, mention in (
        ((), "nothing was written"),
        (("--json", "r.json"), "r.json keeps those that were"),
    ):
        ended = bench(*SHARDS, *options)
        assert ended.returncode == 128 + number
        last_line = ended.stderr.splitlines()[-1]
        assert last_line.startswith(f"bench: error: {word} before all runs were done; ")
        assert mention in last_line


@pytest.mark.usefixtures("trials_here")  # those that the killed command has not measured
def test_a_killed_grid_goes_on_with_its_finished_trials(raw_tree: Path, data: Path, bench: Bench) -> None:
    """Each combination of workers and batch size becomes a row."""
    path = data / "grid.json"
    words = [
        *("loaders", raw_tree, "--backend", "pytorch", "--trainer", "emulated:1e6", "--size", 32),
        *("--batches", 2, "--warmup", 1, "--device", "cpu", "--workers", "0,1", "--batch-size", "4"),
        *("--repeats", 1, "--json", path),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 100
    while not path.exists():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    lines = path.read_text().splitlines()
    kept_trials = [
        json.loads(line[:-1]) for line in lines if line.startswith('  {"key"') and line[-2:] == "},"
    ]
    assert kept_trials
    done = bench(*words)
    assert done.returncode == 0, done.stderr
    assert f"{path} is there: the runs in it are not measured again" in done.stdout
    content = json.loads(path.read_text())
    assert content["trials"][: len(kept_trials)] == kept_trials
    assert [row["key"]["workers"] for row in content["rows"]] == [0, 1]
    refused = bench(*words[:-4], "--batch-size", 4, "--workers", "1,x")
    check_bad_input(refused, "--workers", "1,x")


def test_loaders_measures_two_ranks_alone_and_in_step(data: Path, bench: Bench) -> None:
    words = ("--ranks", 2, "--backend", "shards", "--trainer", "emulated:200", "--device", "cpu")
    done = bench("loaders", "data/shards", *words, *QUICK, "--json", "out/r.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("shards: 2 ranks in step train "), "the answer comes first"
    alone_row, total_row, *rank_rows = json.loads((data / "out/r.json").read_text())["rows"]
    rank_rates = [row["values"]["fed_images_per_s"]["median"] for row in rank_rows]
    total_rate = total_row["values"]["fed_images_per_s"]["median"]
    assert total_rate == pytest.approx(sum(rank_rates), rel=1e-4)
    alone_rate = alone_row["values"]["fed_images_per_s"]["median"]
    assert total_row["values"]["speedup"]["median"] == pytest.approx(total_rate / alone_rate, rel=1e-4)
    for rate in (alone_rate, *rank_rates):
        assert 0 < rate <= 200, "an emulated accelerator is never faster than it is told to be"
    shown = bench("report", "out/r.json")
    assert shown.stdout.splitlines()[0] == done.stdout.splitlines()[0]


def rank_processes() -> dict[int, psutil.Process]:
    """Return the processes of the ranks that this process has started, by their numbers."""
    processes = {}
    for child in psutil.Process().children(recursive=True):
        if "bench.measure.ranks" in " ".join(child.cmdline()[:8]):
            processes[int(child.environ()["RANK"])] = child
    return processes


@pytest.mark.slow  # starts ranks twice more
def test_a_dead_rank_is_named_and_an_interrupt_ends_all_ranks(raw_tree: Path) -> None:
    settings = quick(batch_size=4, workers=0, warmup=0, batches=1, repeats=10**6)  # it would take hours
    settings = settings.for_loader("auto", raw_tree, 5)
    started: list[psutil.Process] = []

    def kill(done: int, total: int) -> None:
        if done == 1:
            rank_processes()[1].kill()

    def interrupt(done: int, total: int) -> None:
        started.extend(rank_processes().values())
        raise KeyboardInterrupt

    with pytest.raises(WorkerError, match=r"^2 ranks: rank 1 .* -9") as raised:
        launch_ranks(settings, 2, kill)
    assert "fewer ranks" in raised.value.remedy
    with pytest.raises(KeyboardInterrupt):
        launch_ranks(settings, 2, interrupt)
    assert len(started) == 2
    assert psutil.wait_procs(started, timeout=10)[1] == []


@pytest.mark.usefixtures("trials_here")
def test_quickstart_writes_a_report_and_keeps_its_pictures(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    root = tmp_path / "new/data/quickstart"
    done = bench("quickstart", "--images", 16, "--batches", 1, "--repeats", 1)
    assert done.returncode == 0, done.stderr
    assert "busy" in done.stdout.splitlines()[0], "the sentence is the first line"
    assert "wrote data/quickstart/report.html" in done.stdout
    result = json.loads((root / "result.json").read_text())
    assert result["settings"]["augment"] == "train"
    rows = {row["key"]["data"]: row for row in result["rows"]}
    times = json.loads((root / "conversions.json").read_text())
    for name in ("shards", "webdataset"):
        assert rows[name]["values"]["convert_s"]["median"] == pytest.approx(times[name], rel=1e-4)
    for mention in ("pytorch", "shards", "webdataset", "h100"):
        assert mention in done.stdout
        assert mention in (root / "report.html").read_text()
    refused = bench("quickstart", "--images", 60)
    check_bad_input(refused, "data/quickstart/raw", "16 pictures", "--images", "60", "remove")


def test_profile_prints_operators_and_names_waits_in_the_trace(data: Path, bench: Bench) -> None:
    words = ("--batch-size", 4, "--size", 32, "--workers", 1, "--warmup", 1)
    done = bench(
        "loaders", "data/shards", "--backend", "shards", "--device", "cpu", "--profile", "a/b", *words
    )
    assert done.returncode == 0, done.stderr
    events = json.loads((data / "a/b/trace.json").read_text())["traceEvents"]
    spans = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert spans.count(WAIT) == spans.count(STEP) == STEPS
    printed = done.stdout.splitlines()
    assert re.match(r"shards on data/shards: training waits \d+% of the time for batches: ", printed[0])
    assert any("conv" in line for line in printed), "torch's own table"

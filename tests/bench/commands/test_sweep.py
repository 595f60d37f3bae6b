"""`bench sweep` for real: killed and gone on with, its file, its page; trials are processes of their own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.measure.sweep import Trials, run
from bench.report.sweep import Point
from precache.cli import commandline
from tests.bench.conftest import Bench
from tests.bench.settings import quick
from tests.command import ROOT, check_bad_input

# no loader keeps up with this trainer: nothing is pruned
SETTINGS = (
    *("--trainer", "emulated:1e6", "--size", 32, "--batches", 2, "--warmup", 1, "--device", "cpu"),
    *("--workers", "0,1", "--batch-size", 4, "--repeats", 1),
)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, found: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    return path


def steadied(path: Path, other_cpu: float = 0.0) -> Path:
    """As where the trainer is as fast as it is named, and others take that share of the CPUs."""
    found = lines(path)
    for line in found:
        if "trial" in line:
            assert line["trial"]["together"] > 0
            line["trial"] |= {"other_cpu": other_cpu, "trainer": 1e6}
    return write(path, found)


@pytest.fixture(scope="module")
def finished(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a sweep of two trials that SIGKILL ended after the first, and that went on."""
    path = tmp_path_factory.mktemp("sweep") / "finished.jsonl"
    words = list(map(str, ["sweep", raw_tree, *SETTINGS, "--out", path]))
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 100
    while not path.exists() or path.read_bytes().count(b"\n") < 2:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    killed = steadied(path).read_text()
    path.write_text(killed + '{"point": {"back')  # what was being written when it was killed
    assert commandline.run(main, "bench", words) == 0
    assert path.read_text().startswith(killed)
    return steadied(path)


def test_a_killed_sweep_goes_on_and_a_finished_one_is_shown_without_measuring(
    finished: Path, raw_tree: Path, tmp_path: Path, bench: Bench
) -> None:
    _, *trials = lines(finished)
    assert [trial["point"]["workers"] for trial in trials] == [0, 1]
    before = finished.read_bytes()
    words = ("sweep", raw_tree, *SETTINGS, "--html", tmp_path / "page.html")
    shown = bench(*words, "--out", finished)
    assert (shown.returncode, finished.read_bytes()) == (0, before)
    assert "the trainer waits with every number of workers" in " ".join(shown.stdout.split())
    for text in (" ".join(shown.stdout.split()), (tmp_path / "page.html").read_text()):
        assert f"pytorch on {raw_tree}: choose " in text
    steadied(Path(shutil.copy(finished, tmp_path / "busy.jsonl")), 0.31)
    shown = bench(*words, "--out", tmp_path / "busy.jsonl")
    for text in (" ".join(shown.stdout.split()), (tmp_path / "page.html").read_text()):
        assert "Other processes took 31% of the CPUs" in text
        assert "choose" not in text


def test_a_second_folder_adds_its_trials_to_the_file_of_the_first(
    finished: Path, raw_tree: Path, converted: dict[str, Path], tmp_path: Path, bench: Bench
) -> None:
    shards, path = converted["shards"], Path(shutil.copy(finished, tmp_path))
    words = (*SETTINGS, "--out", path)
    assert bench("sweep", shards, *words).returncode == 0
    both = path.read_bytes()
    assert both.startswith(finished.read_bytes())
    assert [line["point"]["data"] for line in lines(path)[4:]] == [str(shards)] * 2
    assert str(shards) not in bench("sweep", raw_tree, *words).stdout
    assert path.read_bytes() == both, "nothing is measured again"
    found = lines(path)
    found[3]["data"] = {str(shards): "another digest"}
    write(path, found)
    check_bad_input(bench("sweep", shards, *words), "with other data (")
    assert bench("sweep", raw_tree, *words).returncode == 0


def test_a_batch_that_does_not_fit_is_a_finding_told_by_the_process_of_its_trial(
    raw_tree: Path, tmp_path: Path
) -> None:
    data = str(raw_tree)
    points = [Point("pytorch", data, batch, 0) for batch in (10**9, 2 * 10**9)]
    path, header = tmp_path / "sweep.jsonl", {"machine": {}, "data": {}, "settings": {}}
    run(points, quick(trainer="emulated:100", warmup=0, batches=1), Trials(path, header), {data: 5})
    again = Trials(path, header)
    assert again.failed == {points[0]: "batch 1,000,000,000 does not fit into memory"}
    assert again.pruned == {points[1]: "batch 1,000,000,000 did not fit into memory"}
    found = again.found(points)
    assert (found.measured, set(found.left_out)) == ({}, set(points))

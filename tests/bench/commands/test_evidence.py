"""The command `bench evidence` as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.evidence.steps import STEPS
from tests.command import ROOT, check_bad_input, run, run_here


def test_without_a_gpu_the_command_is_one_line_that_names_the_smoke_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_bad_input(run("bench", "evidence", cwd=tmp_path), "finds no GPU", "--smoke")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (("--again", "race"), ("unknown step 'race'", "races")),
        (("--minutes", "0"), ("minutes must be positive, got 0",)),
        (("--out", "file/results"), ("file/results", "check the path")),
        (("--data", "file/evidence"), ("file/evidence-smoke", "check the path")),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: tuple[str, ...], mentions: tuple[str, ...]) -> None:
    (tmp_path / "file").touch()
    check_bad_input(run_here("bench", "evidence", "--smoke", *arguments, cwd=tmp_path), *mentions)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_smoke_run_that_is_killed_goes_on_and_ends_with_every_step(tmp_path: Path) -> None:
    results = tmp_path / "data/evidence-smoke/results"
    first = results / f"smoke-{STEPS[0].name}.json"
    killed = _start(tmp_path)
    while not first.exists():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    written_ns = first.stat().st_mtime_ns
    whole = _start(tmp_path)
    output, _ = whole.communicate()
    assert whole.returncode == 0, output
    assert first.stat().st_mtime_ns == written_ns
    for step in STEPS:
        assert (
            json.loads((results / f"smoke-{step.name}.json").read_text())["machine"]["accelerator"] == "none"
        )
    tables = (results / "gpu-tables.md").read_text()
    assert tables.startswith("# Does the GPU wait for data?\n\nThis is a trial run on a CPU")
    assert "Not measured: facts" not in tables
    assert (results / "gpu-evidence.html").stat().st_size > 1e6
    again = _start(tmp_path)
    output, _ = again.communicate()
    assert (again.returncode, output.count(", kept\n")) == (0, len(STEPS))


def _start(folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "bench", "evidence", "--smoke"]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )

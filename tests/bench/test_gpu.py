"""`bench/gpu.sh`, which `make gpu` runs: its steps, their time limits, and a later run that goes on."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.command import ROOT
from tests.test_guides import command_of

SCRIPT = ROOT / "bench/gpu.sh"
STAND_IN = """#!/bin/bash
# in place of Python: writes down its arguments, and leaves a result, unless the file `broken` names the step
if [ "$1" = -c ]; then echo "NVIDIA H200"; exit; fi
printf '%s\\x1f' "${@:2}" >>calls; echo >>calls
[ "$2" != bench.gpu_page ] || exit 0
json=${!#}; step=$(basename "$json" .json)
[ "$2" != pytest ] || step=tests
if grep -qsx "$step" hanging; then sleep 600 & echo $! >sleeper; wait; fi
if grep -qsx "$step" broken; then echo "no such picture" >&2; exit 2; fi
case $json in *.json) echo '{}' >"$json" ;; esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def run(folder: Path, *steps: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the script in the folder with a stand-in of Python."""
    environment = {"PYTHON": "./python", "OUT": "out", "DATA": "da ta", **variables}
    return subprocess.run(
        ["bash", SCRIPT, *steps],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def take_calls(folder: Path) -> list[list[str]]:
    """Return the modules that were run since the last call of this function, with their arguments."""
    lines = (folder / "calls").read_text().splitlines()
    (folder / "calls").unlink()
    return [line.split("\x1f")[:-1] for line in lines]


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_step_is_a_command_that_bench_takes(device: str, folder: Path) -> None:
    assert run(folder, DEVICE=device).returncode == 0
    calls = take_calls(folder)
    assert [words[0] for words in calls[-2:]] == ["pytest", "bench.gpu_page"]
    for module, name, *words in calls[:-2]:
        # a machine without a GPU refuses `--device cuda`
        arguments = ["cpu" if word == "cuda" else word for word in words]
        command_of(module, name).make_context(name, arguments)
    names = {path.stem for path in (folder / "out").glob("*.json")}
    assert {"resnet50", "photos", "compiled", "vit", "hardware", "workers"} <= names


def test_a_failed_step_is_named_and_repeated_by_the_next_run(folder: Path) -> None:
    (folder / "broken").write_text("vit\ntests\n")
    failed = run(folder)
    assert failed.returncode == 1
    assert "vit: failed: no such picture; see " in failed.stdout
    assert "without a result: vit tests" in failed.stdout
    assert not (folder / "out/vit.json").exists()
    take_calls(folder)
    (folder / "broken").unlink()
    assert run(folder).returncode == 0
    measured = [words for words in take_calls(folder) if words[0] in ("bench", "pytest")]
    assert [words[0] for words in measured] == ["bench", "pytest"]
    assert measured[0][-1].endswith("/vit.json")


def test_only_the_named_steps_are_run(folder: Path) -> None:
    assert run(folder, "vit", "hardware").returncode == 0
    assert {path.name for path in (folder / "out").glob("*.*")} == {"vit.json", "hardware.json"}


def test_no_step_begins_when_the_time_is_over(folder: Path) -> None:
    late = run(folder, "photos", MINUTES="0")
    assert late.returncode == 1
    assert "without a result: photos;" in late.stdout


def test_an_unknown_step_is_refused_with_the_names_of_steps(folder: Path) -> None:
    misspelt = run(folder, "resnet")
    assert misspelt.returncode == 2
    assert "resnet" in misspelt.stderr
    assert "resnet50-device" in misspelt.stderr


@pytest.mark.slow
def test_a_step_that_hangs_is_ended_with_its_children(folder: Path) -> None:
    (folder / "hanging").write_text("hardware\n")
    late = run(folder, "hardware", "vit", MINUTES="1")
    assert late.returncode == 1
    assert "hardware: stopped after " in late.stdout
    sleeper = int((folder / "sleeper").read_text())
    wait_for(lambda: not psutil.pid_exists(sleeper) or psutil.Process(sleeper).status() == "zombie")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_goes_on_and_leaves_a_page(tmp_path: Path) -> None:
    variables = {"PYTHON": sys.executable, "DEVICE": "cpu", "OUT": "out", "DATA": "data"}
    command = ["bash", str(SCRIPT), "resnet50-device", "vit", "tests"]
    options = {"cwd": tmp_path, "env": {**os.environ, **variables}, "stdout": subprocess.PIPE, "text": True}
    killed = subprocess.Popen(command, **options)  # type: ignore[call-overload]
    first, second = (tmp_path / f"out/{name}.json" for name in ("resnet50-device", "vit"))
    unfinished = tmp_path / "out/unfinished/vit.json"
    wait_for(lambda: second.exists() or (unfinished.exists() and trial_lines(unfinished)), 400)
    assert not second.exists(), "it should have been killed before"
    children = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.communicate()
    assert not psutil.wait_procs(children, timeout=30)[1], "else the next run would measure beside them"
    first_result, trials = first.read_bytes(), trial_lines(unfinished)
    again = subprocess.run(command, timeout=400, check=False, **options)  # type: ignore[call-overload]
    assert again.returncode == 0, again.stdout
    assert first.read_bytes() == first_result
    assert trials <= trial_lines(second), "they were not measured again"
    page = (tmp_path / "out/page.html").read_text()
    for mention in ("<h2>vit</h2>", "<h2>tests</h2>", "emulated:4000", 'href="vit.json"', "In miniature"):
        assert mention in page


def trial_lines(result: Path) -> set[str]:
    """Return the lines of the trials in the file of a result."""
    return {line.strip(" ,") for line in result.read_text().splitlines() if '"numbers"' in line}

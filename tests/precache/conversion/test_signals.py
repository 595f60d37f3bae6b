"""Real signals to a command and its workers: what is finished is kept, and the same command goes on."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from precache import convert
from precache.conversion.journal import JOURNAL_NAME
from precache.dataset.manifest import MANIFEST_NAME
from tests.command import ROOT, run_here
from tests.conftest import small_recipe
from tests.precache.cli.test_terminal import CONVERT, SLOWLY
from tests.precache.destinations import beside, contents


def start(folder: Path, arguments: Sequence[object]) -> "subprocess.Popen[str]":
    script = folder / "slowly.py"
    script.write_text(SLOWLY)
    return subprocess.Popen(
        [sys.executable, script, *map(str, arguments)], cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def shards_written(folder: Path) -> int:
    """How many finished shards the journals in `folder` and below it hold."""
    return sum(len(path.read_bytes().splitlines()) - 1 for path in folder.glob("**/" + JOURNAL_NAME))


def wait_for_shards(process: "subprocess.Popen[str]", folder: Path, count: int) -> None:
    deadline_s = time.monotonic() + 60
    while process.poll() is None and shards_written(folder) < count and time.monotonic() < deadline_s:
        time.sleep(0.002)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_a_killed_command_or_worker_changes_no_byte(
    seed: int, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    draw, out = random.Random(seed), tmp_path / "out"
    arguments = ["convert", raw_tree, out, *CONVERT, "--workers", 2]
    for finished in (1, 3):
        process = start(tmp_path, arguments)
        wait_for_shards(process, tmp_path, finished)
        time.sleep(draw.uniform(0, 0.2))
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        victim = family[0] if finished > 1 else draw.choice(family)
        victim.kill()
        _, errors = process.communicate(timeout=60)
        assert "Traceback" not in errors
        _, alive = psutil.wait_procs(family[1:], timeout=30)
        assert alive == [], "workers outlive what started them"
        if (out / MANIFEST_NAME).exists():  # the shard was tried again
            break
    convert(raw_tree, out, small_recipe("shards"), workers=0)
    assert contents(out) == contents(converted["shards"])
    assert beside(out) == ["slowly.py"]


@pytest.mark.parametrize(
    ("number", "code", "overwrites"), [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, True)]
)
def test_signals_end_with_one_line_their_code_and_what_is_kept(
    number: signal.Signals,
    code: int,
    overwrites: bool,
    raw_tree: Path,
    converted: dict[str, Path],
    tmp_path: Path,
) -> None:
    arguments = ["convert", raw_tree, "out", *CONVERT, "--workers", "0"]
    if overwrites:
        convert(raw_tree, tmp_path / "out", small_recipe("dali"), workers=0)
        arguments.append("--overwrite")
    process = start(tmp_path, arguments)
    wait_for_shards(process, tmp_path, 2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    (line,) = errors.splitlines()
    told = re.match(r"precache: error: .* after (\d+) of 70 pictures were finished; these are kept", line)
    assert told, line
    resumed = run_here("precache", *arguments, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"out: {told[1]} of 70 pictures are already converted" in resumed.stdout
    assert contents(tmp_path / "out") == contents(converted["shards"])

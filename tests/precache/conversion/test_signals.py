"""Real signals to a command: what is finished is kept, and the same command goes on.

See the attack `kills` of `tests/faults` for SIGKILL.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from precache import convert
from precache.conversion.journal import JOURNAL_NAME
from tests.command import ROOT, run_here
from tests.conftest import small_recipe
from tests.precache.cli.test_terminal import CONVERT, SLOWLY
from tests.precache.destinations import contents


def has_two_shards(folder: Path) -> bool:
    """By the journals in `folder` and below it."""
    return any(len(path.read_bytes().splitlines()) > 2 for path in folder.glob("**/" + JOURNAL_NAME))


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
    arguments = ["convert", str(raw_tree), "out", *CONVERT, "--workers", "0"]
    if overwrites:
        convert(raw_tree, tmp_path / "out", small_recipe("dali"), workers=0)
        arguments.append("--overwrite")
    command, environment = [sys.executable, "-c", SLOWLY, *arguments], {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        while process.poll() is None and not has_two_shards(tmp_path):
            time.sleep(0.002)
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

"""Run a command of the project as a user does: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(module: str, *arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """`python -m module arguments` in `cwd`, on the code of this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def check_bad_input(result: "subprocess.CompletedProcess[str]", *mentions: str) -> None:
    """Exit code 2, and one line on stderr that mentions what it must."""
    assert result.returncode == 2, result
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    for mention in mentions:
        assert mention in lines[0]

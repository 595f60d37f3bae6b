"""Commands for which the system opens too few files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ROOT, check_bad_input


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "{tree}", "out", "--format", "shards", "--workers", "2"),
        ("check", "{tree}", "--list", "list.csv", "--workers", "2"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_says_how_many_files_it_may_open(
    arguments: tuple[str, ...], raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    words = [word.format(tree=raw_tree, data=converted["shards"]) for word in arguments]
    command = ["sh", "-c", 'ulimit -Sn 8 && exec "$0" "$@"', sys.executable, "-m", "precache", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    result.stderr = "\n".join(line for line in result.stderr.splitlines() if " error: " in line)
    check_bad_input(result, "ulimit -n")
    assert "verify" not in result.stderr
    assert not (tmp_path / "out" / "dataset.json").exists()

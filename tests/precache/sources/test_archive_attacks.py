import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ROOT


def outcomes(folder: Path, first: int, seeds: int) -> dict[str, int]:
    (folder / "inside").mkdir()
    command = [sys.executable, "-W", "ignore", "-m", "tests.precache.sources.attack"]
    answer = subprocess.run(
        [*command, folder / "inside", str(first), str(seeds)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert os.listdir(folder) == ["inside"]  # nothing is written anywhere else
    found: dict[str, int] = ast.literal_eval(answer.stdout.splitlines()[-1])
    return found


def test_a_damaged_archive_ends_in_one_line_or_in_a_right_result(tmp_path: Path) -> None:
    assert sum(outcomes(tmp_path, 0, 150).values()) == 150


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_two_thousand_damaged_archives_end_so(tmp_path: Path) -> None:
    found = outcomes(tmp_path, 1000, 2000)
    assert sum(found.values()) == 2000
    assert min(found[outcome] for outcome in ("refused", "read", "rejected", "converted")) >= 20

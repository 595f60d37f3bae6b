"""Run each attack for a few seconds; in full with `pytest -m faults`, or `python -m tests.faults`."""

import os
from pathlib import Path

import pytest

from tests.faults import runner, shim
from tests.faults.__main__ import long_count
from tests.faults.runner import ATTACKS, NEED_THE_SHIM

QUICK = {
    "kills": 16, "errnos": 40, "sidecars": 24, "locks": 8, "pictures": 300, "folders": 40, "loaders": 20,
}  # fmt: skip


def check_no_case_fails(name: str, count: int, tmp_path: Path, jobs: int) -> None:
    outcomes = runner.run(name, 0, count, tmp_path, jobs=jobs)
    assert not (failures := runner.failures(name, outcomes)), "\n".join(["", *failures[:20]])
    assert len(outcomes) == count


@pytest.fixture(params=ATTACKS)
def name(request: pytest.FixtureRequest) -> str:
    if request.param in NEED_THE_SHIM and (reason := shim.why_unavailable()):
        pytest.skip(reason)
    return str(request.param)


def test_attack_loses_breaks_and_blocks_nothing(name: str, tmp_path: Path) -> None:
    # A second host, which loads torch and DALI again, costs more time than it saves.
    check_no_case_fails(name, QUICK[name], tmp_path, jobs=1 if name in ("folders", "loaders") else 2)


@pytest.mark.faults
@pytest.mark.timeout(3 * 3600)
def test_long_attack_loses_breaks_and_blocks_nothing(name: str, tmp_path: Path) -> None:
    check_no_case_fails(name, long_count(name, tmp_path), tmp_path, jobs=2 * (os.cpu_count() or 1))

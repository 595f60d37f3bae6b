"""The attacks, each for a few seconds; in full under `pytest -m faults`, or by `python -m tests.faults`."""

import os
from pathlib import Path

import pytest

from tests.faults import nursery, shim
from tests.faults.__main__ import long_count
from tests.faults.runner import ATTACKS, NEED_THE_SHIM

QUICK = {
    "kills": 16, "errnos": 40, "journals": 24, "locks": 8, "pictures": 300, "folders": 40, "loaders": 20,
}  # fmt: skip


def check_no_case_fails(name: str, count: int, tmp_path: Path, jobs: int) -> None:
    outcomes = nursery.run(name, 0, count, tmp_path, jobs=jobs)
    assert not (failures := nursery.failures(name, outcomes)), "\n".join(["", *failures[:20]])
    assert len(outcomes) == count


@pytest.fixture(params=ATTACKS)
def name(request: pytest.FixtureRequest) -> str:
    if request.param in NEED_THE_SHIM and (reason := shim.missing()):
        pytest.skip(reason)
    return str(request.param)


def test_nothing_is_lost_wrong_or_stuck(name: str, tmp_path: Path) -> None:
    # with torch and DALI a second host costs more than it saves
    check_no_case_fails(name, QUICK[name], tmp_path, jobs=1 if name in ("folders", "loaders") else 2)


@pytest.mark.faults
@pytest.mark.timeout(3 * 3600)
def test_nothing_is_lost_wrong_or_stuck_in_the_long_run(name: str, tmp_path: Path) -> None:
    check_no_case_fails(name, long_count(name, tmp_path), tmp_path, jobs=2 * (os.cpu_count() or 1))

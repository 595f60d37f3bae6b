"""The attacks, each for a few seconds; in full under `pytest -m faults`, or by `python -m tests.faults`."""

import os
from pathlib import Path

import psutil
import pytest

from tests.faults import nursery, shim, specimens
from tests.faults.__main__ import ATTACKS, NEED_THE_SHIM, long_count, module_of

QUICK = {
    "kills": 16, "errnos": 40, "journals": 24, "locks": 8, "pictures": 300, "folders": 40, "loaders": 20,
}  # fmt: skip


def check_no_case_fails(name: str, count: int, tmp_path: Path, jobs: int) -> None:
    tally = nursery.run(module_of(name), 0, count, tmp_path, jobs=jobs)
    assert not tally.failures, "\n".join(["", *tally.lines(name)])
    assert tally.count == count


def skip_without_shim(name: str) -> None:
    if name in NEED_THE_SHIM and (reason := shim.missing()):
        pytest.skip(reason)


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_is_lost_wrong_or_stuck(name: str, tmp_path: Path) -> None:
    skip_without_shim(name)
    # with torch and DALI a second host costs more than it saves
    check_no_case_fails(name, QUICK[name], tmp_path, jobs=1 if name in ("folders", "loaders") else 2)


@pytest.mark.faults
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_is_lost_wrong_or_stuck_in_the_long_run(name: str, tmp_path: Path) -> None:
    skip_without_shim(name)
    count = long_count(name, tmp_path)
    check_no_case_fails(name, count, tmp_path, jobs=2 * (os.cpu_count() or 1))


# The attackers themselves.


def test_each_way_to_end_badly_is_counted_and_touches_no_other_case(tmp_path: Path) -> None:
    tally = nursery.run(specimens, 0, 8, tmp_path)
    assert {seed: outcome.kind for seed, outcome in tally.failures} == {
        1: "crash", 2: "hang", 3: "traceback", 5: "crash",
    }  # fmt: skip
    assert tally.counts["right"] == 4
    details = {seed: outcome.detail for seed, outcome in tally.failures}
    assert "SIGSEGV" in details[1]
    assert "two lines" in details[3]
    assert "exit code 7" in details[5]
    assert tally.lines("specimens")[0].startswith(
        "crash: python -m tests.faults specimens --seed 1 --count 1"
    )
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "67"]]

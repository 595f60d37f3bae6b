"""`bench watch` on trainings in real cages, and on free ones: those of the lab."""

import os
from pathlib import Path

import pytest

from bench.lab.cages import CASES, find_cage
from bench.report.cages import Cage
from precache.errors import SettingError

QUICK = ("taskset", "quota", "worker_init_fn", "sleeping workers that are pinned")
"""Cases that are not marked slow: a run takes ten seconds."""


def test_the_lab_has_twelve_cages_and_twelve_free_runs() -> None:
    assert sum(case.kind is not None for case in CASES.values()) >= 12
    assert sum(case.kind is None for case in CASES.values()) >= 12


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs"
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_watch_names_the_cage_and_no_other(name: str, tmp_path: Path) -> None:
    try:
        kind, answer = find_cage(name, tmp_path)
    except SettingError as error:
        pytest.skip(str(error))
    expected = CASES[name].kind
    kinds = {"" if expected is None else expected.value}
    if expected is Cage.THROTTLED:
        kinds.add(Cage.FEW.value)  # a busy machine may leave a script less than its quota
    assert kind in kinds, answer

"""The threads of a loader do not push the training thread aside."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loaders.threads import EndingThread
from tests.building import build_loader
from tests.command import ROOT
from tests.conftest import IMAGES

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="policies are Linux's")

IDLE = """
import os, sys, threading
import loaders
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
with loaders.build(sys.argv[1], reading=loaders.Reading(workers=2)) as loader:
    next(iter(loader))
    print(*{os.sched_getscheduler(thread.native_id) for thread in threading.enumerate()})
"""


def policies() -> Iterator[int]:
    for thread in threading.enumerate():
        if isinstance(thread, EndingThread) and thread.native_id is not None:
            yield os.sched_getscheduler(thread.native_id)


@pytest.mark.parametrize("kind", ["shards", "webdataset"])
def test_threads_that_read_ahead_take_no_core_from_the_thread_that_trains(
    converted: dict[str, Path], kind: str
) -> None:
    with build_loader(converted[kind], workers=3, batch_size=8) as loader:
        next(iter(loader))
        assert len(found := list(policies())) >= 3
        assert set(found) == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_what_the_program_has_chosen_stays(converted: dict[str, Path]) -> None:
    command = [sys.executable, "-c", IDLE, str(converted["shards"])]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == [str(os.SCHED_IDLE)]


def test_a_sandbox_that_forbids_it_changes_nothing(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test can put itself into one."""

    def refuse(*arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with build_loader(converted["shards"], workers=2) as loader:
        assert sum(len(batch.ids) for batch in loader) == IMAGES
        assert set(policies()) == {os.SCHED_OTHER}

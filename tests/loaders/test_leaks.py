"""Loaders built and left by the hundred: what they leave behind is counted by the operating system."""

import gc
import sys
import threading
import time
from pathlib import Path
from statistics import median_low
from types import BuiltinFunctionType, FrameType
from typing import Any

import numpy as np
import psutil
import pytest

from tests.building import build_loader
from tests.loaders.arms import EACH_ARM

ROUNDS, STEP = 100, 20
BATCH = 32
# 20 loaders that each leave a batch leave twice that. Allocators grow in jumps of 20 MB, now and then: the
# median step does not see one.
MOST_STEP_BYTES = STEP * BATCH * 40 * 40 * 3 // 2


def children() -> int:
    return sum("resource_tracker" not in " ".join(c.cmdline()) for c in psutil.Process().children())


def held() -> tuple[int, int, int]:
    """Threads, child processes and open files."""
    return threading.active_count(), children(), psutil.Process().num_fds()


def settled(wanted: tuple[int, int, int]) -> tuple[int, int, int]:
    """What is held once it is no more than `wanted`, or after ten seconds."""
    gc.collect()
    deadline = time.monotonic() + 10
    while any(now > then for now, then in zip(held(), wanted, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return held()


# those of the raw tree start processes, or decode large pictures
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]
HUNDREDS = [
    pytest.param(*arm.values, id=arm.id, marks=[*arm.marks, *(SLOW if "raw" in arm.values else [])])
    for arm in EACH_ARM
]


@pytest.mark.parametrize("how", ["closed", pytest.param("dropped", marks=SLOW)])
@pytest.mark.parametrize(("backend", "kind"), HUNDREDS)
def test_a_hundred_loaders_leave_nothing(
    how: str, backend: str, kind: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    path = raw_tree if kind == "raw" else converted[kind]
    warm = (0, 0, 0)
    rss = []
    for number in range(ROUNDS):
        loader = build_loader(path, backend=backend, size=40, batch_size=BATCH, workers=1)
        iterator = iter(loader)
        next(iterator)
        if how == "closed":
            loader.close()
        del iterator, loader
        if number % STEP == STEP - 1:
            gc.collect()
            rss.append(psutil.Process().memory_info().rss)
            warm = warm if any(warm) else held()
    now = settled(warm)
    assert all(after <= before for after, before in zip(now, warm, strict=True)), (warm, now)
    assert median_low(np.diff(rss).tolist()) < MOST_STEP_BYTES, rss


OF_FILES = {"open", "memfd_create", "fstat", "S_ISREG", "pread", "read", "fcntl", "FileIO", "pop", "extend"}
"""Functions in C behind which Ctrl-C is tried: those that open files, and what is asked of an open one."""


@pytest.mark.parametrize(("kind", "cache"), [("raw", "none"), ("shards", "none"), ("shards", "ram")])
def test_ctrl_c_behind_any_call_leaves_no_file_open(
    kind: str, cache: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    """While a loader is built; what reads ahead of a loop is a thread, which Ctrl-C never comes to."""
    path = raw_tree if kind == "raw" else converted[kind]
    backend = "pytorch" if kind == "raw" else kind
    settings: dict[str, Any] = {"backend": backend, "size": 40, "workers": 0 if kind == "raw" else 1}

    def build(number: int) -> int:
        """How many such calls there were until Ctrl-C came behind that of this number."""
        count = 0

        def interrupt(frame: FrameType, event: str, called: BuiltinFunctionType) -> None:
            nonlocal count
            if event == "c_return" and called.__name__ in OF_FILES:
                count += 1
                if count == number:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            build_loader(path, cache=cache, batch_size=BATCH, **settings).close()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        return count

    calls = build(-1)
    warm = held()
    for number in range(1, calls + 1):
        build(number)
        assert held()[2] <= warm[2] or settled(warm)[2] <= warm[2], f"behind call {number} of {calls}"

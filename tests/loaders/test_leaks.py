"""Loaders built and left by the hundred: what they leave behind is counted by the operating system."""

import gc
import threading
import time
from pathlib import Path
from statistics import median_low

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

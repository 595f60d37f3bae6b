"""The sampling thread, over real processes."""

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from bench.machine.monitor import INTERVAL_S, Monitor, find_limits, tree_memory

MIB = 2**20
CPU = torch.device("cpu")


def test_every_series_has_one_value_per_sample_at_growing_times_and_the_thread_ends() -> None:
    before = set(threading.enumerate())
    monitor = Monitor(CPU)
    with contextlib.suppress(ZeroDivisionError), monitor:
        time.sleep(8 * INTERVAL_S)
        _ = 1 / 0
    assert set(threading.enumerate()) <= before
    watched = monitor.result()
    assert len(watched.time_s) >= 3
    assert all(earlier < later for earlier, later in itertools.pairwise(watched.time_s))
    assert {"cpu_share", "private_bytes", "shared_bytes", "swap_bytes_per_s"} <= watched.series.keys()
    assert watched.series["private_bytes"][0] > 10 * MIB  # torch alone is more
    for name, values in watched.series.items():
        assert len(values) == len(watched.time_s)
        assert 0 <= min(values) <= max(values) == watched.peak[name]
        assert watched.mean[name] == pytest.approx(sum(values) / len(values))


def test_limits_that_hurt_are_flagged_and_others_are_not() -> None:
    assert find_limits({"gpu_memory_share": 0.9}, {"cpu_share": 0.94}, 0) == []
    gpu, cpu, swap = find_limits({"gpu_memory_share": 0.93}, {"cpu_share": 0.97}, 5 * MIB)
    assert "GPU memory was filled to 93%" in gpu
    assert "All cores were busy (97% on average)" in cpu
    assert "swapped 5 MiB" in swap


def test_memory_of_a_tree_of_processes_is_none_once_they_are_gone() -> None:
    code = "import time; data = bytearray(b'1') * (100 << 20); print(1, flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        child.stdout.readline()
        assert 90 * MIB < sum(tree_memory(child.pid)) < 500 * MIB
        assert sum(tree_memory(os.getpid())) > sum(tree_memory(child.pid)), "children count"
    finally:
        child.kill()
        child.communicate()
    assert tree_memory(child.pid) == (0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_working_gpu_shows() -> None:
    pytest.importorskip("pynvml")
    device = torch.device("cuda")
    with Monitor(device) as monitor:
        held = torch.ones(256 << 20, dtype=torch.uint8, device=device)
        until_s = time.monotonic() + 12 * INTERVAL_S
        matrix = torch.randn(4096, 4096, device=device)
        while time.monotonic() < until_s:
            matrix = torch.nn.functional.normalize(matrix @ matrix)
            torch.cuda.synchronize()
    result = monitor.result()
    assert result.peak["gpu_memory_bytes"] >= held.numel()
    for name in ("gpu_memory_share", "gpu_share", "gpu_power_w", "gpu_clock_mhz"):
        assert result.peak[name] > 0

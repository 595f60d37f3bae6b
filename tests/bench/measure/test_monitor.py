"""The sampling thread, over real processes."""

import itertools
import subprocess
import sys
import time

import pytest
import torch

from bench.measure.fresh import tree_memory
from bench.measure.monitor import INTERVAL_S, Monitor, find_limits
from bench.report.row import Watched

MIB = 2**20


def samples_of(monitor: Monitor) -> int:
    return len(monitor._samples)


def wait_for(monitor: Monitor, more: int) -> None:
    """Until `more` samples have come: asks for no pace."""
    wanted = samples_of(monitor) + more
    while samples_of(monitor) < wanted:
        time.sleep(INTERVAL_S / 4)


@pytest.fixture(scope="module")
def watched() -> Watched:
    with Monitor() as monitor:
        wait_for(monitor, 5)
    return monitor.result()


def test_every_series_has_one_value_per_sample_at_growing_times(watched: Watched) -> None:
    assert len(watched.time_s) >= 5
    assert all(earlier < later for earlier, later in itertools.pairwise(watched.time_s))
    assert {"cpu_share", "private_bytes", "shared_bytes", "swap_bytes_per_s"} <= watched.series.keys()
    assert {len(values) for values in watched.series.values()} == {len(watched.time_s)}
    assert all(value >= 0 for values in watched.series.values() for value in values)
    assert watched.series["private_bytes"][0] > 10 * MIB  # torch alone is more


def test_peak_and_mean_are_those_of_the_series_and_its_own_cost_is_a_small_part(watched: Watched) -> None:
    for name, values in watched.series.items():
        assert watched.peak[name] == max(values)
        assert watched.mean[name] == pytest.approx(sum(values) / len(values))
    assert 0 < watched.own_cpu_share < 0.25


def test_memory_of_a_child_is_the_trees() -> None:
    allocate = "import time; data = bytearray(b'1') * (200 << 20); print('ready', flush=True); time.sleep(60)"
    with Monitor() as monitor:
        wait_for(monitor, 3)
        before = samples_of(monitor)
        child = subprocess.Popen([sys.executable, "-c", allocate], stdout=subprocess.PIPE)
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"ready\n"
            assert tree_memory(child.pid)[0] > 190 * MIB
            most = max(sample["private_bytes"] for sample in monitor._samples[:before])
            deadline = time.monotonic() + 40  # a slow summing-up of pages is repeated less often
            while monitor._samples[-1]["private_bytes"] < most + 150 * MIB and time.monotonic() < deadline:
                wait_for(monitor, 1)
        finally:
            child.kill()
            child.communicate()
    private = monitor.result().series["private_bytes"]
    assert max(private[before:]) - max(private[:before]) > 150 * MIB


def test_a_busy_loop_shows_as_a_busy_core() -> None:
    with Monitor() as monitor:
        stop_at = samples_of(monitor) + 8
        while samples_of(monitor) < stop_at:
            pass
    result = monitor.result()
    cores = [name for name in result.series if name.startswith("cpu_") and name != "cpu_share"]
    assert max(result.peak[core] for core in cores) >= 0.5
    assert result.mean["cpu_share"] > 0


def test_the_thread_ends_with_the_block_and_with_an_error_in_it() -> None:
    monitor = Monitor()
    with pytest.raises(ZeroDivisionError), monitor:
        _ = 1 / 0
    assert not monitor._thread.is_alive()
    assert len(monitor.result().time_s) >= 1  # the last sample is taken at the end


def test_limits_that_hurt_are_flagged_and_others_are_not() -> None:
    assert find_limits({"gpu_memory_share": 0.9}, {"cpu_share": 0.94}, 0) == []
    gpu, cpu, swap = find_limits({"gpu_memory_share": 0.93}, {"cpu_share": 0.97}, 5 * MIB)
    assert "GPU memory was filled to 93%" in gpu
    assert "All cores were busy (97% on average)" in cpu
    assert "swapped 5 MiB" in swap


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_working_gpu_shows() -> None:
    pytest.importorskip("pynvml")
    device = torch.device("cuda")
    with Monitor(device) as monitor:
        held = torch.ones(256 << 20, dtype=torch.uint8, device=device)
        stop_at = samples_of(monitor) + 10
        matrix = torch.randn(4096, 4096, device=device)
        while samples_of(monitor) < stop_at:
            matrix = torch.nn.functional.normalize(matrix @ matrix)
            torch.cuda.synchronize()
    result = monitor.result()
    assert not result.missing
    assert result.peak["gpu_memory_bytes"] >= held.numel()
    assert 0 < result.peak["gpu_memory_share"] <= 1
    assert 0 < result.peak["gpu_share"] <= 1
    assert result.peak["gpu_power_w"] > 0
    assert result.peak["gpu_clock_mhz"] > 0

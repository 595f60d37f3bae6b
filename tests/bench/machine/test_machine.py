"""Monitor, CPU time of other processes and the page cache, on real processes and files."""

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from bench.machine import page_cache
from bench.machine.monitor import INTERVAL_S, Monitor, OtherProcesses, _tree_seconds, tree_memory
from precache.engines import available_cpus

MIB = 2**20
SPIN = "import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass"


def test_a_monitor_ends_its_thread_when_the_block_raises() -> None:
    before = set(threading.enumerate())
    with contextlib.suppress(ZeroDivisionError), Monitor(torch.device("cpu")):
        _ = 1 / 0
    assert set(threading.enumerate()) <= before


def test_a_monitor_has_a_value_of_each_series_per_sample() -> None:
    monitor = Monitor(torch.device("cpu"))
    with monitor:
        time.sleep(8 * INTERVAL_S)
    watched = monitor.result()
    assert all(earlier < later for earlier, later in itertools.pairwise(watched.time_s))
    assert watched.series["private_bytes"][0] > 10 * MIB  # torch alone is more
    for name, values in watched.series.items():
        assert len(values) == len(watched.time_s) > 0
        assert 0 <= min(values) <= max(values) == watched.peak[name]
        assert watched.mean[name] == pytest.approx(sum(values) / len(values))


def test_tree_memory_counts_children_and_is_zero_after_their_end() -> None:
    code = "import time; data = bytearray(b'1') * (100 << 20); print(1, flush=True); time.sleep(60)"
    before = sum(tree_memory(os.getpid()))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert 90 * MIB < sum(tree_memory(child.pid)) < 500 * MIB
    assert sum(tree_memory(os.getpid())) > before + 80 * MIB, "children count"
    child.kill()
    child.communicate()
    assert tree_memory(child.pid) == (0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts it")
def test_cpu_time_of_ended_grandchildren_counts_as_this_process() -> None:
    before_s = _tree_seconds()
    run = f"subprocess.run([sys.executable, '-c', {SPIN.format(seconds=0.2)!r}])"
    code = f"import subprocess, sys, time; {run}; print(flush=True); time.sleep(30)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()  # the grandchild has ended, the child lives
    living_s = _tree_seconds()
    assert living_s - before_s >= 0.2
    child.kill()
    child.communicate()
    assert _tree_seconds() >= living_s - 0.1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts it")
def test_cpu_time_of_a_stranger_counts_as_that_of_others() -> None:
    # its parent has ended; it closes the pipes, or the test would wait for their end
    quiet = "quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}"
    child = f"subprocess.Popen([sys.executable, '-c', {SPIN.format(seconds=30)!r}], **quiet)"
    start = [sys.executable, "-c", f"import subprocess, sys; {quiet}; print({child}.pid)"]
    stranger = psutil.Process(int(subprocess.run(start, stdout=subprocess.PIPE, check=True).stdout))
    before_s, start_s, others = stranger.cpu_times().user, time.monotonic(), OtherProcesses()
    while stranger.cpu_times().user < before_s + 0.4:  # it may get no CPU for a while on a busy machine
        time.sleep(0.05)
    share, elapsed_s = others.share(), time.monotonic() - start_s
    stranger.kill()
    assert share is not None
    assert 0.3 / elapsed_s / available_cpus() < share <= 1


def is_on_disk(path: Path) -> bool:
    """Whether files there can leave memory, by the kind of file system that the kernel lists."""
    kinds = {line.split()[1]: line.split()[2] for line in Path("/proc/self/mounts").read_text().splitlines()}
    mounts = [mount for mount in kinds if path.is_relative_to(mount)]
    return kinds[max(mounts, key=len)] not in ("tmpfs", "ramfs")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no posix_fadvise")
def test_drop_empties_the_page_cache_and_warm_fills_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    large, small = tmp_path / "a/large", tmp_path / "small"
    large.write_bytes(os.urandom(3 * MIB + 5))
    small.write_bytes(os.urandom(9000))
    (tmp_path / "empty").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    before = [large.read_bytes(), small.read_bytes()]
    assert page_cache.resident_share(tmp_path) == 1
    if not is_on_disk(tmp_path):
        assert page_cache.drop(tmp_path) == 1, "pages of a file system in memory stay"
        return
    assert page_cache.drop(tmp_path) == 0
    assert page_cache.resident_share(tmp_path) == 0
    assert page_cache.warm(tmp_path)
    assert page_cache.resident_share(tmp_path) == 1
    assert page_cache.drop(small) == 0
    # the pages of the large file stay: 769 of 772
    assert page_cache.resident_share(tmp_path) == pytest.approx(769 / 772)
    assert [large.read_bytes(), small.read_bytes()] == before

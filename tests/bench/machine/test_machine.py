"""What runs beside, what lies in memory: over real processes and files, as the kernel counts them."""

import contextlib
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from bench.machine import page_cache
from bench.machine.monitor import INTERVAL_S, Monitor, OtherProcesses, _tree_seconds, find_limits, tree_memory
from precache.engines import available_cpus

MIB = 2**20
SPIN = "import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass"


def test_every_series_has_one_value_per_sample_at_growing_times_and_the_thread_ends() -> None:
    before = set(threading.enumerate())
    monitor = Monitor(torch.device("cpu"))
    with contextlib.suppress(ZeroDivisionError), monitor:
        time.sleep(8 * INTERVAL_S)
        _ = 1 / 0
    assert set(threading.enumerate()) <= before
    watched = monitor.result()
    assert all(earlier < later for earlier, later in itertools.pairwise(watched.time_s))
    assert watched.series["private_bytes"][0] > 10 * MIB  # torch alone is more
    for name, values in watched.series.items():
        assert len(values) == len(watched.time_s) > 0
        assert 0 <= min(values) <= max(values) == watched.peak[name]
        assert watched.mean[name] == pytest.approx(sum(values) / len(values))
    said = find_limits({"gpu_memory_share": 0.93}, {"cpu_share": 0.97}, 5 * MIB)
    assert [re.findall(r"\d+", each)[0] for each in said] == ["93", "97", "5"]


def test_memory_of_a_tree_of_processes_is_none_once_they_are_gone() -> None:
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


@pytest.mark.skipif(sys.platform != "linux", reason="told by Linux alone")
def test_cpu_time_is_ours_while_a_process_lives_and_after_it_has_ended_and_else_others() -> None:
    """Also that of a process whose parent lives on, as that of a server of processes does."""
    before = _tree_seconds()
    run = f"subprocess.run([sys.executable, '-c', {SPIN.format(seconds=0.2)!r}])"
    code = f"import subprocess, sys, time; {run}; print(flush=True); time.sleep(30)"
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()  # its child has ended
    living = _tree_seconds()
    assert living - before >= 0.2
    server.kill()
    server.communicate()
    assert _tree_seconds() >= living - 0.1
    # a busy process whose parent has ended; quiet, else it keeps the pipes open, and nobody sees them end
    quiet = "quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}"
    child = f"subprocess.Popen([sys.executable, '-c', {SPIN.format(seconds=30)!r}], **quiet)"
    start = [sys.executable, "-c", f"import subprocess, sys; {quiet}; print({child}.pid)"]
    stranger = psutil.Process(int(subprocess.run(start, stdout=subprocess.PIPE, check=True).stdout))
    before_s, start_s, others = stranger.cpu_times().user, time.monotonic(), OtherProcesses()
    while stranger.cpu_times().user < before_s + 0.4:  # on a busy machine it gets its turn later
        time.sleep(0.05)
    share, elapsed_s = others.share(), time.monotonic() - start_s
    stranger.kill()
    assert share is not None
    assert 0.3 / elapsed_s / available_cpus() < share <= 1


def on_a_disk(path: Path) -> bool:
    """Whether files there can leave memory at all; asked of the system, not of the code under test."""
    kinds = {line.split()[1]: line.split()[2] for line in Path("/proc/self/mounts").read_text().splitlines()}
    mounts = [mount for mount in kinds if path.is_relative_to(mount)]
    return kinds[max(mounts, key=len)] not in ("tmpfs", "ramfs")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no posix_fadvise")
def test_dropped_pages_leave_and_reading_brings_them_back(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    one, two = tmp_path / "a/one", tmp_path / "two"
    one.write_bytes(os.urandom(3 * MIB + 5))
    two.write_bytes(os.urandom(9000))
    (tmp_path / "empty").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    before = [one.read_bytes(), two.read_bytes()]
    assert page_cache.resident_share(tmp_path) == 1
    if not on_a_disk(tmp_path):
        assert page_cache.drop(tmp_path) == 1, "a file system in memory is found out"
        return
    assert page_cache.drop(tmp_path) == page_cache.resident_share(tmp_path) == 0
    assert page_cache.warm(tmp_path)
    assert page_cache.resident_share(tmp_path) == 1
    assert page_cache.drop(two) == 0
    # the other file's pages stay: 769 of 772
    assert page_cache.resident_share(tmp_path) == pytest.approx(769 / 772)
    assert [one.read_bytes(), two.read_bytes()] == before

"""Activity of the machine while something runs: sampled ten times a second in a thread; CPU time of others.

The figures of processor, disk, network and swap are the whole machine's, those of memory the process
tree's, those of the GPU the device's: others who use them at the same time are in them.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
import psutil
import torch

from bench.report.result import Activity, summarise_activity
from bench.report.verdict import describe_busy_cores

INTERVAL_S = 0.1
# Of one core. Summing up the pages of a large process takes long, so that is done less often then.
_MEMORY_SHARE = 0.02
_GPU_MEMORY_LIMIT = 0.9
_SWAP_LIMIT_BYTES = 1 << 20


class Monitor:
    """Samples from `with Monitor(device) as monitor:` until the block ends; then `monitor.result()`.

    Args:
        device: whose GPU is sampled, if it is one.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = gpu_readings(device) if device.type == "cuda" else {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-monitor", daemon=True)
        self._times_s: list[float] = []
        self._samples: list[dict[str, float]] = []
        self._memory_due_s = 0.0
        self._memory: tuple[int, int] = (0, 0)

    def __enter__(self) -> "Monitor":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def result(self) -> Activity:
        """All samples; call it after the block."""
        names = self._samples[-1] if self._samples else {}
        series = {name: tuple(sample[name] for sample in self._samples) for name in names}
        watched = summarise_activity(tuple(self._times_s), series)
        lasted_s = np.diff(self._times_s, prepend=0.0)
        swapped = float(np.dot(series.get("swap_bytes_per_s", ()), lasted_s))
        return replace(watched, flags=tuple(find_limits(watched.peak, watched.mean, swapped)))

    def _run(self) -> None:
        start_s = time.perf_counter()
        cores = _cores()
        psutil.cpu_percent(percpu=True)  # the first call has nothing to compare with
        before, before_s = _counters(), start_s
        due_s = start_s
        last = False
        while not last:
            due_s = max(due_s + INTERVAL_S, time.perf_counter())
            last = self._ended.wait(due_s - time.perf_counter())
            now_s = time.perf_counter()
            busy = psutil.cpu_percent(percpu=True)
            counters = _counters()
            sample = {f"cpu_{core}_share": busy[core] / 100 for core in cores if core < len(busy)}
            sample["cpu_share"] = sum(sample.values()) / max(1, len(sample))
            sample |= {name: (counters[name] - before.get(name, 0)) / (now_s - before_s) for name in counters}
            sample |= self._memory_sample(now_s)
            sample |= {name: float(read()) for name, read in self._gpu.items()}
            self._times_s.append(now_s - start_s)
            self._samples.append(sample)
            before, before_s = counters, now_s

    def _memory_sample(self, now_s: float) -> dict[str, float]:
        if now_s >= self._memory_due_s:
            self._memory = tree_memory(os.getpid())
            self._memory_due_s = now_s + (time.perf_counter() - now_s) / _MEMORY_SHARE
        private, shared = self._memory
        return {"private_bytes": float(private), "shared_bytes": float(shared)}


def gpu_readings(device: torch.device) -> dict[str, Callable[[], float]]:
    """Readings that a GPU gives, by name: slices of one have no utilisation, some cards no power."""

    def used() -> int:
        free, total = torch.cuda.mem_get_info(device)
        return total - free

    readings: dict[str, Callable[[], float]] = {
        "gpu_memory_bytes": used,
        "gpu_memory_share": lambda: used() / torch.cuda.mem_get_info(device)[1],
        # by NVIDIA's management library, nvidia-ml-py
        "gpu_share": lambda: torch.cuda.utilization(device) / 100,
        "gpu_power_w": lambda: torch.cuda.power_draw(device) / 1e3,
        "gpu_clock_mhz": lambda: torch.cuda.clock_rate(device),
    }
    found = {}
    for name, read in readings.items():
        with suppress(Exception):  # of that library, which may be missing
            read()
            found[name] = read
    return found


def find_limits(peak: dict[str, float], mean: dict[str, float], swapped_bytes: float) -> list[str]:
    """Sentences for the limits that hurt, of the peaks and means of `Activity`."""
    flags = []
    if peak.get("gpu_memory_share", 0.0) > _GPU_MEMORY_LIMIT:
        flags.append(
            f"GPU memory was filled to {peak['gpu_memory_share']:.0%}: a larger batch or picture may not fit."
        )
    busy = describe_busy_cores(mean.get("cpu_share", 0.0))
    if busy is not None:
        flags.append(busy)
    if swapped_bytes >= _SWAP_LIMIT_BYTES:
        flags.append(
            f"The machine swapped {swapped_bytes / 2**20:,.0f} MiB in and out: use less memory, as fewer "
            f"workers or smaller batches do."
        )
    return flags


def tree_memory(pid: int) -> tuple[int, int]:
    """Memory of a process and its descendants, in bytes; zeros once it is gone.

    Returns:
        Private pages, and the processes' proportions of pages that they share with one another or with
        others. Where the system does not tell them apart, all is private.
    """
    private = shared = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended
                if os.path.exists("/proc/self/smaps_rollup"):
                    memory = member.memory_full_info()
                    private += memory.uss
                    shared += memory.pss - memory.uss
                else:
                    private += member.memory_info().rss
    return private, shared


def _cores() -> list[int]:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _counters() -> dict[str, int]:
    """Bytes since the machine started; a counter that the system does not have is left out."""
    counters: dict[str, int] = {}
    disk, network, swap = psutil.disk_io_counters(), psutil.net_io_counters(), psutil.swap_memory()
    if disk is not None:
        counters |= {"disk_read_bytes_per_s": disk.read_bytes, "disk_write_bytes_per_s": disk.write_bytes}
    if network is not None:
        received, sent = network.bytes_recv, network.bytes_sent
        counters |= {"network_receive_bytes_per_s": received, "network_send_bytes_per_s": sent}
    return {**counters, "swap_bytes_per_s": swap.sin + swap.sout}


@dataclass(frozen=True, slots=True)
class _Seconds:
    """CPU seconds so far: of all CPUs that this process may use, those of them that were busy, and ours."""

    total: float
    busy: float
    ours: float


class OtherProcesses:
    """CPU time that other processes take, from when this is made until `share()` is called.

    Ours are this process and its descendants, also those that have ended.
    """

    def __init__(self) -> None:
        self._start = _read()

    def share(self) -> float | None:
        """Share, 0 to 1, of the CPUs that other processes took since then; None where that is not known."""
        return self.shares()[1]

    def shares(self) -> tuple[float | None, float | None]:
        """Shares, 0 to 1, of the CPUs that this process and others took since then; None where not known."""
        now = _read()
        if self._start is None or now is None:
            return None, None
        total = max(now.total - self._start.total, 1e-9)
        ours = now.ours - self._start.ours
        theirs = max(0.0, now.busy - self._start.busy - ours)
        return min(1.0, ours / total), min(1.0, theirs / total)


def _read() -> _Seconds | None:
    if os.name == "nt":  # it does not keep the times of processes that have ended: ours would be others'
        return None
    each = psutil.cpu_times(percpu=True)
    if hasattr(os, "sched_getaffinity"):
        mine = [each[core] for core in os.sched_getaffinity(0) if core < len(each)]
        each = mine or each
    total = busy = 0.0
    for times in each:
        # Linux counts what guests take under user, too
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        # an interrupt is served for whoever asked, and that may be us
        interrupts = getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
        total += sum(times) - guests
        busy += sum(times) - guests - interrupts - times.idle - getattr(times, "iowait", 0.0)
    return _Seconds(total, busy, _tree_seconds())


def _tree_seconds() -> float:
    """CPU seconds of this process and its descendants, each with its children that have ended."""
    mine = os.times()
    seconds = mine.user + mine.system + mine.children_user + mine.children_system
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended: its parent has its time, or soon will
            continue
        # only Linux tells those of a process's children
        seconds += times.user + times.system
        seconds += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return seconds

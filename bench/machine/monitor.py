"""Activity of the machine while a trial runs: samples of ten times a second, and CPU time of other processes.

Samples of processor, disk, network and swap are of the whole machine, and those of the GPU of the whole
device, other processes included. Samples of memory are of this process and its descendants.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import psutil
import torch

from bench.report.result import Activity
from precache.engines import available_cpus

INTERVAL_S = 0.1
_MEMORY_SAMPLING_SHARE = 0.02
"""Limit of a core's time that samples of memory take: those of a large process take long, and are rarer."""


class Monitor:
    """Sampler of the machine's activity during a `with` block; `result()` returns its samples afterwards.

    Args:
        device: the device that trains; it is sampled, too, if it is a GPU.
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
        """Return all samples; call it after the block."""
        names = self._samples[-1] if self._samples else {}
        series = {name: tuple(sample[name] for sample in self._samples) for name in names}
        return Activity(tuple(self._times_s), series)

    def _run(self) -> None:
        start_s = time.perf_counter()
        cores = _cores()
        psutil.cpu_percent(percpu=True)  # the next call returns the busy time since this one
        before, before_s = _counters(), start_s
        due_s = start_s
        is_last = False
        while not is_last:
            due_s = max(due_s + INTERVAL_S, time.perf_counter())
            is_last = self._ended.wait(due_s - time.perf_counter())
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
            self._memory_due_s = now_s + (time.perf_counter() - now_s) / _MEMORY_SAMPLING_SHARE
        private, shared = self._memory
        return {"private_bytes": float(private), "shared_bytes": float(shared)}


def gpu_readings(device: torch.device) -> dict[str, Callable[[], float]]:
    """Return functions that read a GPU, by the name of the series.

    A reading that the GPU does not give is left out: its slices have no utilisation, some cards no power.
    """

    def used_bytes() -> int:
        free, total = torch.cuda.mem_get_info(device)
        return total - free

    readings: dict[str, Callable[[], float]] = {
        "gpu_memory_bytes": used_bytes,
        "gpu_memory_share": lambda: used_bytes() / torch.cuda.mem_get_info(device)[1],
        # read by NVIDIA's management library, nvidia-ml-py
        "gpu_share": lambda: torch.cuda.utilization(device) / 100,
        "gpu_power_w": lambda: torch.cuda.power_draw(device) / 1e3,
        "gpu_clock_mhz": lambda: torch.cuda.clock_rate(device),
    }
    available = {}
    for name, read in readings.items():
        with suppress(Exception):  # nvidia-ml-py may be missing, or raise
            read()
            available[name] = read
    return available


def tree_memory(pid: int) -> tuple[int, int]:
    """Return the memory of a process and its descendants, in bytes; zeros once the process has ended.

    Returns:
        Private pages, and the processes' proportions of pages that they share with one another or with other
        processes. On a system that does not count them apart, all pages are private.
    """
    private = shared = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):  # the process has ended
                if os.path.exists("/proc/self/smaps_rollup"):
                    memory = member.memory_full_info()
                    private += memory.uss
                    shared += memory.pss - memory.uss
                else:
                    private += member.memory_info().rss
    return private, shared


def _cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _counters() -> dict[str, int]:
    """Return bytes since the machine started, by the series; a counter that the system lacks is left out."""
    counters: dict[str, int] = {}
    disk, network, swap = psutil.disk_io_counters(), psutil.net_io_counters(), psutil.swap_memory()
    if disk is not None:
        counters |= {"disk_read_bytes_per_s": disk.read_bytes, "disk_write_bytes_per_s": disk.write_bytes}
    if network is not None:
        received, sent = network.bytes_recv, network.bytes_sent
        counters |= {"network_receive_bytes_per_s": received, "network_send_bytes_per_s": sent}
    return {**counters, "swap_bytes_per_s": swap.sin + swap.sout}


@dataclass(frozen=True, slots=True)
class _CpuSeconds:
    """CPU seconds since the machine, or this process, has started.

    Attributes:
        total: seconds of all CPUs that this process may use.
        busy: the part of these in which a process ran.
        own: seconds of this process and its descendants, also of those that have ended.
    """

    total: float
    busy: float
    own: float


class OtherProcesses:
    """Share of the CPUs that other processes take, from when this object is made until `share()` is called.

    Descendants of this process are no other processes, also those that have ended.
    """

    def __init__(self) -> None:
        self._start = _read_cpu_seconds()

    def share(self) -> float | None:
        """Return the share, 0 to 1, of the CPUs that other processes took; None where that is not known."""
        return self.shares()[1]

    def shares(self) -> tuple[float | None, float | None]:
        """Return the shares, 0 to 1, of the CPUs of this process and of others; None where not known."""
        now = _read_cpu_seconds()
        if self._start is None or now is None:
            return None, None
        total_s = max(now.total - self._start.total, 1e-9)
        own_s = now.own - self._start.own
        allowed_s = total_s * min(1.0, available_cpus(ranks=1) / len(_cores()))  # a quota allows less
        other_s = max(0.0, now.busy - self._start.busy - own_s)
        return min(1.0, own_s / allowed_s), min(1.0, other_s / total_s)


def _read_cpu_seconds() -> _CpuSeconds | None:
    """Return the CPU seconds so far; None on Windows."""
    if os.name == "nt":  # it keeps no times of ended processes, whose time would count as that of others
        return None
    cores = psutil.cpu_times(percpu=True)
    if hasattr(os, "sched_getaffinity"):
        allowed = [cores[number] for number in os.sched_getaffinity(0) if number < len(cores)]
        cores = allowed or cores
    total_s = busy_s = 0.0
    for times in cores:
        # Linux counts the time of guests in that of users, too
        guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        # interrupts are not counted as busy: this process may have caused them
        interrupts_s = getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
        total_s += sum(times) - guests_s
        busy_s += sum(times) - guests_s - interrupts_s - times.idle - getattr(times, "iowait", 0.0)
    return _CpuSeconds(total_s, busy_s, _tree_seconds())


def _tree_seconds() -> float:
    """Return the CPU seconds of this process and its descendants, each with its children that have ended."""
    own = os.times()
    seconds = own.user + own.system + own.children_user + own.children_system
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:  # the process has ended: its parent has its time, or soon will
            continue
        # times of ended children are known on Linux alone
        seconds += times.user + times.system
        seconds += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return seconds

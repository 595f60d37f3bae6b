"""How fast this machine copies, reads, decodes and multiplies: what `bench hardware` measures."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from bench.machine import disk
from bench.machine.hardware import DTYPES, describe_machine, resolve_amp
from bench.machine.monitor import OtherProcesses
from bench.report import stats
from loaders.deliver import find_device
from precache.engines import available_cpus
from precache.errors import ImageError, SettingError, check_range
from precache.pictures import jpeg
from precache.pictures.reading import MAX_PIXELS
from precache.reporting import Progress, unseen
from precache.sources.base import Scan, reads_of

PICTURES = 200
_WITHOUT_DATA = 1_000  # pictures that the times are for
SERVED_BYTES = 224 * 224 * 3
# A training step of ResNet-50 on 224x224: 4.09e9 multiply-adds forward (torchvision's figure for its
# weights), two operations each, and twice as many again backward.
STEP_FLOP = 3 * 2 * 4.09e9
_UNITS = {"GB/s": 1e9, "MB/s": 1e6, "images/s": 1.0, "TFLOP/s": 1e12}  # per second
_RANDOM_BYTES = (4 << 10, 128 << 10)
_LAUNCHES = 10  # of multiplications, before a GPU is waited for: launching and waiting take time, too


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareSpec:
    """What to measure, and how long.

    Attributes:
        scratch: a folder on the disk to measure.
        repeats: of everything, taking turns.
        seconds: of each reading, at least; of the disk's, at most.
        buffer_bytes: of each copy; more than the CPU's caches hold.
        file_bytes: of the file that is read from the disk.
        matrix: rows and columns of the matrices on the CPU; on a GPU four times as many.
    """

    scratch: Path
    repeats: int = 5
    seconds: float = 0.5
    buffer_bytes: int = 256 << 20
    file_bytes: int = 512 << 20
    matrix: int = 2048

    def __post_init__(self) -> None:
        check_range("repeats", self.repeats, 1)
        if not 0 < self.seconds < float("inf"):
            raise SettingError(f"seconds must be positive, got {self.seconds}")
        if not self.scratch.is_dir():
            raise SettingError(f"{self.scratch}: no such folder; name one on the disk to measure")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure.

    Attributes:
        name: of what was measured.
        how: conditions; where there is no value, why.
        unit: of the value, one of GB/s, MB/s, images/s, TFLOP/s.
        per_picture: bytes, pictures or operations that one picture takes; None for its file's bytes.
        value: None if it was not measured.
    """

    name: str
    how: str
    unit: str
    per_picture: float | None
    value: stats.Estimate | None = None

    def seconds_for(self, pictures: float, file_bytes: float) -> float | None:
        """How long this alone takes for `pictures` pictures, whose files have `file_bytes` together."""
        if self.value is None:
            return None
        amount = file_bytes if self.per_picture is None else pictures * self.per_picture
        return amount / (self.value.median * _UNITS[self.unit])


Probe: TypeAlias = tuple[Measurement, Callable[[], float] | None]
"""What is to be measured, and how to take its value once; None where it cannot be."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the machine gives.

    Attributes:
        mean_file_bytes: of the pictures that were decoded.
        data: `pictures` and `file_bytes` of the data set, where one was given.
        other_cpu: share of the CPUs, 0 to 1, that other processes took meanwhile; None if not known.
    """

    machine: dict[str, str]
    measurements: tuple[Measurement, ...]
    mean_file_bytes: float
    data: dict[str, int] | None
    repeats: int
    other_cpu: float | None = None

    @property
    def pictures(self) -> int:
        """That the times are for: of the data set, else so many as are usual."""
        return _WITHOUT_DATA if self.data is None else self.data["pictures"]

    @property
    def file_bytes(self) -> float:
        """Of their files together."""
        return _WITHOUT_DATA * self.mean_file_bytes if self.data is None else self.data["file_bytes"]

    @property
    def times(self) -> dict[str, float | None]:
        """Seconds that each measured part alone takes for them, by its name."""
        return {m.name: m.seconds_for(self.pictures, self.file_bytes) for m in self.measurements}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"version": 1, **asdict(self)}


def measure(
    spec: HardwareSpec,
    pictures: Sequence[bytes],
    data: dict[str, int] | None = None,
    on_progress: Progress = unseen,
) -> Hardware:
    """Take every measurement `spec.repeats` times, by turns.

    Args:
        pictures: JPEGs to decode.
        data: `pictures` and `file_bytes` of the data set that the times are for.
    """
    device = find_device("auto")
    with ExitStack() as stack:
        probes: list[Probe] = [
            *_memory(spec),
            *_disk(spec, stack),
            *_decode(spec, pictures),
            *_transfer(spec, device),
            _multiply(spec, device),
        ]
        runs = {measurement.name: run for measurement, run in probes if run is not None}
        values: dict[str, list[float]] = {name: [] for name in runs}
        others = OtherProcesses()
        on_progress(0, spec.repeats * len(runs))
        for repeat in range(spec.repeats):
            for done, (name, run) in enumerate(runs.items(), start=1):
                values[name].append(run())
                on_progress(repeat * len(runs) + done, spec.repeats * len(runs))
        other_cpu = others.share()
    measurements = tuple(
        replace(found, value=stats.estimate(values[found.name]) if found.name in values else None)
        for found, _ in probes
    )
    mean_bytes = sum(map(len, pictures)) / max(1, len(pictures))
    return Hardware(describe_machine(device), measurements, mean_bytes, data, spec.repeats, other_cpu)


def sample_jpegs(scan: Scan, count: int = PICTURES) -> list[bytes]:
    """Files of up to `count` JPEGs, taken evenly from the tree; those that do not decode are left out."""
    rows = np.unique(np.linspace(0, len(scan.samples) - 1, count).round().astype(int)).tolist()
    found = []
    refs = [scan.samples[row] for row in rows]
    for ref, read in zip(refs, reads_of(scan.source, refs, MAX_PIXELS), strict=True):
        try:
            data = read()
            assert isinstance(data, bytes), "a tree holds files"
            jpeg.decode_jpeg(data, scan.source.where(ref))
        except ImageError:
            continue
        found.append(data)
    return found


def _memory(spec: HardwareSpec) -> Iterator[Probe]:
    source, target = np.ones(spec.buffer_bytes, np.uint8), np.ones(spec.buffer_bytes, np.uint8)

    def rate(threads: int) -> float:
        parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(time.sleep, [0.001] * threads))  # the threads run

            def copy() -> int:  # NumPy releases the interpreter lock
                list(pool.map(lambda part: np.copyto(part[1], part[0]), parts))
                return spec.buffer_bytes

            return _rate(copy, spec.seconds) / 1e9

    cpus = available_cpus()
    yield Measurement("memory copy, one thread", "1 thread", "GB/s", None), lambda: rate(1)
    yield Measurement("memory copy, all threads", f"{cpus} threads", "GB/s", None), lambda: rate(cpus)


def _disk(spec: HardwareSpec, stack: ExitStack) -> Iterator[Probe]:
    how, file = "direct I/O", None
    try:
        file = stack.enter_context(disk.readable_file(spec.scratch, spec.file_bytes))
    except SettingError as error:
        how = str(error)
    sequential = partial(file.sequential_rate, 4 * spec.seconds) if file else None
    yield Measurement("disk, sequential read", how, "MB/s", None), sequential
    for size in _RANDOM_BYTES:
        random = partial(file.random_rate, size, spec.seconds) if file else None
        yield Measurement(f"disk, random {size >> 10} KiB", how, "MB/s", None), random


def _decode(spec: HardwareSpec, pictures: Sequence[bytes]) -> Iterator[Probe]:
    def rate(threads: int) -> float:
        stop = threading.Event()

        def work(first: int) -> int:
            count = 0
            while count == 0 or not stop.is_set():  # simplejpeg releases the interpreter lock
                jpeg.decode_jpeg(pictures[(first + count) % len(pictures)], "")
                count += 1
            return count

        with ThreadPoolExecutor(threads) as pool:
            start_s = time.perf_counter()
            running = [pool.submit(work, len(pictures) * n // threads) for n in range(threads)]
            time.sleep(spec.seconds)
            stop.set()
            done = sum(future.result() for future in running)
            return done / (time.perf_counter() - start_s)

    for name, threads in (("JPEG decode, one core", 1), ("JPEG decode, all cores", available_cpus())):
        how = "simplejpeg" if pictures else "no JPEG in the tree"
        yield Measurement(name, how, "images/s", 1), partial(rate, threads) if pictures else None


def _transfer(spec: HardwareSpec, device: torch.device) -> Iterator[Probe]:
    def rate(host: torch.Tensor, target: torch.Tensor) -> float:
        def copy() -> int:
            target.copy_(host, non_blocking=True)
            torch.cuda.synchronize(device)
            return spec.buffer_bytes

        return _rate(copy, spec.seconds) / 1e9

    for kind in ("pinned", "pageable"):
        name = f"host to device, {kind}"
        if device.type != "cuda":
            yield Measurement(name, "no GPU", "GB/s", SERVED_BYTES), None
            continue
        host = torch.ones(spec.buffer_bytes, dtype=torch.uint8, pin_memory=kind == "pinned")
        target = torch.empty_like(host, device=device)
        how = f"{spec.buffer_bytes >> 20} MiB at a time"
        yield Measurement(name, how, "GB/s", SERVED_BYTES), partial(rate, host, target)


def _multiply(spec: HardwareSpec, device: torch.device) -> Probe:
    on_gpu = device.type == "cuda"
    side = 4 * spec.matrix if on_gpu else spec.matrix
    dtype = DTYPES[resolve_amp("auto", device)]
    # random: a GPU draws less power where no bit changes, and runs the faster for it
    left, right = (torch.randn((side, side), dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    launches = _LAUNCHES if on_gpu else 1

    def multiply() -> int:
        for _ in range(launches):
            torch.matmul(left, right, out=out)
        if on_gpu:
            torch.cuda.synchronize(device)
        return launches * 2 * side**3

    conditions = f"{launches} at a time" if on_gpu else f"{torch.get_num_threads()} threads"
    how = f"{str(dtype).removeprefix('torch.')}, {conditions}"
    measured = Measurement("matrix multiply", how, "TFLOP/s", STEP_FLOP)
    return measured, lambda: _rate(multiply, spec.seconds) / 1e12


def _rate(work: Callable[[], int], seconds: float) -> float:
    """Amount per second of calling `work`, which returns it, for at least `seconds`; once before."""
    work()
    amount, start_s = 0, time.perf_counter()
    while True:
        amount += work()
        if (elapsed_s := time.perf_counter() - start_s) >= seconds:
            return amount / elapsed_s

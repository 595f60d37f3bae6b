"""Probes of how fast this machine copies, reads, decodes and multiplies, for `bench hardware`."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.machine import disk
from bench.machine.hardware import DTYPES, resolve_amp
from precache.engines import available_cpus
from precache.errors import ImageError, SettingError, check_range
from precache.pictures import jpeg
from precache.pictures.reading import MAX_PIXELS
from precache.sources.base import Scan

PICTURES = 200
_TIMED_PICTURES = 1_000  # times are given for as many where the user named no tree
_RANDOM_READ_BYTES = (4 << 10, 128 << 10)
_MULTIPLICATIONS = 10  # between two waits for the GPU, because launching and waiting take time, too


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareSpec:
    """Size and duration of the measurements.

    Attributes:
        scratch: a folder on the disk to measure.
        repeats: number of measurements of each part.
        seconds: least duration of each measurement; the longest, for those of the disk.
        buffer_bytes: size of each copy; more than the CPU's caches hold.
        file_bytes: size of the file that is read from the disk.
        matrix: rows and columns of the matrices that a GPU multiplies.
    """

    scratch: Path
    repeats: int = 5
    seconds: float = 0.5
    buffer_bytes: int = 256 << 20
    file_bytes: int = 512 << 20
    matrix: int = 8192

    def __post_init__(self) -> None:
        check_range("repeats", self.repeats, 1)
        if not 0 < self.seconds < float("inf"):
            raise SettingError(f"seconds must be positive, got {self.seconds}")
        if not self.scratch.is_dir():
            raise SettingError("no such folder", path=self.scratch, remedy="name one on the disk to measure")


@dataclass(frozen=True, slots=True)
class Probe:
    """Measurement of a part of the machine, or the reason why there is none.

    Attributes:
        part: its name in `bench.report.hardware.PARTS`.
        conditions: conditions of the measurement; the reason where `measure` is None.
        measure: measures once, in bytes, images or floating-point operations per second; None where the
            machine lacks the part.
    """

    part: str
    conditions: str
    measure: Callable[[], float] | None


@contextmanager
def prepare_probes(
    spec: HardwareSpec, pictures: Sequence[bytes], device: torch.device
) -> Iterator[list[Probe]]:
    """Yield the probes of all parts; the file that those of the disk read is removed after the block.

    Args:
        pictures: JPEGs to decode.
    """
    with ExitStack() as stack:
        yield [
            *_memory_probes(spec),
            *_disk_probes(spec, stack),
            *_decode_probes(spec, pictures),
            *_transfer_probes(spec, device),
            _multiply_probe(spec, device),
        ]


def sample_jpegs(scan: Scan) -> list[bytes]:
    """Return the bytes of up to PICTURES JPEG files, taken evenly from the tree, without damaged ones."""
    rows = np.unique(np.linspace(0, len(scan.samples) - 1, PICTURES).round().astype(int)).tolist()
    files = []
    for ref in (scan.samples[row] for row in rows):
        try:
            data = scan.source.read(ref, MAX_PIXELS)
            assert isinstance(data, bytes), "a tree holds files"
            jpeg.decode_jpeg(data, scan.source.where(ref))
        except ImageError:
            continue
        files.append(data)
    return files


def describe_pictures(data: Path | None, scan: Scan, jpegs: Sequence[bytes]) -> dict[str, Any]:
    """Return the settings that say which pictures are decoded, and for how many the times are given.

    Args:
        data: tree that the user named; None: the tree was generated.
        scan: scan of that tree.
        jpegs: sampled files of that tree.
    """
    if data is None:
        mean_bytes = sum(map(len, jpegs)) / len(jpegs)
        return {
            "pictures": "generated photographs",
            "images": _TIMED_PICTURES,
            "file_bytes": round(_TIMED_PICTURES * mean_bytes),
        }
    return {
        "pictures": str(data),
        "images": len(scan.samples),
        "file_bytes": int(scan.samples.file_bytes.sum()),
        "digest": scan.digest,
    }


def _memory_probes(spec: HardwareSpec) -> list[Probe]:
    source, target = np.ones(spec.buffer_bytes, np.uint8), np.ones(spec.buffer_bytes, np.uint8)

    def measure(threads: int) -> float:
        parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(time.sleep, [0.001] * threads))  # starts the threads before the time is taken

            def copy() -> int:  # NumPy releases the interpreter lock
                list(pool.map(lambda part: np.copyto(part[1], part[0]), parts))
                return spec.buffer_bytes

            return _rate(copy, spec.seconds)

    cpus = available_cpus()
    return [
        Probe("memory copy, one thread", "1 thread", partial(measure, 1)),
        Probe("memory copy, all threads", f"{cpus} threads", partial(measure, cpus)),
    ]


def _disk_probes(spec: HardwareSpec, stack: ExitStack) -> list[Probe]:
    sequential = "disk, sequential read"
    random = {f"disk, random {size >> 10} KiB": size for size in _RANDOM_READ_BYTES}
    try:
        file = stack.enter_context(disk.uncached_file(spec.scratch, spec.file_bytes))
    except SettingError as error:
        return [Probe(name, str(error), None) for name in (sequential, *random)]

    def read_in_order() -> float:
        return file.sequential_rate(4 * spec.seconds) * 1e6

    def read_at_random(block_bytes: int) -> float:
        return file.random_rate(block_bytes, spec.seconds) * 1e6

    probes = [Probe(sequential, "direct I/O", read_in_order)]
    for name, block_bytes in random.items():
        probes.append(Probe(name, "direct I/O", partial(read_at_random, block_bytes)))
    return probes


def _decode_probes(spec: HardwareSpec, pictures: Sequence[bytes]) -> list[Probe]:
    def measure(threads: int) -> float:
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

    probes = []
    for name, threads in (("JPEG decode, one core", 1), ("JPEG decode, all cores", available_cpus())):
        if pictures:
            probes.append(Probe(name, "simplejpeg", partial(measure, threads)))
        else:
            probes.append(Probe(name, "no JPEG in the tree", None))
    return probes


def _transfer_probes(spec: HardwareSpec, device: torch.device) -> list[Probe]:
    def measure(host: torch.Tensor, target: torch.Tensor) -> float:
        def copy() -> int:
            target.copy_(host, non_blocking=True)
            torch.cuda.synchronize(device)
            return spec.buffer_bytes

        return _rate(copy, spec.seconds)

    probes = []
    for kind in ("pinned", "pageable"):
        name = f"host to device, {kind}"
        if device.type != "cuda":
            probes.append(Probe(name, "no GPU", None))
            continue
        host = torch.ones(spec.buffer_bytes, dtype=torch.uint8, pin_memory=kind == "pinned")
        target = torch.empty_like(host, device=device)
        conditions = f"{spec.buffer_bytes >> 20} MiB at a time"
        probes.append(Probe(name, conditions, partial(measure, host, target)))
    return probes


def _multiply_probe(spec: HardwareSpec, device: torch.device) -> Probe:
    if device.type != "cuda":
        return Probe("matrix multiply", "no GPU", None)
    dtype = DTYPES[resolve_amp("auto", device)]
    # random numbers: where few bits change, a GPU draws less power and runs faster
    left, right = (torch.randn((spec.matrix, spec.matrix), dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)

    def multiply() -> int:
        for _ in range(_MULTIPLICATIONS):
            torch.matmul(left, right, out=out)
        torch.cuda.synchronize(device)
        return _MULTIPLICATIONS * 2 * spec.matrix**3

    conditions = f"{str(dtype).removeprefix('torch.')}, {_MULTIPLICATIONS} at a time"
    return Probe("matrix multiply", conditions, lambda: _rate(multiply, spec.seconds))


def _rate(work: Callable[[], int], seconds: float) -> float:
    """Return the amount per second that calls of `work` do, for at least `seconds`.

    Args:
        work: returns the amount that it did: bytes or operations. A first call warms up.
    """
    work()
    amount, start_s = 0, time.perf_counter()
    while True:
        amount += work()
        if (elapsed_s := time.perf_counter() - start_s) >= seconds:
            return amount / elapsed_s

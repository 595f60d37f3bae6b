"""One measured run: batches from a source, through a trainer, with the wait and the step of each.

Every command runs its trials here. A run is asked for with `Settings`, which pickle, so that it can have
a process of its own: see `bench.measure.fresh`.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import psutil
import torch

from bench.machine.monitor import Monitor
from bench.measure import imagefolder
from bench.measure.settings import Feed, Settings, check_fills_batch
from bench.measure.trainers import NullTrainer, Trainer
from bench.report.result import Trial
from loaders.augment import centre_boxes, crop_into
from loaders.batch import Batch
from loaders.dataset import RAW, SplitData
from loaders.device import Lane, upload
from loaders.read import decoding
from loaders.settings import CROP_RATIO
from loaders.transfer import normalise, receive
from precache.engines import available_cpus
from precache.formats import FORMATS, StoredSample
from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import Size, sides

PICTURES = 200  # that stages are timed on
DECODING = ("pytorch", "webdataset")
"""Backends whose reader and decoder are this project's, so that they can be run apart."""
_FILLING, _READING = "fill", "read"  # names of the threads that a loader has one of for each worker


class Clock(Protocol):
    """Marked before the first wait, and after each wait and each step, by turns."""

    def mark(self) -> None:
        """Take the time."""

    def intervals_s(self) -> tuple[float, ...]:
        """Seconds between the marks: a wait, a step, a wait, a step."""


def make_clock(device: torch.device) -> Clock:
    """The clock of `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


class HostClock:
    """The host's."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def intervals_s(self) -> tuple[float, ...]:
        return tuple(stop - start for start, stop in itertools.pairwise(self._marks))


class CudaClock:
    """Times on the device: the host queues steps ahead of it and would see only the queueing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._marks.append(event)

    def intervals_s(self) -> tuple[float, ...]:
        self._stream.synchronize()
        pairs = itertools.pairwise(self._marks)
        return tuple(start.elapsed_time(stop) / 1e3 for start, stop in pairs)


def measure(settings: Settings, trainer: Trainer | None = None, clock: Clock | None = None) -> Trial:
    """Feed the trainer of `settings` from the loader of `settings`, freshly opened.

    A first batch, an epoch where that is asked for, the warm-up, the timed batches. A loader that runs out
    starts its next epoch; what that costs is part of the measurement. An epoch that goes before, to fill a
    cache, does not reach the trainer.

    Args:
        trainer: one that was made before, of the kind that `settings` names; by default a new one.
        clock: takes the times; by default the device's.
    """
    with settings.running():
        trainer = trainer or settings.make_trainer()
        if settings.backend == imagefolder.NAME:
            import torchvision  # noqa: F401  # as a training has before it builds its loader
        start_s = time.perf_counter()
        with settings.open_loader(trainer.dtype) as loader:
            source = endless(loader)
            first = next(source)
            first_batch_s = time.perf_counter() - start_s
            if settings.first_epoch or settings.cache != "none":
                for _ in range(len(loader) - 1):
                    next(source)
            trial = _time_batches(itertools.chain([first], source), trainer, settings, first_batch_s, clock)
            if isinstance(loader, imagefolder.ImageFolderLoader) and loader.refused:
                trial = replace(trial, facts={**trial.facts, "refused": loader.refused})
            return trial


def measure_trainer(settings: Settings, trainer: Trainer | None = None) -> Trial:
    """Feed one batch, which stays on the device, to the trainer again and again."""
    with settings.running():
        trainer = trainer or settings.make_trainer()
        images = _noise(settings, settings.device).permute(0, 3, 1, 2)
        if trainer.dtype.is_floating_point:
            images = normalise(images, trainer.dtype)
        labels = torch.randint(0, settings.classes, (settings.batch_size,), device=settings.device)
        batch = Batch(images, labels, torch.arange(settings.batch_size))
        return _time_batches(itertools.repeat((batch, False)), trainer, settings)


def measure_transfer(settings: Settings) -> Trial:
    """Move one batch from main memory to the device, in the dtype of the trainer, again and again."""
    with settings.running():
        dtype = settings.make_trainer().dtype
        host = _noise(settings, torch.device("cpu"))
        host = host.pin_memory() if settings.device.type == "cuda" else host
        count = torch.arange(settings.batch_size)
        lane = Lane(settings.device)

        def moved() -> Iterator[tuple[Batch, bool]]:
            while True:
                with lane.active():
                    images = upload(host, lane.device).permute(0, 3, 1, 2)
                    if dtype.is_floating_point:
                        images = normalise(images, dtype)
                    batch = Batch(images, upload(count, lane.device), count)
                    batch.ready = lane.mark()
                yield receive(batch, lane.device), False

        return _time_batches(moved(), NullTrainer(), settings)


def _noise(settings: Settings, device: torch.device) -> torch.Tensor:
    """uint8 [batch_size, size, size, 3], as readers deliver them."""
    shape = (settings.batch_size, settings.size, settings.size, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def _time_batches(
    source: Iterator[tuple[Batch, bool]],
    trainer: Trainer,
    settings: Settings,
    first_batch_s: float = 0.0,
    clock: Clock | None = None,
) -> Trial:
    """Time batches of a loader, or of another source where `first_batch_s` is 0.

    Returns a trial with numbers `images_per_s`, `wait_share` (0 to 1), `first_step_s` (which allocates,
    compiles and tunes), `serial_s` (CPU time that is not shared among workers, see `_serial_seconds`),
    `images` that were timed; of a loader `first_batch_s` (from before it is built), `served_ids` (distinct)
    and `served_images` (from the first batch on), too.
    """
    ids: list[list[torch.Tensor]] = [[]]  # by epoch
    shapes: set[str] = set()
    clock = clock or make_clock(settings.device)

    def step(batch: Batch, first: bool) -> None:
        trainer.step(batch)
        if first:
            ids.append([])
        ids[-1].append(batch.ids)
        shapes.add(f"{'x'.join(map(str, batch.images.shape[1:]))} {batch.images.dtype}")

    start_s = time.perf_counter()
    step(*next(source))
    if settings.device.type == "cuda":
        torch.cuda.synchronize(settings.device)
    first_step_s = time.perf_counter() - start_s
    for batch, first in _for_a_while(source, settings.warmup, settings.warmup_s):
        step(batch, first)
    images = 0
    epoch_starts = []
    watched = settings.monitored and first_batch_s > 0 and not isinstance(trainer, NullTrainer)
    threads = _thread_seconds()
    with Monitor(settings.device) if watched else nullcontext() as monitor:
        clock.mark()
        timed = _for_a_while(source, 0 if settings.seconds else settings.batches, settings.seconds)
        for number, (batch, first) in enumerate(timed):
            clock.mark()
            step(batch, first)
            images += len(batch.labels)
            if first:
                epoch_starts.append(number)
            clock.mark()
        intervals_s = clock.intervals_s()
    serial_s = _serial_seconds(threads, _thread_seconds())
    wait_s, step_s = intervals_s[::2], intervals_s[1::2]
    whole_s = sum(intervals_s)
    numbers = {
        "images_per_s": images / whole_s,
        "wait_share": sum(wait_s) / whole_s,
        "first_step_s": first_step_s,
        "serial_s": serial_s,
        "images": float(images),
    }
    if first_batch_s:
        numbers["first_batch_s"] = first_batch_s
        numbers |= _count_served(ids)
    return Trial(
        numbers=numbers,
        series={"wait_s": wait_s, "step_s": step_s, "epoch_starts": tuple(map(float, epoch_starts))},
        facts={"shapes": " and ".join(sorted(shapes))},
        activity=None if monitor is None else monitor.result(),
    )


def _for_a_while(
    source: Iterator[tuple[Batch, bool]], batches: int, seconds: float
) -> Iterator[tuple[Batch, bool]]:
    """So many batches, and then more of them for at least so long."""
    yield from itertools.islice(source, batches)
    end_s = time.perf_counter() + seconds
    while seconds and time.perf_counter() < end_s:
        yield next(source)


def _count_served(ids: Sequence[Sequence[torch.Tensor]]) -> dict[str, float]:
    """Count what was served: equal for every loader, or they are not compared.

    Args:
        ids: int64 [batch] of each batch, epoch by epoch.
    """
    epochs = [torch.cat(list(batches)) for batches in ids if batches]
    return {
        "served_ids": float(max(len(np.unique(epoch)) for epoch in epochs)),  # in the epoch with most
        "served_images": float(sum(map(len, epochs))),
    }


def endless(loader: Feed) -> Iterator[tuple[Batch, bool]]:
    """Each batch, and whether it is the first of its epoch; `loader` was built with `last=LAST`.

    Raises:
        SettingError: an epoch has no full batch.
    """
    if not len(loader):  # else this would go on for ever without a batch
        check_fills_batch(loader.batch_size, loader.samples)
    while True:
        for number, batch in enumerate(loader):
            yield batch, number == 0


def _thread_seconds() -> dict[tuple[str, int], float]:
    """CPU seconds so far of each Python thread, by the pool that it is of, else its name, and its number."""
    names = {thread.native_id: thread.name.rsplit("_", 1)[0] for thread in threading.enumerate()}
    threads = psutil.Process().threads()
    return {(names[t.id], t.id): t.user_time + t.system_time for t in threads if t.id in names}


def _serial_seconds(before: dict[tuple[str, int], float], now: dict[tuple[str, int], float]) -> float:
    """Of the busiest thread between the two that more workers do not relieve.

    Whoever asks for batches fills them, too, as much as each thread of that pool.
    """
    spent = {key: seconds - before.get(key, 0.0) for key, seconds in now.items()}
    filling = [seconds for (name, _), seconds in spent.items() if name == _FILLING]
    others = [seconds for (name, _), seconds in spent.items() if name not in (_FILLING, _READING)]
    return max(0.0, max(others, default=0.0) - (median(filling) if filling else 0.0))


def probe_files(data: SplitData) -> tuple[str, ...]:
    """What `time_stages` reads of it: some pictures of a raw tree, else the shards."""
    if data.kind != RAW:
        return tuple(data.files)
    rows = np.unique(np.linspace(0, len(data.files) - 1, PICTURES).round().astype(int))
    return tuple(data.files[row] for row in rows.tolist())


def time_stages(spec: Settings, kind: str, files: Sequence[str]) -> Trial:
    """Time reading and decoding, each alone, by as many threads as the loader has workers.

    Returns a trial with `read_images_per_s`, which gives a picture's bytes, and `decode_images_per_s`, which
    gives its pixels.

    Args:
        kind: of the data, see `loaders.dataset.SplitData`.
        files: see `probe_files`.
    """
    with spec.around():
        workers = max(1, spec.workers or available_cpus())
        with ThreadPoolExecutor(workers) as pool:
            if kind == RAW:
                read, encoded = _timed(pool, workers, decoding.read, files)
                decode, _ = _timed(pool, workers, partial(_serve, spec.size), encoded)
            else:
                read, samples = _read_shards(kind, files)
                decode, _ = _timed(pool, workers, lambda sample: sample[0].pixels(sample[1]), samples)
        return Trial(numbers={"read_images_per_s": read, "decode_images_per_s": decode})


def _serve(size: Size, picture: decoding.Encoded) -> Pixels:
    pixels, out = picture.decode(), np.empty((*sides(size), 3), np.uint8)
    (box,) = centre_boxes(np.array([picture.shape]), size, CROP_RATIO).tolist()
    crop_into([pixels], [box], [False], [out])
    return out


def _read_shards(kind: str, files: Sequence[str]) -> tuple[float, list[tuple[StoredSample, str]]]:
    """One after the other, as a loader reads them."""
    samples: list[tuple[StoredSample, str]] = []
    start_s = time.perf_counter()
    for file in files:
        samples += [(sample, file) for sample in FORMATS[kind].read_shard(Path(file))]
        if len(samples) >= PICTURES:
            break
    read = len(samples) / (time.perf_counter() - start_s)
    return read, samples[:PICTURES]


def _timed(
    pool: ThreadPoolExecutor, workers: int, work: Callable[[Any], Any], items: Sequence[Any]
) -> tuple[float, list[Any]]:
    """Items per second of all threads together, and the results, in another order: one share per thread."""
    start_s = time.perf_counter()
    shares = list(pool.map(lambda first: [work(item) for item in items[first::workers]], range(workers)))
    return len(items) / (time.perf_counter() - start_s), [result for share in shares for result in share]

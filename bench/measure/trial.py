"""Functions that measure one trial: batches go from a loader to a trainer, each wait and step is timed.

All commands run their trials here, mostly in a process of its own, see `bench.measure.processes`; so the
arguments pickle.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

import numpy as np
import psutil
import torch
from msgspec import structs

import loaders
from bench.machine.monitor import Monitor
from bench.measure import imagefolder
from bench.measure.candidates import PROBED_PICTURES
from bench.measure.processes import BatchTooLargeError
from bench.measure.settings import LAST, SHUFFLES, Settings, check_fills_batch
from bench.measure.trainers import EmulatedTrainer, NullTrainer, Trainer
from bench.report.loaders import COLD, FED, LOADER, STAGES, TRAINER, TRANSFER
from bench.report.result import Trial
from loaders.augment.geometry import centre_boxes, crop_into
from loaders.batch import Batch
from loaders.dataset import RAW
from loaders.device import Lane, upload
from loaders.read import decoding
from loaders.settings import CROP_RATIO
from loaders.transfer import normalise, receive
from precache.engines import available_cpus
from precache.errors import SettingError, check_choice
from precache.formats import FORMATS, StoredSample
from precache.pictures.images import Size, sides
from precache.pictures.jpeg import Pixels

_OUT_OF_MEMORY_TEXTS = (
    "out of memory",  # CUDA, also where a later call raises, and cuDNN
    "can't allocate memory",  # torch, of main memory
    "storage size calculation overflowed",  # torch, where the number of bytes overflows an int64
    "alloc_failed",  # CUDNN_STATUS_ALLOC_FAILED, CUBLAS_STATUS_ALLOC_FAILED
    "allocation_failed",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "calling `cublascreate",  # cuBLAS: a handle comes with a workspace
    # cuDNN, when it tunes: it leaves out algorithms whose workspace does not fit, here all of them
    "unable to find an engine to execute",
    "unable to find a valid cudnn algorithm",
)
"""Parts of messages, in lower case, with which torch, cuDNN or cuBLAS report that memory ran out."""
_COMPILERS = ("torch._dynamo", "torch._inductor")
_FILLING, _READING = "fill", "read"
"""Names of a loader's thread pools that have a thread for each worker."""


class TrialLoader(AbstractContextManager[Any], Protocol):
    """Interface of the loaders that a trial measures: those of `loaders.build`, and `ImageFolderLoader`.

    Attributes:
        batch_size: samples of every batch.
        samples: samples of an epoch, those that fill no batch included.
    """

    batch_size: int
    samples: int

    @property
    def size(self) -> Size:
        """Size of the served pictures, pixels."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""


def open_loader(settings: Settings, dtype: torch.dtype) -> TrialLoader:
    """Build the loader; `imagefolder` serves float32 whatever `dtype` is."""
    if settings.backend == imagefolder.NAME:
        return _open_imagefolder(settings)
    backend: Any = settings.backend  # a Literal of `loaders.build`, which a str is not
    workers: int | Literal["auto"] = "auto" if settings.workers is None else settings.workers
    engine: Any = settings.engine
    if engine is None:
        is_threaded = settings.backend in ("shards", "webdataset") and settings.workers != 0
        engine = "processes" if settings.launches and is_threaded else "auto"
    return loaders.build(
        settings.path,
        backend=backend,
        batch_size=settings.batch_size,
        size=settings.size,
        device=settings.device,
        augment=settings.augment,
        shuffle=SHUFFLES[settings.shuffle],
        dtype=dtype,
        sampling=loaders.Sampling(last=settings.last),
        ranks=loaders.Ranks(rank=settings.rank, world_size=settings.world_size),
        reading=loaders.Reading(workers=workers, check=settings.check, cache=settings.cache, engine=engine),
    )


def _open_imagefolder(settings: Settings) -> TrialLoader:
    for name, value, default in (("cache", settings.cache, None), ("last", settings.last, LAST)):
        if value != default:
            raise SettingError(f"{imagefolder.NAME} takes no {name} {value!r}: torch's DataLoader has none")
    check_choice("shuffle", settings.shuffle, ("auto", "full", "none"))
    assert isinstance(settings.path, Path), "ImageFolder reads trees on disk alone"
    return imagefolder.ImageFolderLoader(
        settings.path,
        batch_size=settings.batch_size,
        size=settings.size,
        workers=settings.workers_alone,
        device=settings.device,
        augment=settings.augment,
        shuffle=settings.shuffle != "none",
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, of torch, cuDNN or cuBLAS, says that memory ran out, the GPU's or the machine's."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(text in message for text in _OUT_OF_MEMORY_TEXTS)


@contextmanager
def explain_trial_errors(batch_size: int, size: int) -> Iterator[None]:
    """Replace errors of a trial within the block by errors with a remedy.

    Args:
        batch_size: samples in a batch of the trial.
        size: side of its pictures, pixels.

    Raises:
        BatchTooLargeError: memory ran out, see `is_out_of_memory`.
        SettingError: torch.compile failed.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise BatchTooLargeError(
                f"batch_size {batch_size:,} of {size}x{size} does not fit into memory",
                remedy="choose a smaller one",
            ) from error
        if type(error).__module__.startswith(_COMPILERS):
            first_line = next(line for line in str(error).splitlines() if line.strip())
            raise SettingError(
                f"torch.compile failed ({first_line})", remedy="fix that, or leave out --compile"
            ) from error
        raise


@contextmanager
def trial_context(settings: Settings) -> Iterator[None]:
    """Enter `settings.around`, and give errors of the block a remedy, see `explain_trial_errors`."""
    with settings.around(), explain_trial_errors(settings.batch_size, settings.size):
        yield


class Clock(Protocol):
    """Interface of clocks, which are marked before the first wait and then after each wait and each step."""

    def mark(self) -> None:
        """Take the time."""

    def intervals_s(self) -> tuple[float, ...]:
        """Return the seconds between the marks: a wait, a step, a wait, a step."""


def make_clock(device: torch.device) -> Clock:
    """Return a clock that takes the times of work on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


class HostClock:
    """Clock of the host."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def intervals_s(self) -> tuple[float, ...]:
        return tuple(stop - start for start, stop in itertools.pairwise(self._marks))


class CudaClock:
    """Clock of a GPU: the host queues steps ahead of it, so the host's clock would only time the queueing."""

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
    """Open the loader of `settings`, feed the trainer from it, and measure.

    The trainer gets a first batch, the warm-up and the timed batches. Where `settings` has `first_epoch` or a
    cache, the rest of the first epoch is served before the warm-up, but not to the trainer. A loader that
    runs out starts its next epoch, and the time of that counts.

    Args:
        trainer: a trainer of the kind that `settings` names; None: a new one is made.
        clock: clock that takes the times; None: that of the device.
    """
    with trial_context(settings):
        trainer = trainer or settings.make_trainer()
        if settings.backend == imagefolder.NAME:
            import torchvision  # noqa: F401  # before the clock starts: a training has imported it by then
        start_s = time.perf_counter()
        with open_loader(settings, trainer.dtype) as loader:
            batches = repeat_epochs(loader)
            first_batch = next(batches)
            first_batch_s = time.perf_counter() - start_s
            if settings.first_epoch or settings.cache is not None:
                for _ in range(len(loader) - 1):
                    next(batches)
            batches = itertools.chain([first_batch], batches)
            trial = _time_batches(batches, trainer, settings, first_batch_s, clock)
            if isinstance(loader, imagefolder.ImageFolderLoader) and loader.skipped_path:
                trial = structs.replace(trial, facts={**trial.facts, "refused": loader.skipped_path})
            return trial


def measure_trainer(settings: Settings, trainer: Trainer | None = None) -> Trial:
    """Feed the trainer one batch, which stays on the device, again and again, and measure."""
    with trial_context(settings):
        trainer = trainer or settings.make_trainer()
        images = _random_images(settings, settings.device).permute(0, 3, 1, 2)
        if trainer.dtype.is_floating_point:
            images = normalise(images, trainer.dtype)
        labels = torch.randint(0, settings.classes, (settings.batch_size,), device=settings.device)
        batch = Batch(images, labels, torch.arange(settings.batch_size))
        return _time_batches(itertools.repeat((batch, False)), trainer, settings)


def measure_transfer(settings: Settings) -> Trial:
    """Move one batch from main memory to the device, in the trainer's dtype, again and again, and measure."""
    with trial_context(settings):
        dtype = settings.make_trainer().dtype
        host = _random_images(settings, torch.device("cpu"))
        host = host.pin_memory() if settings.device.type == "cuda" else host
        count = torch.arange(settings.batch_size)
        lane = Lane(settings.device)

        def transferred_batches() -> Iterator[tuple[Batch, bool]]:
            while True:
                with lane.active():
                    images = upload(host, lane.device).permute(0, 3, 1, 2)
                    if dtype.is_floating_point:
                        images = normalise(images, dtype)
                    batch = Batch(images, upload(count, lane.device), count)
                    batch.ready = lane.mark()
                yield receive(batch, lane.device), False

        return _time_batches(transferred_batches(), NullTrainer(), settings)


def _random_images(settings: Settings, device: torch.device) -> torch.Tensor:
    """Return random uint8 [batch_size, size, size, 3] on `device`, as readers deliver a batch."""
    shape = (settings.batch_size, settings.size, settings.size, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def _time_batches(
    batches: Iterator[tuple[Batch, bool]],
    trainer: Trainer,
    settings: Settings,
    first_batch_s: float = 0.0,
    clock: Clock | None = None,
) -> Trial:
    """Time the waits for batches and the trainer's steps.

    Args:
        batches: each batch, and whether it is the first of an epoch.
        first_batch_s: seconds from before the loader was built to its first batch; 0: there is no loader.

    Returns:
        A trial with the numbers `images_per_s`, `wait_share` (0 to 1), `first_step_s` (a step that allocates,
        compiles and tunes), `serial_s` (CPU time that is not shared among workers, see `_serial_seconds`) and
        `images` (those that were timed); with a loader also `first_batch_s`, `served_ids` (distinct ids) and
        `served_images` (from the first batch on).
    """
    ids: list[list[torch.Tensor]] = [[]]  # of each batch, by epoch
    shapes: set[str] = set()
    sides: set[str] = set()
    clock = clock or make_clock(settings.device)

    def step(batch: Batch, starts_epoch: bool) -> None:
        trainer.step(batch)
        if starts_epoch:
            ids.append([])
        ids[-1].append(batch.ids)
        view = batch.views[0]
        side = "x".join(map(str, view.shape[1:]))
        sides.add(side)
        shapes.add(f"{side} {view.dtype}")

    start_s = time.perf_counter()
    step(*next(batches))
    if settings.device.type == "cuda":
        torch.cuda.synchronize(settings.device)
    first_step_s = time.perf_counter() - start_s
    for batch, starts_epoch in _take_batches(batches, settings.warmup, settings.warmup_s):
        step(batch, starts_epoch)
    images = 0
    epoch_starts = []
    is_monitored = settings.monitored and first_batch_s > 0 and not isinstance(trainer, NullTrainer)
    thread_s = _thread_seconds()
    with Monitor(settings.device) if is_monitored else nullcontext() as monitor:
        clock.mark()
        timed = _take_batches(batches, 0 if settings.seconds else settings.batches, settings.seconds)
        for number, (batch, starts_epoch) in enumerate(timed):
            clock.mark()
            step(batch, starts_epoch)
            images += len(batch.labels)
            if starts_epoch:
                epoch_starts.append(number)
            clock.mark()
        intervals_s = clock.intervals_s()
    serial_s = _serial_seconds(thread_s, _thread_seconds())
    wait_s, step_s = intervals_s[::2], intervals_s[1::2]
    total_s = sum(intervals_s)
    numbers = {
        "images_per_s": images / total_s,
        "wait_share": sum(wait_s) / total_s,
        "first_step_s": first_step_s,
        "serial_s": serial_s,
        "images": float(images),
    }
    if first_batch_s:
        numbers["first_batch_s"] = first_batch_s
        numbers |= _count_served(ids)
    series = {"wait_s": wait_s, "step_s": step_s, "epoch_starts": tuple(map(float, epoch_starts))}
    if isinstance(trainer, EmulatedTrainer) and trainer.launches:
        series["launch_s"] = tuple(trainer.launch_s[-len(step_s) :])
    return Trial(
        numbers=numbers,
        series=series,
        facts={"shapes": " and ".join(sorted(shapes)), "sides": " and ".join(sorted(sides))},
        activity=None if monitor is None else monitor.result(),
    )


def _take_batches(
    batches: Iterator[tuple[Batch, bool]], count: int, seconds: float
) -> Iterator[tuple[Batch, bool]]:
    """Yield `count` batches, and then more of them for at least `seconds`."""
    yield from itertools.islice(batches, count)
    end_s = time.perf_counter() + seconds
    while seconds and time.perf_counter() < end_s:
        yield next(batches)


def _count_served(ids: Sequence[Sequence[torch.Tensor]]) -> dict[str, float]:
    """Return `served_images`, and `served_ids`, the number of distinct ids in the epoch with most.

    Loaders that are compared have to have the same numbers.

    Args:
        ids: int64 [batch] of each batch, epoch by epoch.
    """
    epochs = [torch.cat(list(batches)) for batches in ids if batches]
    return {
        "served_ids": float(max(len(np.unique(epoch)) for epoch in epochs)),
        "served_images": float(sum(map(len, epochs))),
    }


def repeat_epochs(loader: TrialLoader) -> Iterator[tuple[Batch, bool]]:
    """Yield each batch, and whether it is the first of its epoch, for epoch after epoch without an end.

    Args:
        loader: a loader that was built with `last=LAST`.

    Raises:
        SettingError: an epoch has no full batch.
    """
    if not len(loader):  # the loop below would never yield
        check_fills_batch(loader.batch_size, loader.samples)
    while True:
        for number, batch in enumerate(loader):
            yield batch, number == 0


def _thread_seconds() -> dict[tuple[str, int], float]:
    """Return the CPU seconds so far of each Python thread.

    They are found by the name of the thread's pool, or its own name where it is of no pool, and its id.
    """
    names = {thread.native_id: thread.name.rsplit("_", 1)[0] for thread in threading.enumerate()}
    threads = psutil.Process().threads()
    return {
        (names[thread.id], thread.id): thread.user_time + thread.system_time
        for thread in threads
        if thread.id in names
    }


def _serial_seconds(before: dict[tuple[str, int], float], now: dict[tuple[str, int], float]) -> float:
    """Return the CPU seconds that the busiest thread spent on work that more workers do not share.

    The thread that asks for batches helps to fill them, as much as each thread of the pool `fill`: that part
    is shared, and taken off.

    Args:
        before, now: `_thread_seconds` before and after the work.
    """
    spent_s = {thread: seconds - before.get(thread, 0.0) for thread, seconds in now.items()}
    filling_s = [seconds for (name, _), seconds in spent_s.items() if name == _FILLING]
    other_s = [seconds for (name, _), seconds in spent_s.items() if name not in (_FILLING, _READING)]
    shared_s = median(filling_s) if filling_s else 0.0
    return max(0.0, max(other_s, default=0.0) - shared_s)


def time_stages(settings: Settings, kind: str, files: Sequence[str]) -> Trial:
    """Time reading and decoding, each alone, by as many threads as the loader has workers.

    Args:
        kind: kind of the data, see `loaders.dataset.SplitData`.
        files: see `bench.measure.candidates.Candidate.probe_files`.

    Returns:
        A trial with `read_images_per_s`, the rate of reading bytes of pictures, and `decode_images_per_s`,
        the rate of decoding them to pixels.
    """
    with settings.around():
        workers = max(1, settings.workers or available_cpus())
        with ThreadPoolExecutor(workers) as pool:
            if kind == RAW:
                read_rate, encoded = _time_work(pool, workers, decoding.read, files)
                decode_rate, _ = _time_work(pool, workers, partial(_decode_and_crop, settings.size), encoded)
            else:
                read_rate, samples = _read_shards(kind, files)
                decode_rate, _ = _time_work(
                    pool, workers, lambda sample: sample[0].pixels(sample[1]), samples
                )
        return Trial(numbers={"read_images_per_s": read_rate, "decode_images_per_s": decode_rate})


def _decode_and_crop(size: Size, picture: decoding.Encoded) -> Pixels:
    """Decode a picture, and return the part that validation shows: uint8 [height, width, 3]."""
    pixels, out = picture.decode(), np.empty((*sides(size), 3), np.uint8)
    (box,) = centre_boxes(np.array([picture.shape]), size, CROP_RATIO).tolist()
    crop_into(pixels, box, False, out)
    return out


def _read_shards(kind: str, files: Sequence[str]) -> tuple[float, list[tuple[StoredSample, str]]]:
    """Read shards one after the other, as a loader does, until there are PROBED_PICTURES samples.

    Returns:
        Samples per second, and the samples with the paths of their shards.
    """
    samples: list[tuple[StoredSample, str]] = []
    start_s = time.perf_counter()
    for file in files:
        samples += [(sample, file) for sample in FORMATS[kind].read_shard(Path(file))]
        if len(samples) >= PROBED_PICTURES:
            break
    rate = len(samples) / (time.perf_counter() - start_s)
    return rate, samples[:PROBED_PICTURES]


def _time_work(
    pool: ThreadPoolExecutor, workers: int, work: Callable[[Any], Any], items: Sequence[Any]
) -> tuple[float, list[Any]]:
    """Call `work` on each item, a share of them in each of `workers` threads.

    Returns:
        Items per second of all threads together, and the results, not in the order of `items`.
    """
    start_s = time.perf_counter()
    shares = list(pool.map(lambda first: [work(item) for item in items[first::workers]], range(workers)))
    rate = len(items) / (time.perf_counter() - start_s)
    return rate, list(itertools.chain.from_iterable(shares))


KINDS: dict[str, Callable[..., Trial]] = {
    LOADER: measure,
    COLD: measure,
    FED: measure,
    STAGES: time_stages,
    TRAINER: measure_trainer,
    TRANSFER: measure_transfer,
}
"""Functions that measure a trial, by its kind; each takes its settings first."""

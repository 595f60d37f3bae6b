"""One measured run: batches from a source, through a trainer, with the wait and the step of each.

A run is asked for with a `TrialSpec`, which pickles, so that it can have a process of its own.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

import loaders
from bench.findings.watched import Watched
from bench.trial.full_batches import LAST, endless
from bench.trial.monitor import Monitor
from bench.trial.refusals import in_one_line
from bench.trial.trainers import NullTrainer, Trainer, make_trainer
from loaders.batch import Batch, DecodedBatch, Loader
from loaders.devices import Lane
from loaders.settings import Shuffle
from loaders.transfer import Transfer, normalise

CACHES = ("none", "ram", "device")
SHUFFLES: dict[str, Shuffle] = {"auto": True, "full": "full", "none": False, "window": "window"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSpec:
    """What to run.

    Attributes:
        backend, path: of the loader; not looked at where there is none.
        trainer, amp, compiled: see `bench.trial.trainers.make_trainer`.
        cache: see `loaders.build`; it is full before anything is timed.
        classes: of the data.
        around: called in the trial's process and entered around the run; tests slow a stage down with it.
        The others are those of `bench.trial.comparison.BenchSpec`.
    """

    backend: str
    path: Path
    trainer: str
    classes: int
    batch_size: int
    workers: int
    size: int
    warmup: int
    batches: int
    device: torch.device
    augment: str = "eval"
    shuffle: str = "auto"
    amp: str = "auto"
    compiled: bool = False
    cache: str = "none"
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    @contextmanager
    def running(self) -> Iterator[None]:
        """What goes around every run."""
        with self.around(), in_one_line(self.batch_size, self.size):
            yield

    def make_trainer(self) -> Trainer:
        """Build the trainer."""
        return make_trainer(self.trainer, self.device, self.classes, amp=self.amp, compiled=self.compiled)

    def open_loader(self, dtype: torch.dtype) -> Loader:
        """Build the loader."""
        return loaders.build(
            self.path,
            backend=self.backend,
            batch_size=self.batch_size,
            size=self.size,
            device=self.device,
            dtype=dtype,
            augment=self.augment,
            shuffle=SHUFFLES[self.shuffle],
            last=LAST,
            reading=loaders.Reading(workers=self.workers, cache=self.cache),
        )


@dataclass(frozen=True, slots=True)
class Served:
    """The work that a run did: the same for every arm, or they are not compared.

    Attributes:
        ids: how many distinct ones were served, in the epoch in which most were.
        images: how many were, from the first batch on.
        shapes: of their batches, less the first dimension, with the dtype.
    """

    ids: int
    images: int
    shapes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """What one run measured.

    Attributes:
        first_batch_s: from before the loader is built until its first batch is there.
        images: served after the warm-up.
        batch_s: time of each batch after the warm-up: waiting for it, and the step.
        epoch_starts: which of these were the first of an epoch.
        wait_s, step_s: the two parts of `batch_s`.
        first_step_s: time of the very first step, which allocates, compiles and tunes.
        served: None where no loader was.
        watched: by `bench.trial.monitor`, where the run was a fed trainer's; else None.
    """

    first_batch_s: float
    images: int
    batch_s: tuple[float, ...]
    epoch_starts: tuple[int, ...] = ()
    wait_s: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    first_step_s: float = 0.0
    served: Served | None = None
    watched: Watched | None = None

    @property
    def images_per_s(self) -> float:
        """Throughput after the warm-up."""
        return self.images / sum(self.batch_s)

    @property
    def wait_share(self) -> float:
        """Share of the time, 0 to 1, that the trainer waited for a batch."""
        return sum(self.wait_s) / sum(self.batch_s)


def run_fed(spec: TrialSpec) -> Trial:
    """Feed the trainer of `spec` from the loader of `spec`, see `feed`."""
    with spec.running():
        trainer = spec.make_trainer()
        opener = partial(spec.open_loader, trainer.dtype)
        return feed(opener, trainer, spec.device, spec.warmup, spec.batches, fill_cache=spec.cache != "none")


def run_trainer_alone(spec: TrialSpec) -> Trial:
    """Feed one batch, which stays on the device, to the trainer again and again."""
    with spec.running():
        trainer = spec.make_trainer()
        images = _noise(spec, spec.device).permute(0, 3, 1, 2)
        if trainer.dtype.is_floating_point:
            images = normalise(images, trainer.dtype)
        labels = torch.randint(0, spec.classes, (spec.batch_size,), device=spec.device)
        batch = Batch(images, labels, torch.arange(spec.batch_size))
        return feed_again(batch, trainer, spec.device, spec.warmup, spec.batches)


def run_transfer_alone(spec: TrialSpec) -> Trial:
    """Move one batch from main memory to the device, in the dtype of the trainer, again and again."""
    with spec.running():
        dtype = spec.make_trainer().dtype
        host = _noise(spec, torch.device("cpu"))
        count = torch.arange(spec.batch_size)
        decoded = DecodedBatch(host.pin_memory() if spec.device.type == "cuda" else host, count, count)
        transfer = Transfer(Lane(spec.device), dtype, None)

        def moved() -> Iterator[tuple[Batch, bool]]:
            while True:
                with transfer.lane.active():
                    sent = transfer.send(decoded, 0)
                yield transfer.receive(sent), False

        return _time_batches(moved(), NullTrainer(), spec.device, spec.warmup, spec.batches)


def feed(
    open_loader: Callable[[], AbstractContextManager[Loader]],
    trainer: Trainer,
    device: torch.device,
    warmup: int,
    batches: int,
    *,
    fill_cache: bool = False,
) -> Trial:
    """Feed `trainer` from a freshly opened loader: a first batch, `warmup` more, `batches` timed ones.

    A loader that runs out starts its next epoch; what that costs is part of the measurement. With
    `fill_cache` its first epoch goes before all that, past the trainer: it fills the loader's cache.
    """
    start_s = time.perf_counter()
    with open_loader() as loader:
        source = endless(loader)
        first = next(source)
        first_batch_s = time.perf_counter() - start_s
        if fill_cache:
            for _ in range(len(loader) - 1):
                next(source)
        return _time_batches(
            itertools.chain([first], source), trainer, device, warmup, batches, first_batch_s
        )


def feed_again(batch: Batch, trainer: Trainer, device: torch.device, warmup: int, batches: int) -> Trial:
    """Feed one batch, which stays where it is, to `trainer` again and again."""
    return _time_batches(itertools.repeat((batch, False)), trainer, device, warmup, batches)


def _noise(spec: TrialSpec, device: torch.device) -> torch.Tensor:
    """uint8 [batch_size, size, size, 3], as readers deliver them."""
    shape = (spec.batch_size, spec.size, spec.size, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def _time_batches(
    source: Iterator[tuple[Batch, bool]],
    trainer: Trainer,
    device: torch.device,
    warmup: int,
    batches: int,
    first_batch_s: float = 0.0,
) -> Trial:
    ids: list[list[torch.Tensor]] = [[]]  # by epoch
    shapes: set[str] = set()

    def step(batch: Batch, first: bool) -> None:
        trainer.step(batch)
        if first:
            ids.append([])
        ids[-1].append(batch.ids)
        shapes.add(f"{'x'.join(map(str, batch.images.shape[1:]))} {batch.images.dtype}")

    start_s = time.perf_counter()
    step(*next(source))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    first_step_s = time.perf_counter() - start_s
    for batch, first in itertools.islice(source, warmup):
        step(batch, first)
    clock = _CudaClock(device) if device.type == "cuda" else _HostClock()
    images = 0
    epoch_starts = []
    fed = first_batch_s > 0 and not isinstance(trainer, NullTrainer)
    with Monitor(device) if fed else nullcontext() as monitor:
        clock.mark()
        for number, (batch, first) in enumerate(itertools.islice(source, batches)):
            clock.mark()
            step(batch, first)
            images += len(batch.labels)
            if first:
                epoch_starts.append(number)
            clock.mark()
        intervals_s = clock.intervals_s()
    wait_s, step_s = intervals_s[::2], intervals_s[1::2]
    return Trial(
        first_batch_s,
        images,
        tuple(wait + work for wait, work in zip(wait_s, step_s, strict=True)),
        tuple(epoch_starts),
        wait_s,
        step_s,
        first_step_s,
        _served(ids, shapes) if first_batch_s else None,
        None if monitor is None else monitor.result(),
    )


def _served(ids: Sequence[Sequence[torch.Tensor]], shapes: set[str]) -> Served:
    """From the ids of each batch, epoch by epoch."""
    epochs = [torch.cat(list(batches)) for batches in ids if batches]
    return Served(
        max(len(np.unique(epoch)) for epoch in epochs), sum(map(len, epochs)), tuple(sorted(shapes))
    )


class _HostClock:
    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def intervals_s(self) -> tuple[float, ...]:
        return tuple(stop - start for start, stop in itertools.pairwise(self._marks))


class _CudaClock:
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

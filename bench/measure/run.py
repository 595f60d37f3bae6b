"""One measured run: batches from a source, through a trainer, with the wait and the step of each.

Every command runs its trials here. A run is asked for with a `TrialSpec`, which pickles, so that it can have
a process of its own: see `bench.measure.fresh`.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from bench.measure.clocks import Clock, make_clock
from bench.measure.full_batches import endless
from bench.measure.monitor import Monitor
from bench.measure.spec import TrialSpec
from bench.measure.threads import serial_seconds, thread_seconds
from bench.measure.trainers import FromPageable, NullTrainer, Trainer
from bench.report.watched import Watched
from loaders.batch import Batch, DecodedBatch
from loaders.delivery.devices import Lane
from loaders.transfer import Transfer, normalise


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

    @property
    def squares(self) -> str:
        """The shapes without the dtype."""
        return " and ".join(sorted({shape.partition(" ")[0] for shape in self.shapes}))


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
        watched: by `bench.measure.monitor`, where the run was a fed trainer's; else None.
        serial_s: CPU time that is not shared among workers, see `bench.measure.threads.serial_seconds`.
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
    serial_s: float = 0.0

    @property
    def images_per_s(self) -> float:
        """Throughput after the warm-up."""
        return self.images / sum(self.batch_s)

    @property
    def wait_share(self) -> float:
        """Share of the time, 0 to 1, that the trainer waited for a batch."""
        return sum(self.wait_s) / sum(self.batch_s)


def measure(spec: TrialSpec, trainer: Trainer | None = None, clock: Clock | None = None) -> Trial:
    """Feed the trainer of `spec` from the loader of `spec`, freshly opened.

    A first batch, an epoch where that is asked for, the warm-up, the timed batches. A loader that runs out
    starts its next epoch; what that costs is part of the measurement. An epoch that goes before, to fill a
    cache, does not reach the trainer.

    Args:
        trainer: one that was made before, of the kind that `spec` names; by default a new one.
        clock: takes the times; by default the device's.
    """
    with spec.running():
        trainer = trainer or spec.make_trainer()
        fed = FromPageable(trainer, spec.device) if spec.pageable else trainer
        spec.import_libraries()
        start_s = time.perf_counter()
        with spec.open_loader(trainer.dtype) as loader:
            source = endless(loader)
            first = next(source)
            first_batch_s = time.perf_counter() - start_s
            if spec.first_epoch or spec.cache != "none":
                for _ in range(len(loader) - 1):
                    next(source)
            return _time_batches(itertools.chain([first], source), fed, spec, first_batch_s, clock)


def measure_trainer(spec: TrialSpec, trainer: Trainer | None = None) -> Trial:
    """Feed one batch, which stays on the device, to the trainer again and again."""
    with spec.running():
        trainer = trainer or spec.make_trainer()
        images = _noise(spec, spec.device).permute(0, 3, 1, 2)
        if trainer.dtype.is_floating_point:
            images = normalise(images, trainer.dtype)
        labels = torch.randint(0, spec.classes, (spec.batch_size,), device=spec.device)
        batch = Batch(images, labels, torch.arange(spec.batch_size))
        return _time_batches(itertools.repeat((batch, False)), trainer, spec)


def measure_transfer(spec: TrialSpec) -> Trial:
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

        return _time_batches(moved(), NullTrainer(), spec)


def _noise(spec: TrialSpec, device: torch.device) -> torch.Tensor:
    """uint8 [batch_size, size, size, 3], as readers deliver them."""
    shape = (spec.batch_size, spec.size, spec.size, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def _time_batches(
    source: Iterator[tuple[Batch, bool]],
    trainer: Trainer,
    spec: TrialSpec,
    first_batch_s: float = 0.0,
    clock: Clock | None = None,
) -> Trial:
    """Of a loader, unless `first_batch_s` is 0."""
    ids: list[list[torch.Tensor]] = [[]]  # by epoch
    shapes: set[str] = set()
    clock = clock or make_clock(spec.device)

    def step(batch: Batch, first: bool) -> None:
        trainer.step(batch)
        if first:
            ids.append([])
        ids[-1].append(batch.ids)
        shapes.add(f"{'x'.join(map(str, batch.images.shape[1:]))} {batch.images.dtype}")

    start_s = time.perf_counter()
    step(*next(source))
    if spec.device.type == "cuda":
        torch.cuda.synchronize(spec.device)
    first_step_s = time.perf_counter() - start_s
    for batch, first in _for_a_while(source, spec.warmup, spec.warmup_s):
        step(batch, first)
    images = 0
    epoch_starts = []
    watched = spec.monitored and first_batch_s > 0 and not isinstance(trainer, NullTrainer)
    threads = thread_seconds()
    with Monitor(spec.device) if watched else nullcontext() as monitor:
        clock.mark()
        timed = _for_a_while(source, 0 if spec.seconds else spec.batches, spec.seconds)
        for number, (batch, first) in enumerate(timed):
            clock.mark()
            step(batch, first)
            images += len(batch.labels)
            if first:
                epoch_starts.append(number)
            clock.mark()
        intervals_s = clock.intervals_s()
    serial_s = serial_seconds(threads, thread_seconds())
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
        serial_s,
    )


def _for_a_while(
    source: Iterator[tuple[Batch, bool]], batches: int, seconds: float
) -> Iterator[tuple[Batch, bool]]:
    """So many batches, and then more of them for at least so long."""
    yield from itertools.islice(source, batches)
    end_s = time.perf_counter() + seconds
    while seconds and time.perf_counter() < end_s:
        yield next(source)


def _served(ids: Sequence[Sequence[torch.Tensor]], shapes: set[str]) -> Served:
    """From the ids of each batch, epoch by epoch."""
    epochs = [torch.cat(list(batches)) for batches in ids if batches]
    return Served(
        max(len(np.unique(epoch)) for epoch in epochs), sum(map(len, epochs)), tuple(sorted(shapes))
    )

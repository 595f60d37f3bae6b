"""One measured run: batches from a source, through a trainer, with the time of each."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from bench.trainers import Trainer
from loaders.batch import Batch, Loader


@dataclass(frozen=True, slots=True)
class Trial:
    """What one run measured.

    Attributes:
        first_batch_s: from before the loader is built until its first batch is there.
        images: served after the warm-up.
        batch_s: time of each batch after the warm-up: waiting for it, and the step.
        epoch_starts: which of these were the first of an epoch.
    """

    first_batch_s: float
    images: int
    batch_s: tuple[float, ...]
    epoch_starts: tuple[int, ...] = ()

    @property
    def images_per_s(self) -> float:
        """Throughput after the warm-up."""
        return self.images / sum(self.batch_s)


def run_trial(
    open_source: Callable[[], AbstractContextManager[Loader]],
    trainer: Trainer,
    device: torch.device,
    warmup: int,
    batches: int,
) -> Trial:
    """Feed `warmup`, then `batches` timed batches of a freshly opened loader to `trainer`.

    A loader that runs out starts its next epoch; what that costs is part of the measurement.
    """
    start_s = time.perf_counter()
    with open_source() as loader:
        source = _epochs(loader)
        first, _ = next(source)
        first_batch_s = time.perf_counter() - start_s
        trainer.step(first)
        return _time_batches(source, trainer, device, warmup, batches, first_batch_s)


def run_trainer_alone(
    trainer: Trainer, batch: Batch, device: torch.device, warmup: int, batches: int
) -> Trial:
    """Feed one batch, which stays on the device, to `trainer` again and again."""
    return _time_batches(itertools.repeat((batch, False)), trainer, device, warmup, batches, 0.0)


def _epochs(loader: Loader) -> Iterator[tuple[Batch, bool]]:
    """Each batch, and whether it is the first of its epoch."""
    while True:
        for number, batch in enumerate(loader):
            yield batch, number == 0


def _time_batches(
    source: Iterator[tuple[Batch, bool]],
    trainer: Trainer,
    device: torch.device,
    warmup: int,
    batches: int,
    first_batch_s: float,
) -> Trial:
    for batch, _ in itertools.islice(source, warmup):
        trainer.step(batch)
    clock = _CudaClock(device) if device.type == "cuda" else _HostClock()
    images = 0
    epoch_starts = []
    clock.mark()
    for number, (batch, first) in enumerate(itertools.islice(source, batches)):
        trainer.step(batch)
        images += len(batch.labels)
        clock.mark()
        if first:
            epoch_starts.append(number)
    return Trial(first_batch_s, images, clock.intervals_s(), tuple(epoch_starts))


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

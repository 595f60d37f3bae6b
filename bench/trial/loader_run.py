"""One loader alone, the trainer alone, and both together, in a process of its own.

The rates are those from the second epoch on: a first epoch, which opens and checks, goes before.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from statistics import median

import psutil
import torch

import loaders
from bench.trial.fresh import run_fresh
from bench.trial.full_batches import LAST, endless
from bench.trial.refusals import in_one_line
from bench.trial.trainers import NullTrainer, Trainer, make_trainer
from loaders.batch import Batch, Loader

_FILLING, _READING = "fill", "read"  # names of the threads that a loader has one of for each worker


@dataclass(frozen=True, slots=True)
class LoaderRun:
    """What was measured.

    Attributes:
        loader, trainer, together: images/s; the trainer alone has a batch that stays on the device.
        serial_s: CPU time per picture, of the loader alone, of the busiest thread that there is one of,
            without what it does of the filling of batches: more workers relieve it of that.
    """

    loader: float
    trainer: float
    together: float
    serial_s: float


def run(
    path: Path, backend: str, *, batch_size: int, workers: int, size: int, trainer: str, seconds: float
) -> LoaderRun:
    """Measure in a fresh process; PrecacheError, with the reason, if it fails."""
    return run_fresh(measure, str(path), backend, batch_size, workers, size, trainer, seconds)


def measure(
    path: str, backend: str, batch_size: int, workers: int, size: int, trainer: str, seconds: float
) -> LoaderRun:
    """Measure in this process."""
    with in_one_line(batch_size, size):
        return _measure(path, backend, batch_size, workers, size, trainer, seconds)


def _measure(
    path: str, backend: str, batch_size: int, workers: int, size: int, trainer: str, seconds: float
) -> LoaderRun:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reading = loaders.Reading(workers=workers, check="never")
    with loaders.build(
        path, backend=backend, batch_size=batch_size, size=size, device=device, last=LAST, reading=reading,
    ) as loader:  # fmt: skip
        model = make_trainer(trainer, device, len(loader.classes))
        for _ in loader:
            pass
        source = _batches(loader)
        before = _thread_seconds()
        rate, images = _rate(source, NullTrainer(), device, seconds)
        serial_s = _serial_seconds(before, _thread_seconds())
    with loaders.build(
        path, backend=backend, batch_size=batch_size, size=size, device=device,
        dtype=model.dtype, last=LAST, reading=reading,
    ) as loader:  # fmt: skip
        source = _batches(loader)
        batch = next(source)
        alone, _ = _rate(repeat(batch), model, device, seconds / 2)
        _rate(source, model, device, seconds / 2)  # reads ahead, starts
        together, _ = _rate(source, model, device, seconds)
    return LoaderRun(rate, alone, together, serial_s / images)


def _batches(loader: Loader) -> Iterator[Batch]:
    return (batch for batch, _ in endless(loader))


def _rate(
    source: Iterator[Batch], trainer: Trainer, device: torch.device, seconds: float
) -> tuple[float, int]:
    """Images/s, and images, of at least `seconds`."""
    trainer.step(next(source))
    _wait(device)
    images, start_s = 0, time.perf_counter()
    for batch in source:
        trainer.step(batch)
        images += len(batch.labels)
        if time.perf_counter() - start_s >= seconds:
            break
    _wait(device)
    return images / (time.perf_counter() - start_s), images


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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

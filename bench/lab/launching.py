"""What loaders cost a training step that launches its operations from Python.

    python -m bench.lab.launching photos data/shards data/webdataset
    python -m bench.lab.launching photos data/shards data/webdataset --lock
    python -m bench.lab.launching --count

A loader's threads in the training process take turns with the step at the interpreter's lock. For each
loader, with threads and with worker processes, this measures how much longer launching takes beside it than
alone, at a rate at which loader and step do not wait for a CPU. With `--lock` it measures for how many
microseconds a picture holds the lock, by samples of who has it (`pip install py-spy`), and what follows from
that: at R images/s of u microseconds each, the lock is free for the share 1 - R u of the time. Handing the
lock over costs more than that, which the first figure holds and the second does not.
"""

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import click
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.lab import harness
from bench.lab.harness import FigureColumn
from bench.measure.candidates import choose_candidates, open_candidates
from bench.measure.processes import run_in_process
from bench.measure.settings import Settings
from bench.measure.trial import measure, measure_trainer, open_loader
from bench.report.result import Trial
from bench.report.stats import percentile
from bench.report.table import Table
from loaders.examples.models import build_model, build_optimizer
from loaders.examples.train import Learner
from precache.cli.commandline import LOCATION
from precache.errors import DatasetError, MissingDependencyError
from precache.storage.urls import Location

_LAUNCHES = 10_000
_ALONE = "launching alone"
_PLANTED_S = 300e-6
_PLANTED = f"a thread that holds the lock for {_PLANTED_S * 1e6:.0f} us a picture"
_FAST = 7000  # images/s of a fast accelerator, for which the use of the lock is worked out
_SAMPLES_PER_S = 250
_THREADED = ("shards", "webdataset")
_COLUMNS = (
    FigureColumn("images/s", "images_per_s"),
    FigureColumn("launching, ms", "launch_ms", ".1f"),
    FigureColumn("times alone", "launch_ms", ".2f", divisor=_ALONE),
    FigureColumn("loader alone, images/s", "most_images_per_s"),
)
_LOCK_COLUMNS = (
    FigureColumn("lock, us a picture", "lock_us", ".1f"),
    FigureColumn(f"stretch at {_FAST:,} images/s", "stretch", ".2f"),
)


def launch_figures(trial: Trial) -> dict[str, float]:
    """Return the rate of a trial, and the median time of launching a step."""
    return {
        "images_per_s": trial.images_per_s,
        "launch_ms": percentile(trial.series["launch_s"], 0.5) * 1e3,
    }


def measure_loader(settings: Settings, rate: float, with_lock: bool) -> Mapping[str, float]:
    """Measure launching beside a loader, the loader alone, and its use of the lock, each in a new process."""
    figures = launch_figures(run_in_process(measure, settings))
    figures["most_images_per_s"] = run_in_process(measure, settings.without_trainer()).images_per_s
    if with_lock:
        figures |= run_in_process(_measure_lock, settings, rate)
    return figures


def _measure_lock(settings: Settings, rate: float) -> dict[str, float]:
    """Serve a loader at that rate, and count how often one of this process's threads has the lock."""
    torch.set_num_threads(1)
    with open_loader(replace(settings, trainer="none"), torch.uint8) as loader:
        return _count_lock((len(batch.ids) for _ in iter(int, 1) for batch in loader), rate, settings.seconds)


def _measure_planted(rate: float, seconds: float) -> dict[str, float]:
    """Measure the use of the lock by pictures that do nothing but hold it for `_PLANTED_S`."""

    def hold() -> int:
        until_s = time.perf_counter() + _PLANTED_S
        while time.perf_counter() < until_s:
            pass
        return 1

    return _count_lock((hold() for _ in iter(int, 1)), rate, seconds)


def _count_lock(pictures: Iterator[int], rate: float, seconds: float) -> dict[str, float]:
    """Take pictures at a rate in a thread, and measure the share of the time for which one holds the lock."""
    served = 0

    def serve() -> None:
        nonlocal served
        start_s = time.perf_counter()
        for count in pictures:
            served += count
            time.sleep(max(0.0, start_s + served / rate - time.perf_counter()))

    threading.Thread(target=serve, daemon=True).start()
    time.sleep(seconds)  # warms up
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples"
        words = ["record", "--gil", "--nonblocking", "--format", "raw", "--rate", str(_SAMPLES_PER_S)]
        words += ["--duration", f"{seconds:.0f}", "--output", str(path), "--pid", str(os.getpid())]
        start_s, start = time.perf_counter(), served
        subprocess.run(["py-spy", *words], check=True, capture_output=True)
        images_per_s = (served - start) / (time.perf_counter() - start_s)
        counts = [int(line.rpartition(" ")[2]) for line in path.read_text().splitlines()]
    lock_us = sum(counts) / _SAMPLES_PER_S / round(seconds) / images_per_s * 1e6
    return {"lock_us": lock_us, "stretch": 1 / max(1 - _FAST * lock_us / 1e6, 1e-3)}


class _Counter(TorchDispatchMode):
    """Counts the operations that are dispatched, those of autograd apart."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = {False: 0, True: 0}
        self.is_backward = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[self.is_backward] += 1
        return function(*args, **(kwargs or {}))

    def backward(self, loss: torch.Tensor) -> None:
        self.is_backward = True
        loss.backward()  # type: ignore[no-untyped-call]
        self.is_backward = False


def count_operations() -> Table:
    """Count the operations of a step of ResNet-50 with its optimizer."""
    rows = []
    for title, foreach in (("a call for each weight, as on a CPU", False), ("all in one, as on a GPU", True)):
        model = build_model("resnet50", 10, seed=0).train()
        optimizer, schedule = build_optimizer("resnet50", model, 1000)
        for group in optimizer.param_groups:
            group["foreach"] = foreach
        counter = _Counter()
        learner = Learner(model, optimizer, schedule, backward=counter.backward)
        batch = (torch.rand(2, 3, 32, 32), torch.tensor([0, 1]))
        learner.step(batch)  # makes the optimizer's state
        counter.counts = {False: 0, True: 0}
        with counter:
            learner.step(batch)
        called, autograd = counter.counts[False], counter.counts[True]
        rows.append([title, f"{called + autograd:,}", f"{called:,}", f"{autograd:,}"])
    return Table(("optimizer", "operations of a step", "called from Python", "by autograd"), rows)


@click.command()
@click.argument("data", type=LOCATION, nargs=-1)
@click.option("--count", is_flag=True, help="Count the operations of an eager ResNet-50 instead.")
@click.option("--lock", "with_lock", is_flag=True, help="Measure the use of the interpreter's lock, too.")
@click.option("--repeats", default=3, show_default=True, help="Turns.")
@click.option("--seconds", default=4.0, show_default=True, help="Seconds of each run.")
@click.option("--rate", default=1000, show_default=True, help="Images/s that are trained.")
@click.option("--batch-size", default=64, show_default=True)
@click.option("--size", default=224, show_default=True, help="Side of the served square, pixels.")
def command(
    data: tuple[Location, ...],
    count: bool,
    with_lock: bool,
    repeats: int,
    seconds: float,
    rate: int,
    batch_size: int,
    size: int,
) -> None:
    """Print what the loaders of the folders DATA cost a step that launches operations from Python."""
    if count:
        click.echo(count_operations().markdown())
        return
    if with_lock and shutil.which("py-spy") is None:
        raise MissingDependencyError("py-spy is not installed", remedy="pip install py-spy")
    settings = Settings(
        trainer=f"emulated:{rate}", launches=_LAUNCHES, batch_size=batch_size, size=size, workers=1,
        seconds=seconds, augment="train", first_epoch=True, monitored=False,
    )  # fmt: skip
    opened, skipped = open_candidates(choose_candidates(data, ["all"], Path("data")))
    for label, reason in skipped.items():
        click.echo(f"skipped {label}: {reason}", err=True)
    candidates = {candidate.label: candidate for candidate in opened if candidate.backend != "synthetic"}
    if not candidates:
        raise DatasetError("no loader to measure", remedy="name a tree or converted folders")
    runs: dict[str, harness.Run] = {
        _ALONE: lambda: launch_figures(run_in_process(measure_trainer, settings)),
    }
    for label, candidate in candidates.items():
        loader = settings.for_loader(candidate.backend, candidate.loader_path, len(candidate.data.classes))
        engines: dict[str, Literal["local", "processes"] | None] = {label: None}
        if candidate.backend in _THREADED:
            engines = {f"{label}, threads": "local", f"{label}, processes": "processes"}
        for name, engine in engines.items():
            runs[name] = partial(measure_loader, replace(loader, engine=engine), rate, with_lock)
    columns: tuple[FigureColumn, ...] = _COLUMNS
    if with_lock:
        runs[_PLANTED] = partial(run_in_process, _measure_planted, rate, seconds)
        columns += _LOCK_COLUMNS
    turns = harness.take_turns(runs, repeats)
    table = Table(["loader", *(column.title for column in columns)], turns.rows(columns))
    harness.show(
        table, turns, f"{_LAUNCHES:,} launches a step; batches of {batch_size} of {size}x{size}; one worker"
    )


if __name__ == "__main__":
    harness.main(command, "launching")

"""What loaders cost a training step that launches its operations from Python.

    python -m bench.lab.launching photos data/shards data/webdataset
    python -m bench.lab.launching --count

Loaders work in threads of the training process, and take turns with the step at the interpreter's lock. For
each loader this measures how long a picture holds the lock, and how much longer launching takes beside the
loader than alone, at the rate that this machine gives. From both it works out launching at 7,000 images/s.

The lock is measured by a thread that needs nothing else: it counts to nothing, and whenever it does not run
although a CPU is free, another thread has the lock. A picture holds it as long with twelve threads as with
two, so at R images/s it is taken for s = R * seconds of a picture, and launching takes 1 / (1 - s) times as
long: at least, since threads also hand the lock and the CPUs over. That part is what was measured at this
machine's rate over 1 / (1 - s) there; the upper figure has it, too. Above s = 1 there is no such rate.

`planted` is no loader but a thread that holds the lock for 0.3 of each millisecond: what is found there says
how far the figures of a lock can be off. On a busy machine they are off by any amount.
"""

import math
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import click
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.lab import harness
from bench.lab.harness import FigureColumn
from bench.measure.candidates import choose_candidates, open_candidates
from bench.measure.processes import run_in_process
from bench.measure.settings import Settings
from bench.measure.trainers import EAGER_LAUNCHES
from bench.measure.trial import measure, measure_trainer, open_loader, repeat_epochs
from bench.report.result import Trial
from bench.report.stats import Estimate, percentile
from bench.report.table import Table
from loaders.examples.models import build_model, build_optimizer
from loaders.examples.train import Learner
from precache.cli.commandline import LOCATION
from precache.errors import DatasetError
from precache.storage.urls import Location

_RATE = 7000  # images/s of an H100 in training ResNet-50, see PRESETS
_TRAINER = "emulated:1e9"  # its device takes no time: a step is launching alone
_ALONE, _PLANTED = "launching alone", "planted"
_HELD_S, _FREE_S = 0.0003, 0.0007
_COLUMNS = (
    FigureColumn("us of the lock a picture", "lock_us", ",.1f"),
    FigureColumn("images/s", "images_per_s"),
    FigureColumn("launching, ms", "launch_ms", ".2f"),
    FigureColumn("times alone", "launch_ms", ".2f", divisor=_ALONE),
)


def take_for(pictures: Iterator[int], seconds: float) -> tuple[float, int]:
    """Take pictures while another thread spins; return the seconds that it lacked the lock, and their number.

    Args:
        pictures: the number of pictures of each batch.
    """
    lacked_s: list[float] = []

    def spin() -> None:
        path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        ready_ns, ran_s, start_s = int(path.read_text().split()[1]), time.thread_time(), time.perf_counter()
        while time.perf_counter() < start_s + seconds:
            pass
        wall_s, ran_s = time.perf_counter() - start_s, time.thread_time() - ran_s
        waited_s = (int(path.read_text().split()[1]) - ready_ns) / 1e9  # for a CPU, not for the lock
        lacked_s.append(wall_s - ran_s - waited_s)

    spinning = threading.Thread(target=spin)
    spinning.start()
    served = 0
    while spinning.is_alive():
        served += next(pictures)
    return lacked_s[0], served


def measure_lock(settings: Settings, seconds: float) -> Trial:
    """Measure `lock_us`, the microseconds for which a picture of the loader holds the lock."""
    with open_loader(settings, torch.uint8) as loader:
        pictures = (len(batch) for batch, _ in repeat_epochs(loader))
        for _ in range(len(loader)):  # the first epoch compares checksums
            next(pictures)
        lacked_s, served = take_for(pictures, seconds)
    return Trial(numbers={"lock_us": lacked_s / served * 1e6})


def measure_planted(seconds: float) -> Trial:
    """Measure `lock_us` of a 'picture' that holds the lock for _HELD_S."""

    def hold() -> Iterator[int]:
        while True:
            end_s = time.thread_time() + _HELD_S
            while time.thread_time() < end_s:
                pass
            time.sleep(_FREE_S)
            yield 1

    lacked_s, served = take_for(hold(), seconds)
    return Trial(numbers={"lock_us": lacked_s / served * 1e6})


def launch_figures(trial: Trial) -> dict[str, float]:
    """Return the rate of a trial, and the median time of launching a step."""
    return {
        "images_per_s": trial.images_per_s,
        "launch_ms": percentile(trial.series["launch_s"], 0.5) * 1e3,
    }


def measure_loader(settings: Settings, seconds: float) -> Mapping[str, float]:
    """Measure the lock and launching of a loader, each in a process of its own."""
    lock = run_in_process(measure_lock, settings, seconds)
    return {**lock.numbers, **launch_figures(run_in_process(measure, settings))}


def predict(lock_us: Estimate, images_per_s: Estimate, stretch: Estimate) -> list[str]:
    """Return cells: times alone that launching takes by the lock, at the measured rate and at _RATE."""

    def by_lock(rate: float) -> float:
        share = rate * lock_us.median / 1e6
        return 1 / (1 - share) if share < 1 else math.inf

    here, wanted = by_lock(images_per_s.median), by_lock(_RATE)
    if wanted == math.inf:
        return [f"{here:.2f}", "not reached"]
    rest = max(1.0, stretch.median / here)
    return [f"{here:.2f}", f"{wanted:.2f} to {wanted * rest:.2f}"]


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
@click.option("--repeats", default=5, show_default=True, help="Turns.")
@click.option("--seconds", default=5.0, show_default=True, help="Seconds of each run.")
@click.option("--batch-size", default=64, show_default=True)
@click.option("--size", default=224, show_default=True, help="Side of the served square, pixels.")
@click.option("--workers", type=int, help="Threads or processes of each loader.  [default: one per CPU]")
def command(
    data: tuple[Location, ...],
    count: bool,
    repeats: int,
    seconds: float,
    batch_size: int,
    size: int,
    workers: int | None,
) -> None:
    """Print what the loaders of the folders DATA cost a step that launches operations from Python."""
    if count:
        click.echo(count_operations().markdown())
        return
    settings = Settings(
        trainer=_TRAINER, launches=EAGER_LAUNCHES, batch_size=batch_size, size=size, workers=workers,
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
        _PLANTED: lambda: run_in_process(measure_planted, seconds).numbers,
    }
    for label, candidate in candidates.items():
        loader = settings.for_loader(candidate.backend, candidate.loader_path, len(candidate.data.classes))
        runs[label] = partial(measure_loader, loader, seconds)
    turns = harness.take_turns(runs, repeats)
    rows = []
    for name in runs:
        lock_us, rate, _, stretch = (turns.estimate(name, column) for column in _COLUMNS)
        cells = ["-", "-"]
        if lock_us is not None and rate is not None and stretch is not None:
            cells = predict(lock_us, rate, stretch)
        rows.append([name, *turns.cells(name, _COLUMNS), *cells])
    titles = [column.title for column in _COLUMNS]
    table = Table(["loader", *titles, "by the lock", f"at {_RATE:,} images/s"], rows)
    harness.show(
        table, turns, f"{EAGER_LAUNCHES:,} launches a step; batches of {batch_size} of {size}x{size}"
    )


if __name__ == "__main__":
    harness.main(command, "launching")

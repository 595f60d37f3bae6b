"""What loaders cost a training step that launches its operations from Python.

    python -m bench.lab.launching photos data/shards data/webdataset
    python -m bench.lab.launching --count

Loaders work in threads of the training process, and take turns with the step at the interpreter's lock. For
each loader this measures how much longer launching takes beside the loader than alone, at the rate that this
machine gives. Where loader and step share two CPUs, that holds the wait for a CPU, too.
"""

from collections.abc import Mapping
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
from bench.measure.trial import measure, measure_trainer
from bench.report.result import Trial
from bench.report.stats import percentile
from bench.report.table import Table
from loaders.examples.models import build_model, build_optimizer
from loaders.examples.train import Learner
from precache.cli.commandline import LOCATION
from precache.errors import DatasetError
from precache.storage.urls import Location

_TRAINER = "emulated:1e9"  # its device takes no time: a step is launching alone
_ALONE = "launching alone"
_COLUMNS = (
    FigureColumn("images/s", "images_per_s"),
    FigureColumn("launching, ms", "launch_ms", ".2f"),
    FigureColumn("times alone", "launch_ms", ".2f", divisor=_ALONE),
)


def launch_figures(trial: Trial) -> dict[str, float]:
    """Return the rate of a trial, and the median time of launching a step."""
    return {
        "images_per_s": trial.images_per_s,
        "launch_ms": percentile(trial.series["launch_s"], 0.5) * 1e3,
    }


def measure_loader(settings: Settings) -> Mapping[str, float]:
    """Measure launching beside a loader, in a process of its own."""
    return launch_figures(run_in_process(measure, settings))


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
    }
    for label, candidate in candidates.items():
        loader = settings.for_loader(candidate.backend, candidate.loader_path, len(candidate.data.classes))
        runs[label] = partial(measure_loader, loader)
    turns = harness.take_turns(runs, repeats)
    table = Table(
        ["loader", *(column.title for column in _COLUMNS)],
        [[name, *turns.cells(name, _COLUMNS)] for name in runs],
    )
    harness.show(
        table, turns, f"{EAGER_LAUNCHES:,} launches a step; batches of {batch_size} of {size}x{size}"
    )


if __name__ == "__main__":
    harness.main(command, "launching")

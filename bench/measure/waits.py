"""How long a training thread waits for a batch that is there, and what sparing it costs.

    python -m bench.measure.waits data/shards --batch-size 64 --step-ms 36

Beside a step that leaves the CPUs alone, as that of a GPU does, a loader has each batch ready long before it
is asked for. What is left to wait for is a core and the interpreter's lock: the thread that reads ahead has
work as soon as a batch is taken. Measured with that thread sleeping first (`nap`, see
`loaders.delivery.prefetch`), without, and with a thread fewer. Each run has a process of its own, and they
take turns.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import click
import torch

import loaders
from bench.measure.fresh import run_fresh
from bench.measure.settings import LAST, endless
from bench.report.stats import Estimate, estimate, percentile, ratio
from loaders.batch import Batch
from loaders.delivery import prefetch
from precache.console import commandline
from precache.console.commandline import ProgressBar
from precache.executors import available_cpus


@dataclass(frozen=True, slots=True)
class Way:
    """How the threads of a loader run.

    Attributes:
        naps: as `loaders.delivery.prefetch` has it.
        fewer: threads than asked for.
    """

    name: str
    naps: bool
    fewer: int = 0


WAYS = (Way("nap", True), Way("no nap", False), Way("no nap, one fewer", False, 1))


@dataclass(frozen=True, slots=True)
class Waits:
    """What one run measured.

    Attributes:
        wait_s: from asking for a batch to having it, beside the step.
        late_s: by how much steps took longer than asked for: the same thread, waiting for a core.
        images_per_s: without a step.
    """

    wait_s: tuple[float, ...]
    late_s: tuple[float, ...]
    images_per_s: float


def measure(path: Path, way: Way, batch_size: int, workers: int, step_s: float, batches: int) -> Waits:
    """Measure in this process, of which nothing else may be asked afterwards."""
    if not way.naps:
        prefetch._NAP_S = 0.0
    reading = loaders.Reading(workers=max(1, workers - way.fewer))
    with loaders.build(path, batch_size=batch_size, last=LAST, reading=reading) as loader:
        source = (batch for batch, _ in endless(loader))
        for _ in islice(source, len(loader)):  # compares checksums, and brings the files into the page cache
            pass
        wait_s, late_s = _beside(source, step_s, batches)
        return Waits(wait_s, late_s, _alone(source, batches))


def _beside(
    source: Iterator[Batch], step_s: float, batches: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    wait_s, late_s = [], []
    for _ in range(batches):
        start_s = time.perf_counter()
        next(source)
        there_s = time.perf_counter()
        time.sleep(step_s)
        wait_s.append(there_s - start_s)
        late_s.append(time.perf_counter() - there_s - step_s)
    return tuple(wait_s), tuple(late_s)


def _alone(source: Iterator[Batch], batches: int) -> float:
    next(source)
    start_s = time.perf_counter()
    images = sum(len(batch.ids) for batch in islice(source, batches))
    return images / (time.perf_counter() - start_s)


@click.command(cls=commandline.Command)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--batch-size", default=64, show_default=True)
@click.option("--workers", default=available_cpus(), show_default="one per CPU")
@click.option("--step-ms", default=36.0, show_default=True, help="Of each batch, without the CPUs.")
@click.option("--batches", default=200, show_default=True, help="Of each run.")
@click.option("--repeats", default=7, show_default=True, help="Runs of each way, taking turns.")
def waits(path: Path, batch_size: int, workers: int, step_ms: float, batches: int, repeats: int) -> None:
    """Print how long each batch of PATH is waited for, and images/s, for each way to run the threads."""
    run = partial(run_fresh, measure, path)
    found: dict[str, list[Waits]] = {way.name: [] for way in WAYS}
    with ProgressBar("waits", "run") as bar:
        for number in range(repeats * len(WAYS)):
            way = WAYS[number % len(WAYS)]
            found[way.name].append(run(way, batch_size, workers, step_ms / 1e3, batches))
            bar(number + 1, repeats * len(WAYS))
    print(
        f"{path}: batch {batch_size}, {workers} threads on {available_cpus()} CPUs, step {step_ms:g} ms, "
        f"{repeats} runs of {batches} batches each, torch {torch.__version__}, {' '.join(os.uname()[::2])}"
    )
    print("\n".join(table(found)))


def table(found: dict[str, list[Waits]]) -> list[str]:
    """A head, and a line for each way: medians over its runs, with the lowest and the highest."""
    lines = [f"{'':20}{'wait, ms':20}{'95th percentile':20}{'step late, ms':20}images/s alone, of 'no nap'"]
    plain = [run.images_per_s for run in found["no nap"]]
    for name, runs in found.items():
        rates = [run.images_per_s for run in runs]
        cells = [
            _shown(estimate([1e3 * percentile(run.wait_s, 0.5) for run in runs]), ".2f"),
            _shown(estimate([1e3 * percentile(run.wait_s, 0.95) for run in runs]), ".2f"),
            _shown(estimate([1e3 * percentile(run.late_s, 0.5) for run in runs]), ".2f"),
        ]
        alone = f"{_shown(estimate(rates), ',.0f')}, {_shown(ratio(rates, plain), '.2f')}"
        lines.append(f"{name:20}{''.join(f'{cell:20}' for cell in cells)}{alone}")
    return lines


def _shown(value: Estimate, form: str) -> str:
    return f"{value.median:{form}} ({value.low:{form}}-{value.high:{form}})"


if __name__ == "__main__":
    waits()

"""What checking costs, and how much slower a first epoch is than later ones.

    python -m bench.measure.epochs data/shards --batch-size 64 --workers 2

Each loader has a process of its own, and they take turns: one of each `check`, again and again. The files
are read once before, so that the page cache has them.
"""

import time
from functools import partial
from pathlib import Path
from statistics import median

import click
import torch

import loaders
from bench.measure.fresh import run_fresh
from bench.report.stats import Estimate, estimate, ratio
from precache.console import commandline
from precache.console.commandline import ProgressBar

_CHECKS = ("never", "first-read", "always")
_LATER = 4  # epochs after the first


def epoch_rates(path: Path, check: str, batch_size: int, workers: int) -> list[float]:
    """Images per second of each epoch of a new loader."""
    rates = []
    reading = loaders.Reading(workers=workers, check=check)
    with loaders.build(path, batch_size=batch_size, reading=reading) as loader:
        for _ in range(1 + _LATER):
            start_s = time.perf_counter()
            images = sum(len(batch.ids) for batch in loader)
            rates.append(images / (time.perf_counter() - start_s))
    return rates


@click.command(cls=commandline.Command)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--batch-size", default=64, show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--repeats", default=7, show_default=True, help="Loaders of each check, taking turns.")
def epochs(path: Path, batch_size: int, workers: int, repeats: int) -> None:
    """Print images/s of first and later epochs of PATH, for each check."""
    run = partial(run_fresh, epoch_rates, path)
    run("never", batch_size, workers)
    first: dict[str, list[float]] = {check: [] for check in _CHECKS}
    later: dict[str, list[float]] = {check: [] for check in _CHECKS}
    with ProgressBar("epochs", "loader") as bar:
        for number in range(repeats * len(_CHECKS)):
            check = _CHECKS[number % len(_CHECKS)]
            rates = run(check, batch_size, workers)
            first[check].append(rates[0])
            later[check].append(median(rates[1:]))
            bar(number + 1, repeats * len(_CHECKS))
    print(f"{path}: batch {batch_size}, {workers} workers, {repeats} loaders each, torch {torch.__version__}")
    for check in _CHECKS:
        print(
            f"{check:10}  later epochs {_shown(estimate(later[check]), ',.0f')} images/s, "
            f"{_shown(ratio(later[check], later['never']), '.2f')} of 'never'; "
            f"first {_shown(ratio(first[check], later[check]), '.2f')} of later"
        )


def _shown(value: Estimate, form: str) -> str:
    return f"{value.median:{form}} ({value.low:{form}} to {value.high:{form}})"


if __name__ == "__main__":
    epochs()

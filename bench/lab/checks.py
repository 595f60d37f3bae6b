"""What comparing pictures with their checksums costs, and how much slower a first epoch is than later ones.

    python -m bench.lab.checks data/shards --batch-size 64 --workers 2

Each loader has a process of its own. The first turn is not counted: it brings the files into the page cache.
"""

import time
from functools import partial
from pathlib import Path
from statistics import median

import click

import loaders
from bench.lab import harness
from bench.lab.harness import Column
from bench.measure.fresh import run_fresh
from bench.report.table import Table
from loaders.settings import Check
from precache.cli import commandline

CHECKS = ("never", "first-read", "always")
_LATER = 4  # epochs after the first
_COLUMNS = (
    Column("first epoch, images/s", "first"),
    Column("later epochs, images/s", "later"),
    Column("later, beside 'never'", "later", ".2f", "never"),
)


def epoch_rates(path: Path, check: Check, batch_size: int, workers: int) -> dict[str, float]:
    """Images/s of the first epoch of a new loader, and the median of those after it; first over later."""
    rates = []
    reading = loaders.Reading(workers=workers, check=check)
    with loaders.build(path, batch_size=batch_size, dtype="uint8", reading=reading) as loader:
        for _ in range(1 + _LATER):
            start_s = time.perf_counter()
            images = sum(len(batch.ids) for batch in loader)
            rates.append(images / (time.perf_counter() - start_s))
    later = median(rates[1:])
    return {"first": rates[0], "later": later, "share": rates[0] / later}


@click.command(cls=commandline.Command)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--batch-size", default=64, show_default=True, help="Samples per batch.")
@click.option("--workers", default=2, show_default=True, help="Threads of each loader.")
@click.option("--repeats", default=7, show_default=True, help="Loaders of each check, taking turns.")
def command(path: Path, batch_size: int, workers: int, repeats: int) -> None:
    """Print images/s of first and later epochs of PATH, for each value of Reading(check=...)."""
    runs = {check: partial(run_fresh, epoch_rates, path, check, batch_size, workers) for check in CHECKS}
    turns = harness.Turns(runs, repeats, uncounted=1)
    columns = (*_COLUMNS, Column("first, beside later", "share", ".2f"))
    table = Table(["check", *(column.title for column in columns)], turns.rows(columns))
    turns.show(table, f"{path}: batch {batch_size}, uint8, {workers} workers")


if __name__ == "__main__":
    harness.main(command, "checks")

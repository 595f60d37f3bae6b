"""Compare the time of listing a raw tree, which goes before the first batch, with torchvision's ImageFolder.

    python -m bench.lab.listing TREE

Each turn lists TREE three times, each in a process of its own: as ImageFolder does, as `loaders.build` does,
which reads names alone, and as `precache convert` does, which also reads sizes and times. strace emulates a
slow drive, which takes half a millisecond for each request of a file's status:

    strace -f --seccomp-bpf -o /dev/null -e trace=newfstatat -e inject=newfstatat:delay_enter=500 \\
        python -m bench.lab.listing TREE
"""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import click
import psutil
from torchvision.datasets import ImageFolder

import loaders
from bench.lab import harness
from bench.lab.harness import FigureColumn
from bench.report.table import Table
from precache.sources.tree import scan_tree

_IMAGEFOLDER = "torchvision's ImageFolder"
_COLUMNS = (
    FigureColumn("seconds", "seconds", ".2f"),
    FigureColumn("beside ImageFolder", "seconds", ".2f", _IMAGEFOLDER),
    FigureColumn("memory of the list, MiB", "mib"),
)


def _build(tree: Path) -> loaders.Loader:
    return loaders.build(tree, batch_size=64, device="cpu")


LISTERS: dict[str, Callable[[Path], object]] = {
    _IMAGEFOLDER: ImageFolder,
    "loaders.build": _build,
    "precache convert": scan_tree,
}
"""Functions that list a tree, by the name of the row."""


def measure(name: str, tree: Path) -> dict[str, float]:
    """Return the seconds of one listing, and the MiB by which the memory of this process grew."""
    process = psutil.Process()
    before_bytes, start_s = process.memory_info().rss, time.perf_counter()
    listing = LISTERS[name](tree)
    seconds = time.perf_counter() - start_s
    grown_bytes = process.memory_info().rss - before_bytes
    del listing  # it had to live until the memory was read
    return {"seconds": seconds, "mib": grown_bytes / 2**20}


def measure_in_process(name: str, tree: Path) -> dict[str, float]:
    """Return the figures of `measure` in a new process, where nothing is left of other turns."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(measure, name, tree).result()


@click.command()
@click.argument("tree", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--repeats", default=5, show_default=True, help="Turns of each.")
def command(tree: Path, repeats: int) -> None:
    """Print how long the files of TREE take to be listed."""
    measure_in_process(_IMAGEFOLDER, tree)  # afterwards the system has the folders in memory for all runs
    turns = harness.take_turns({name: partial(measure_in_process, name, tree) for name in LISTERS}, repeats)
    table = Table(["listed by", *(column.title for column in _COLUMNS)], turns.rows(_COLUMNS))
    files = len(ImageFolder(tree))
    harness.show(table, turns, f"{files:,} pictures, folders in memory", ("python", "torchvision"))


if __name__ == "__main__":
    harness.main(command, "listing")

"""Listing a raw tree beside torchvision's ImageFolder: how long training waits before its first batch.

    python -m bench.lab.listing TREE

Each turn lists TREE three times, each in a process of its own: as ImageFolder, as `loaders.build` does, which
asks for names alone, and as `precache convert` does, which asks for sizes and times, too. strace shows what
a slow drive makes of it, with an answer of half a millisecond to each question about a file:

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
from bench.lab.harness import Column
from bench.report.table import Table
from precache.cli import commandline
from precache.sources.tree import scan_tree

_IMAGEFOLDER = "torchvision's ImageFolder"
_COLUMNS = (
    Column("seconds", "seconds", ".2f"),
    Column("beside ImageFolder", "seconds", ".2f", _IMAGEFOLDER),
    Column("memory of the list, MiB", "mib"),
)


def _build(tree: Path) -> loaders.Loader:
    return loaders.build(tree, batch_size=64, device="cpu")


LISTERS: dict[str, Callable[[Path], object]] = {
    _IMAGEFOLDER: ImageFolder,
    "loaders.build": _build,
    "precache convert": scan_tree,
}


def measure(name: str, tree: Path) -> dict[str, float]:
    """Seconds of one listing, and by how much the memory of this process grew."""
    process = psutil.Process()
    before, start_s = process.memory_info().rss, time.perf_counter()
    listed = LISTERS[name](tree)
    seconds = time.perf_counter() - start_s
    grown = process.memory_info().rss - before
    del listed
    return {"seconds": seconds, "mib": grown / 2**20}


def measure_apart(name: str, tree: Path) -> dict[str, float]:
    """The figures of `measure` in a new process, where nothing is left of other turns."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(measure, name, tree).result()


@click.command(cls=commandline.Command)
@click.argument("tree", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--repeats", default=5, show_default=True, help="Turns of each.")
def command(tree: Path, repeats: int) -> None:
    """Print how long the files of TREE take to be listed."""
    measure_apart(_IMAGEFOLDER, tree)  # so that the system knows the folders for all of them
    turns = harness.take_turns({name: partial(measure_apart, name, tree) for name in LISTERS}, repeats)
    table = Table(["listed by", *(column.title for column in _COLUMNS)], turns.rows(_COLUMNS))
    files = len(ImageFolder(tree))
    harness.show(table, turns, f"{files:,} pictures, folders in memory", ("python", "torchvision"))


if __name__ == "__main__":
    harness.main(command, "listing")

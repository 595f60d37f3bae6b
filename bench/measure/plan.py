"""How long a conversion of very many names takes before its first shard begins, and how much memory.

    python -m bench.measure.plan FOLDER --names 10000000

Makes FOLDER/tree, of hard links to a few small pictures, unless it is there; remove FOLDER yourself. Each
turn scans and plans in a new process, with no process beside it and with several, and then converts until
the first shard would begin; `--whole` converts to the end. Names and inodes are in the system's memory.
"""

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import click
import numpy as np
import torch
from PIL import Image
from rich.table import Table

from bench.machine.hardware import describe_machine
from bench.machine.others import OtherProcesses
from bench.measure.fresh import run_module
from bench.report import stats
from precache.console.commandline import ProgressBar, human_bytes
from precache.console.tables import new_console
from precache.errors import SettingError, check_range
from precache.executors import available_cpus

_MOST_LINKS = 60_000  # ext4 allows 65,000
_SIDE = 16
Figures: TypeAlias = dict[tuple[int, str], list[tuple[float, float, int]]]
"""(workers, stage) -> seconds, CPU seconds and peak bytes of each turn."""


def make_tree(folder: Path, names: int, classes: int) -> Path:
    """`folder`/tree: `names` hard links in `classes` folders, whose pictures lie in `folder`/originals.

    Raises:
        SettingError: there is a tree already, of another number of names.
    """
    tree, note = folder / "tree", folder / "names.json"
    asked = {"names": names, "classes": classes}
    if note.exists():
        if json.loads(note.read_text()) != asked:
            raise SettingError(f"{folder}: holds {note.read_text()}, and {asked} are asked for; remove it")
        return tree
    (folder / "originals").mkdir(parents=True)
    random = np.random.default_rng(0)
    original, links = folder, 0
    with ProgressBar("tree", "name") as bar:
        for label in range(classes):
            inside = tree / f"n{label:08d}"
            inside.mkdir(parents=True)
            for number in range(names * label // classes, names * (label + 1) // classes):
                if links % _MOST_LINKS == 0:
                    original = folder / f"originals/{links}.jpg"
                    pixels = random.integers(0, 256, (_SIDE, _SIDE, 3), np.uint8)
                    Image.fromarray(pixels).save(original)
                os.link(original, inside / f"n{label:08d}_{number:08d}.JPEG")
                links += 1
            bar(links, names)
    note.write_text(json.dumps(asked))
    return tree


def measure(
    tree: Path, workers: Sequence[int], size: int, repeats: int, scratch: Path, *, whole: bool = False
) -> Figures:
    """The stages with each number of workers, in turns."""
    figures: Figures = {}
    for _ in range(repeats):
        for count in workers:
            for mode in ("stages", "first", *(["whole"] if whole else [])):
                with tempfile.TemporaryDirectory(dir=scratch, prefix="bench-plan-") as out:
                    arguments = (mode, str(tree), str(count), str(size), str(Path(out) / "out"))
                    told = run_module("bench.measure.plan_stages", *arguments, repr(time.time()))
                for line in filter(lambda line: line.startswith("{"), told.splitlines()):
                    found = json.loads(line)
                    key = (count, found["stage"])
                    figures.setdefault(key, []).append(
                        (found["seconds"], found["cpu_s"], found["peak_bytes"])
                    )
    return figures


def show(figures: Figures, conditions: str) -> None:
    """Print them; seconds beside those with the first number of workers."""
    console, table = new_console(), Table(box=None)
    for title in ("workers", "stage", "seconds", "ratio", "CPU s", "peak memory"):
        table.add_column(title, justify="left" if title == "stage" else "right")
    first = next(iter(figures))[0]
    for (workers, stage), turns in figures.items():
        seconds = [turn[0] for turn in turns]
        ratio = stats.ratio(seconds, [turn[0] for turn in figures[first, stage]])
        found = stats.estimate(seconds)
        table.add_row(
            str(workers),
            stage,
            f"{found.median:.2f} ({found.low:.2f}-{found.high:.2f})",
            f"{ratio.median:.2f}",
            f"{stats.estimate([turn[1] for turn in turns]).median:.2f}",
            human_bytes(max(turn[2] for turn in turns)),
        )
    console.print(table)
    console.print(conditions)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--names", default=1_000_000, show_default=True, help="Pictures of the tree.")
@click.option("--classes", default=1_000, show_default=True, help="Class folders.")
@click.option("--size", default=8, show_default=True, help="Most of the stored shorter side, pixels.")
@click.option("--repeats", default=1, show_default=True, help="Turns.")
@click.option("--workers", default=available_cpus(), help="Worker processes.  [default: one per CPU]")
@click.option("--whole", is_flag=True, help="Convert to the end, too.")
def main(folder: Path, names: int, classes: int, size: int, repeats: int, workers: int, whole: bool) -> None:
    """Measure how a conversion of the tree in FOLDER begins."""
    check_range("repeats", repeats, 1)
    check_range("classes", classes, 1)
    check_range("names", names, classes)
    others = OtherProcesses()
    tree = make_tree(folder, names, classes)
    figures = measure(tree, sorted({0, workers}), size, repeats, folder, whole=whole)
    machine, share = describe_machine(torch.device("cpu")), others.share()
    busy = "" if share is None else f"; other processes took {share:.0%} of the CPUs"
    show(
        figures,
        f"{names:,} names in {classes:,} folders, median (range) of {repeats} turns, names in memory; "
        f"{machine['cpu']}, Python {machine['python']}, numpy {machine['numpy']}, {machine['date']}{busy}",
    )


if __name__ == "__main__":
    main()

"""Time the stages of a conversion, and whole conversions beside those of other libraries' writers.

    python -m bench.lab.conversion TREE
    python -m bench.lab.conversion TREE --squares --peer-python PEERS/bin/python

Stages are timed in a worker that writes one shard in this process, of pictures taken evenly from the tree.
Whole conversions run as a user runs them, each in a process of its own, start-up included. The other writers
store squares of decoded pixels, as `--squares` does.
"""

import cProfile
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from types import CodeType

import click
import numpy as np

from bench.lab import harness
from bench.lab.harness import FigureColumn
from bench.lab.libraries import SQUARE_WRITERS
from bench.lab.peers import find_libraries, write_pictures
from bench.measure.processes import run_command
from bench.report.table import Table
from precache.conversion.shard_writer import ShardTask, write_shard
from precache.dataset.statistics import PixelSums
from precache.engines import Ticks, available_cpus
from precache.formats import FORMATS
from precache.pictures import images, jpeg, reading
from precache.recipe import Recipe
from precache.sources.base import Scan
from precache.sources.tree import scan_tree
from precache.storage import checksum_of
from precache.storage.staging import temporary_folder

_SIDE = 256  # pixels of squares
_STAGE_CODE: dict[str, tuple[CodeType, ...]] = {
    "read": (reading.read_picture.__code__,),
    "decode": (images.decode_for.__code__,),
    "resize": (images.fit.__code__,),
    "encode": (jpeg.encode_jpeg.__code__,),
    "statistics": (checksum_of.__code__, PixelSums.from_picture.__code__),
}
"""Code of the functions in which a worker spends the time of each stage; the rest of its time is writing."""
_RATE = FigureColumn("images/s", "images_per_s")


def time_stages(scan: Scan, recipe: Recipe, count: int) -> dict[str, float]:
    """Return the share of each stage in a worker's time, and images/s, while it writes `count` pictures."""
    rows = np.unique(np.linspace(0, len(scan.samples) - 1, count).round().astype(int)).tolist()
    with temporary_folder() as folder:
        task = ShardTask("stages", tuple(scan.samples[row] for row in rows), folder, recipe, inputs_digest="")
        start_s = time.perf_counter()
        with cProfile.Profile() as profile:  # a picture takes about a hundred calls: profiling costs little
            write_shard(scan.source, task, Ticks())
        total_s = time.perf_counter() - start_s
    seconds = {entry.code: entry.totaltime for entry in profile.getstats()}
    shares = {
        stage: sum(seconds.get(code, 0.0) for code in codes) / total_s for stage, codes in _STAGE_CODE.items()
    }
    shares["write"] = 1 - sum(shares.values())
    return {**shares, "images_per_s": len(rows) / total_s}


def convert_whole(scan: Scan, recipe: Recipe, workers: int) -> dict[str, float]:
    """Return images/s of `precache convert` in a process of its own."""
    with temporary_folder() as folder:
        words = [str(scan.root), str(folder / "out"), *shlex.split(recipe.to_flags())]
        command = [sys.executable, "-m", "precache", "convert", *words, "--workers", str(workers)]
        return {"images_per_s": len(scan.samples) / run_command(command)[0]}


def convert_by_library(name: str, scan: Scan, workers: int, python: str) -> dict[str, float]:
    """Return images/s of another library's writer in a process of its own."""
    with temporary_folder() as folder:
        wall_s = write_pictures(name, scan, folder / "out", _SIDE, workers, python)
    return {"images_per_s": len(scan.samples) / wall_s}


@click.command()
@click.argument("tree", type=click.Path(path_type=Path))
@click.option("--format", "format_name", type=click.Choice(FORMATS), default="shards", show_default=True)
@click.option("--squares", is_flag=True, help=f"Store squares of {_SIDE} pixels, beside other libraries.")
@click.option(
    "--peer-python", default=sys.executable, help="Python that has the libraries.  [default: this one]"
)
@click.option("--workers", default=available_cpus, help="Processes of each writer.  [default: one per CPU]")
@click.option("--pictures", default=1000, show_default=True, help="Pictures that the stages are timed on.")
@click.option("--repeats", default=5, show_default=True, help="Turns of each.")
def command(
    tree: Path, format_name: str, squares: bool, peer_python: str, workers: int, pictures: int, repeats: int
) -> None:
    """Print the share of each stage in a worker's time, and images/s of a worker and of whole conversions."""
    scan = scan_tree(tree)
    recipe = Recipe(format=format_name)
    runs: dict[str, harness.Run] = {}
    if squares:
        recipe = Recipe(format=format_name, fit="crop", size=_SIDE)
        for name in find_libraries(peer_python):
            if name in SQUARE_WRITERS:
                runs[name] = partial(convert_by_library, name, scan, workers, peer_python)
    runs["one worker, never waiting"] = partial(time_stages, scan, recipe, pictures)
    runs["precache convert"] = partial(convert_whole, scan, recipe, workers)
    turns = harness.take_turns(runs, repeats)
    stages = [FigureColumn(stage, stage, ".0%") for stage in (*_STAGE_CODE, "write")]
    columns = [_RATE, *stages]
    table = Table(["writer", *(column.title for column in columns)], turns.rows(columns))
    settings = f"{recipe.to_flags()}; {len(scan.samples):,} pictures; {workers} workers"
    harness.show(table, turns, settings, ("python", "pillow", "simplejpeg"))


if __name__ == "__main__":
    harness.main(command, "conversion")

"""Compare converting while training, `loaders.build(TREE, precache=...)`, with converting first.

    python -m bench.lab.converting TREE --trainer-rate 400

Each turn trains two epochs on an emulated accelerator, from the tree alone, from the tree while it is
converted, and from shards after `precache convert`. Seconds are counted until both epochs are trained and the
shards are finished.
"""

import time
from functools import partial
from pathlib import Path

import click

import loaders
from bench.lab import harness
from bench.lab.harness import FigureColumn
from bench.report.table import Table
from precache import Recipe, convert
from precache.cli import commandline
from precache.dataset.converted import is_converted
from precache.errors import check_range
from precache.storage.staging import temporary_folder

_TREE, _WHILE_TRAINING, _FIRST = "the tree alone", "converted while training", "converted first"
_COLUMNS = (
    FigureColumn("epoch 1", "first_rate"),
    FigureColumn("beside the tree", "first_rate", ".2f", _TREE),
    FigureColumn("epoch 2", "second_rate"),
    FigureColumn("two epochs and the shards, s", "total_s", ".1f"),
    FigureColumn("beside converting first", "total_s", ".2f", _FIRST),
)


def train(method: str, tree: Path, trainer_rate: float, batch_size: int) -> dict[str, float]:
    """Train two epochs from the tree, by one of the three methods above.

    Args:
        trainer_rate: images/s of the emulated accelerator.

    Returns:
        `first_rate` and `second_rate`, images/s of the epochs, and `total_s`, seconds until both are trained
        and the shards, if any, are finished.
    """
    with temporary_folder(tree.parent) as scratch:
        shards, start_s = scratch / "shards", time.perf_counter()
        if method == _FIRST:
            convert(tree, shards, Recipe(format="shards"))
        path = shards if method == _FIRST else tree
        precache_folder = shards if method == _WHILE_TRAINING else None
        rates = []
        with loaders.build(
            path, batch_size=batch_size, augment="train", dtype="uint8", precache=precache_folder
        ) as loader:
            for _ in range(2):
                epoch_start_s = time.perf_counter()
                for images, _ in loader:
                    time.sleep(len(images) / trainer_rate)
                rates.append(loader.samples / (time.perf_counter() - epoch_start_s))
            while precache_folder is not None and not is_converted(precache_folder):
                time.sleep(0.05)
        total_s = time.perf_counter() - start_s
    return {"first_rate": rates[0], "second_rate": rates[1], "total_s": total_s}


@click.command(cls=commandline.Command)
@click.argument("tree", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--trainer-rate", default=400.0, show_default=True, help="Images/s of the accelerator.")
@click.option("--batch-size", default=64, show_default=True, help="Samples per batch.")
@click.option("--repeats", default=3, show_default=True, help="Turns of each.")
def command(tree: Path, trainer_rate: float, batch_size: int, repeats: int) -> None:
    """Print what converting TREE while training costs the first epoch, and what it saves."""
    check_range("batch_size", batch_size, 1)
    methods = (_TREE, _WHILE_TRAINING, _FIRST)
    runs = {method: partial(train, method, tree, trainer_rate, batch_size) for method in methods}
    turns = harness.take_turns(runs, repeats)
    table = Table(["trained on", *(column.title for column in _COLUMNS)], turns.rows(_COLUMNS))
    settings = f"batch {batch_size}, random crops of 224, uint8, a trainer of {trainer_rate:,.0f} images/s"
    harness.show(table, turns, settings, ("torch", "pillow"))


if __name__ == "__main__":
    harness.main(command, "converting")

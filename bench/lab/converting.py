"""Converting while training beside converting first: `loaders.build(TREE, precache=...)`.

    python -m bench.lab.converting TREE --trainer-rate 400

Each turn trains two epochs on an emulated accelerator of so many images/s: on the tree alone, on the tree
while it is converted, and on shards after `precache convert`. Seconds are counted until both epochs are
trained and the shards are finished.
"""

import time
from functools import partial
from pathlib import Path

import click

import loaders
from bench.lab import harness
from bench.lab.harness import Column
from bench.report.table import Table
from precache import Recipe, convert
from precache.cli import commandline
from precache.dataset.converted import is_converted
from precache.errors import check_range
from precache.storage.staging import temporary_folder

_TREE, _GROWING, _FIRST = "the tree alone", "converted while training", "converted first"
_COLUMNS = (
    Column("epoch 1", "rate"),
    Column("beside the tree", "rate", ".2f", _TREE),
    Column("epoch 2", "second"),
    Column("two epochs and the shards, s", "all_s", ".1f"),
    Column("beside converting first", "all_s", ".2f", _FIRST),
)


def train(how: str, tree: Path, trainer_rate: float, batch_size: int) -> dict[str, float]:
    """Images/s of both epochs, and seconds until both are trained and the shards, if any, are finished."""
    with temporary_folder(tree.parent) as scratch:
        folder, start_s = scratch / "shards", time.perf_counter()
        if how == _FIRST:
            convert(tree, folder, Recipe(format="shards"))
        path = folder if how == _FIRST else tree
        growing = folder if how == _GROWING else None
        rates = []
        with loaders.build(
            path, batch_size=batch_size, augment="train", dtype="uint8", precache=growing
        ) as loader:
            for _ in range(2):
                epoch_s = time.perf_counter()
                for images, _ in loader:
                    time.sleep(len(images) / trainer_rate)
                rates.append(loader.samples / (time.perf_counter() - epoch_s))
            while growing is not None and not is_converted(growing):
                time.sleep(0.05)
        return {"rate": rates[0], "second": rates[1], "all_s": time.perf_counter() - start_s}


@click.command(cls=commandline.Command)
@click.argument("tree", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--trainer-rate", default=400.0, show_default=True, help="Images/s of the accelerator.")
@click.option("--batch-size", default=64, show_default=True, help="Samples per batch.")
@click.option("--repeats", default=3, show_default=True, help="Turns of each.")
def command(tree: Path, trainer_rate: float, batch_size: int, repeats: int) -> None:
    """Print what converting TREE while training costs the first epoch, and what it saves."""
    check_range("batch_size", batch_size, 1)
    runs = {how: partial(train, how, tree, trainer_rate, batch_size) for how in (_TREE, _GROWING, _FIRST)}
    turns = harness.take_turns(runs, repeats)
    table = Table(["trained on", *(column.title for column in _COLUMNS)], turns.rows(_COLUMNS))
    settings = f"batch {batch_size}, random crops of 224, uint8, a trainer of {trainer_rate:,.0f} images/s"
    harness.show(table, turns, settings, ("torch", "pillow"))


if __name__ == "__main__":
    harness.main(command, "converting")

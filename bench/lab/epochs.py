"""Compare epochs with FFCV's: the first from the disk, the first from memory, and later ones.

    python -m bench.lab.epochs TREE [--peer-python PEERS/bin/python] [--photographs 3000]

Pictures of TREE become squares of 256 pixels, for both libraries. Photographs as large as ImageNet's are
made, and stored as each library's own documentation has it: `shards` as converted by default, FFCV at most
500 pixels, half of them as JPEG. Each epoch's first batch is not counted, because FFCV compiles in it. In the
column 'from memory', a process begins after another one has read the same files from the disk.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import simplejpeg

import loaders
from bench.lab import harness
from bench.lab.harness import FigureColumn
from bench.machine import page_cache
from bench.measure.peers import PeerCandidate, run_peer, write_squares
from bench.measure.processes import run_in_process
from bench.report.table import Table
from loaders.dataset import open_split
from loaders.read.blocks import BLOCK_BYTES, read_block
from precache import Recipe, convert
from precache.cli import commandline
from precache.example_data.sample_tree import make_sample
from precache.formats import FORMATS
from precache.sources.tree import scan_tree
from precache.storage.staging import temporary_folder

_STORED_SIDE, _SIZE = 256, 224  # pixels
_LATER_EPOCHS = 2
_COLUMNS = (
    FigureColumn("from a cold disk", "cold"),
    FigureColumn("from memory", "warm"),
    FigureColumn("later epochs", "later"),
)
_TITLES = ("loader, images/s", *(column.title for column in _COLUMNS))


def serve(path: Path, epochs: int, batch_size: int, settings: Mapping[str, Any]) -> list[float]:
    """Return images/s of each of `epochs` epochs of the training split at `path`, after its first batch."""
    rates = []
    with loaders.build(path, size=_SIZE, batch_size=batch_size, dtype="uint8", **settings) as loader:
        for _ in range(epochs):
            batches = iter(loader)
            next(batches)
            start_s = time.perf_counter()
            served = sum(len(batch.ids) for batch in batches)
            rates.append(served / (time.perf_counter() - start_s))
    return rates


def serve_peer(peer: PeerCandidate, epochs: int, batch_size: int, workers: int, samples: int) -> list[float]:
    """Return images/s of each of `epochs` epochs of another library's loader, after its first batch.

    Args:
        samples: number of samples in an epoch.
    """
    batches = -(-samples // batch_size)
    trial = run_peer(
        peer, batch_size=batch_size, size=_SIZE, workers=workers, warmup=0, batches=epochs * batches - 1
    )
    batch_s = np.insert(trial.series["batch_s"], 0, 0.0)  # the very first batch is not timed
    return [
        (samples - batch_size) / batch_s[first + 1 : first + batches].sum()
        for first in range(0, len(batch_s), batches)
    ]


def take_epochs(path: Path, run: Callable[[int], list[float]]) -> dict[str, float]:
    """Return images/s of epochs: `cold`, the first from the disk; `warm`, the first from memory; `later`.

    Args:
        run: serves that many epochs of `path` in a process of its own, and returns images/s of each.
    """
    page_cache.drop(path)
    (cold,) = run(1)
    warm, *later = run(1 + _LATER_EPOCHS)
    return {"cold": cold, "warm": warm, "later": float(np.median(later))}


def read_disk(path: Path, samples: int, threads: int) -> dict[str, float]:
    """Return samples/s of reading all shards from the disk in blocks, without serving them."""
    page_cache.drop(path)
    blocks = [
        (file, number)
        for file in sorted(path.glob("*.safetensors"))
        for number in range(-(-file.stat().st_size // BLOCK_BYTES))
    ]
    start_s = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda block: read_block(*block), blocks))
    return {"cold": samples / (time.perf_counter() - start_s)}


def decode_alone(path: Path, workers: int) -> dict[str, float]:
    """Return samples/s of decoding the JPEGs of a converted folder, already in memory, by threads."""
    data = open_split(path, "train")
    jpegs = [sample.data for file in data.files for sample in FORMATS[data.kind].read_shard(Path(file))]

    def decode(part: list[Any]) -> None:
        for jpeg in part:
            simplejpeg.decode_jpeg(jpeg, "RGB")

    rates = []
    parts = [jpegs[first::workers] for first in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(1 + _LATER_EPOCHS):
            start_s = time.perf_counter()
            list(pool.map(decode, parts))
            rates.append(len(jpegs) / (time.perf_counter() - start_s))
    return {"warm": rates[0], "later": float(np.median(rates[1:]))}


@click.command(cls=commandline.Command)
@click.argument("tree", type=click.Path(path_type=Path))
@click.option("--peer-python", default="", help="A Python with ffcv; default: it is left out.")
@click.option("--photographs", default=3000, show_default=True, help="Photographs that are made.")
@click.option("--batch-size", default=128, show_default=True)
@click.option("--workers", default=2, show_default=True, help="Threads of each loader.")
@click.option("--repeats", default=5, show_default=True, help="Turns that the loaders take.")
def command(
    tree: Path, peer_python: str, photographs: int, batch_size: int, workers: int, repeats: int
) -> None:
    """Print images/s of first and later epochs of each loader."""
    reading = loaders.Reading(workers=workers)
    with temporary_folder() as folder:
        photographs_tree = folder / "photographs"
        make_sample(photographs_tree, images=photographs, classes=16, seed=0, like="imagenet")
        squares, jpegs, whole = folder / "squares", folder / "jpegs", folder / "whole"
        for target, format_name in ((squares, "shards"), (jpegs, "webdataset")):
            recipe = Recipe(format=format_name, fit="crop", size=_STORED_SIDE, resample="bilinear")
            convert(tree, target, recipe)
        convert(photographs_tree, whole, Recipe(format="shards"))
        samples = len(open_split(squares, "train"))

        def run_of_build(path: Path, **settings: Any) -> harness.Run:
            settings = {"reading": reading, **settings}
            return lambda: take_epochs(
                path, lambda epochs: run_in_process(serve, path, epochs, batch_size, settings)
            )

        def run_of_peer(name: str, path: Path, samples: int) -> harness.Run:
            peer = PeerCandidate(name, path, _STORED_SIDE, peer_python)
            return lambda: take_epochs(
                path, lambda epochs: serve_peer(peer, epochs, batch_size, workers, samples)
            )

        runs: dict[str, harness.Run] = {
            "the disk alone": partial(read_disk, squares, samples, 4),
            "squares, `shards`": run_of_build(squares),
            "squares, `shards`, windows": run_of_build(squares, shuffle="window"),
            "squares, `shards`, random crops": run_of_build(squares, augment="train"),
            "photographs, `shards`, random crops": run_of_build(whole, augment="train"),
            "squares, two threads that decode JPEG, and nothing else": partial(decode_alone, jpegs, workers),
            "squares, `webdataset`": run_of_build(jpegs),
        }
        if peer_python:
            ffcv, ffcv_imagenet = folder / "ffcv", folder / "ffcv-imagenet"
            write_squares("ffcv", scan_tree(tree), ffcv, _STORED_SIDE, workers, peer_python)
            write_squares(
                "ffcv-imagenet", scan_tree(photographs_tree), ffcv_imagenet, 0, workers, peer_python
            )
            runs["squares, FFCV"] = run_of_peer("ffcv", ffcv, samples)
            runs["squares, FFCV, random crops"] = run_of_peer("ffcv-crops", ffcv, samples)
            runs["photographs, FFCV, random crops"] = run_of_peer("ffcv-imagenet", ffcv_imagenet, photographs)
        turns = harness.take_turns(runs, repeats)
        rows = turns.rows(_COLUMNS)
        sizes = {
            path.name: sum(file.stat().st_size for file in path.rglob("*")) / 1e9 for path in folder.iterdir()
        }
    stored = ", ".join(f"{name} {gigabytes:.2f}" for name, gigabytes in sizes.items())
    settings = (
        f"{samples:,} pictures as squares of {_STORED_SIDE} pixels, {photographs:,} photographs, served at "
        f"{_SIZE}; batches of {batch_size}, {workers} workers, uint8; GB: {stored}"
    )
    harness.show(Table(_TITLES, rows), turns, settings, ("torch", "pillow", "simplejpeg", "xxhash"))


if __name__ == "__main__":
    harness.main(command, "epochs")

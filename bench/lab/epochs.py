"""Epochs beside FFCV's: the first from the disk, the first from memory, and later ones.

    python -m bench.lab.epochs TREE [--peer-python PEERS/bin/python] [--photographs 3000]

Pictures of TREE become squares of 256 pixels, for both libraries. Photographs as large as ImageNet's are
made, and stored as each library's own documentation has it: `shards` as converted by default, FFCV at most
500 pixels, half of them as JPEG. Each epoch's first batch is not counted: in it FFCV compiles. 'from memory'
is a process that begins after another one has read the same files from the disk.
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
from bench.lab.harness import Column
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

_STORED, _SIZE = 256, 224
_LATER = 2  # epochs
_COLUMNS = (
    Column("from a cold disk", "cold"),
    Column("from memory", "warm"),
    Column("later epochs", "later"),
)
_TITLES = ("loader, images/s", *(column.title for column in _COLUMNS))


def serve(path: Path, epochs: int, batch_size: int, settings: Mapping[str, Any]) -> list[float]:
    """Images/s of so many epochs of the training split at `path`, each after its first batch."""
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
    """Images/s of so many epochs of another library's loader over `samples`, each after its first batch."""
    batches = -(-samples // batch_size)
    trial = run_peer(
        peer, batch_size=batch_size, size=_SIZE, workers=workers, warmup=0, batches=epochs * batches - 1
    )
    batch_s = np.insert(trial.series["batch_s"], 0, 0.0)  # its first batch is not among them
    return [
        (samples - batch_size) / batch_s[first + 1 : first + batches].sum()
        for first in range(0, len(batch_s), batches)
    ]


def take_epochs(path: Path, run: Callable[[int], list[float]]) -> dict[str, float]:
    """Images/s by the state of the files at `path`; `run` serves so many epochs in a process of its own."""
    page_cache.drop(path)
    (cold,) = run(1)
    warm, *later = run(1 + _LATER)
    return {"cold": cold, "warm": warm, "later": float(np.median(later))}


def read_disk(path: Path, samples: int, threads: int) -> dict[str, float]:
    """Samples/s of reading all files from the disk in blocks, and of nothing else."""
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
    """Samples/s of decoding the JPEGs of a converted folder, already in memory, by so many threads."""
    data = open_split(path, "train")
    jpegs = [sample.data for file in data.files for sample in FORMATS[data.kind].read_shard(Path(file))]

    def decode(part: list[Any]) -> None:
        for jpeg in part:
            simplejpeg.decode_jpeg(jpeg, "RGB")

    rates = []
    parts = [jpegs[first::workers] for first in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(1 + _LATER):
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
    in_memory = loaders.Reading(workers=workers, cache="ram")
    with temporary_folder() as folder:
        made = folder / "photographs"
        make_sample(made, images=photographs, classes=16, seed=0, like="imagenet")
        squares, jpegs, whole = folder / "squares", folder / "jpegs", folder / "whole"
        for target, kind in ((squares, "shards"), (jpegs, "webdataset")):
            convert(tree, target, Recipe(format=kind, fit="crop", size=_STORED, resample="bilinear"))
        convert(made, whole, Recipe(format="shards"))
        samples = len(open_split(squares, "train"))

        def ours(path: Path, **settings: Any) -> harness.Run:
            settings = {"reading": reading, **settings}
            return lambda: take_epochs(
                path, lambda count: run_in_process(serve, path, count, batch_size, settings)
            )

        def theirs(name: str, path: Path, count: int) -> harness.Run:
            peer = PeerCandidate(name, path, _STORED, peer_python)
            return lambda: take_epochs(
                path, lambda epochs: serve_peer(peer, epochs, batch_size, workers, count)
            )

        runs: dict[str, harness.Run] = {
            "the disk alone": partial(read_disk, squares, samples, 4),
            "squares, `shards`": ours(squares),
            "squares, `shards`, windows": ours(squares, shuffle="window"),
            'squares, `shards`, `cache="ram"`': ours(squares, reading=in_memory),
            "squares, `shards`, random crops": ours(squares, augment="train"),
            "photographs, `shards`, random crops": ours(whole, augment="train"),
            "squares, two threads that decode JPEG, and nothing else": partial(decode_alone, jpegs, workers),
            "squares, `webdataset`": ours(jpegs),
            'squares, `webdataset`, `cache="ram"`': ours(jpegs, reading=in_memory),
        }
        if peer_python:
            for writer, source, size in (("ffcv", tree, _STORED), ("ffcv-imagenet", made, 0)):
                write_squares(writer, scan_tree(source), folder / writer, size, workers, peer_python)
            runs["squares, FFCV"] = theirs("ffcv", folder / "ffcv", samples)
            runs["squares, FFCV, random crops"] = theirs("ffcv-crops", folder / "ffcv", samples)
            runs["photographs, FFCV, random crops"] = theirs(
                "ffcv-imagenet", folder / "ffcv-imagenet", photographs
            )
        turns = harness.take_turns(runs, repeats)
        rows = turns.rows(_COLUMNS)
        sizes = {
            path.name: sum(file.stat().st_size for file in path.rglob("*")) / 1e9 for path in folder.iterdir()
        }
    stored = ", ".join(f"{name} {gigabytes:.2f}" for name, gigabytes in sizes.items())
    settings = (
        f"{samples:,} pictures as squares of {_STORED} pixels, {photographs:,} photographs, served at "
        f"{_SIZE}; batches of {batch_size}, {workers} workers, uint8; GB: {stored}"
    )
    harness.show(Table(_TITLES, rows), turns, settings, ("torch", "pillow", "simplejpeg", "xxhash"))


if __name__ == "__main__":
    harness.main(command, "epochs")

"""Compare epochs with those of other libraries: the first from disk, the first from memory, and later ones.

    python -m bench.lab.peers TREE [--peer-python PEERS/bin/python] [--photographs 3000]

Pictures of TREE become squares of 256 pixels, for all libraries. Photographs as large as ImageNet's are made,
and stored as each library's own documentation has it: `shards` as converted by default, FFCV at most 500
pixels, half of them as JPEG. Each epoch's first batch is not counted, because FFCV compiles in it. In the
column 'from memory', a process begins after another one has read the same files from the disk.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import simplejpeg
import torch

import loaders
from bench.lab import harness, libraries
from bench.lab.harness import FigureColumn
from bench.lab.libraries import PEERS
from bench.machine import page_cache
from bench.measure.imagefolder import ImageFolderLoader
from bench.measure.processes import run_command, run_in_process
from bench.report.table import Table
from loaders.dataset import open_split
from loaders.read.blocks import BLOCK_BYTES, read_block
from loaders.read.shards import MappedShard
from precache import Recipe, convert
from precache.errors import WorkerError
from precache.example_data.sample_tree import make_sample
from precache.formats import FORMATS
from precache.formats.shards import ShardFile
from precache.pictures.jpeg import Pixels
from precache.sources.base import Scan
from precache.sources.tree import scan_tree
from precache.storage import checksum_of
from precache.storage.staging import temporary_folder

_STORED_SIDE, _SIZE = 256, 224  # pixels
_LATER_EPOCHS = 2
_COLUMNS = (
    FigureColumn("from a cold disk", "cold"),
    FigureColumn("from memory", "warm"),
    FigureColumn("later epochs", "later"),
)
_TITLES = ("loader, images/s", *(column.title for column in _COLUMNS))


def run_libraries(python: str, *words: object) -> tuple[float, dict[str, Any]]:
    """Run `bench.lab.libraries` with that Python; return the seconds that it took and its JSON answer.

    Raises:
        WorkerError: it failed, or the library is missing; the message has the command that installs it.
    """
    wall_s, text = run_command([python, str(libraries.__file__), *map(str, words)])
    answer: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    if "refused" in answer:
        raise WorkerError(answer["refused"])
    return wall_s, answer


def find_libraries(python: str) -> dict[str, str]:
    """Return each peer's library and version, where this Python has it; print why another is left out."""
    versions = {}
    for name in PEERS:
        try:
            versions[name] = run_libraries(python, "version", name)[1]["version"]
        except WorkerError as error:
            click.echo(f"skipped {name}: {error}", err=True)
    return versions


def write_pictures(writer: str, scan: Scan, folder: Path, size: int, workers: int, python: str) -> float:
    """Write the pictures of a scanned tree into a new `folder`; return the seconds that it took.

    Args:
        writer: name of a peer that writes.
        size: side of the squares, pixels; 0: whole pictures.
        python: the Python that has its library.

    Raises:
        WorkerError: the writer failed, or wrote fewer bytes than the pictures have.
    """
    paths = [str(scan.root.absolute() / sample.path) for sample in scan.samples]
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as pictures:
        json.dump([paths, [sample.label for sample in scan.samples]], pictures)
        pictures.flush()
        words = ("write", writer, pictures.name, folder, "--size", size, "--workers", workers)
        wall_s, _ = run_libraries(python, *words)
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if written < len(paths) * size**2 * 3:
        raise WorkerError(f"{writer} wrote {written:,} bytes to {folder}: less than the pictures have")
    return wall_s


def time_epochs(open_loader: Callable[[], Any], epochs: int) -> list[float]:
    """Return images/s of each of `epochs` epochs of a loader, after its first batch."""
    rates = []
    with open_loader() as loader:
        for _ in range(epochs):
            batches = iter(loader)
            next(batches)
            start_s = time.perf_counter()
            served = sum(len(images) for images, _ in batches)
            rates.append(served / (time.perf_counter() - start_s))
    return rates


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


def copy_alone(path: Path, batch_size: int, workers: int) -> dict[str, float]:
    """Return samples/s of threads that copy the middle of each stored square, already in memory.

    It is the limit of `shards`: its first epoch (`warm`) compares each picture with its checksum, too.
    """
    data = open_split(path, "train")
    shards = []
    for file in data.files:
        with ShardFile(Path(file)) as shard:
            shards.append(MappedShard(shard, in_blocks=False, locked=None))
    order = np.random.default_rng(0).permutation(len(data))
    samples = list(zip(*(column.tolist() for column in data.locate(order)), strict=True))
    margin = (_STORED_SIDE - _SIZE) // 2
    middle = slice(margin, margin + _SIZE)
    batches = [np.zeros((batch_size, _SIZE, _SIZE, 3), np.uint8) for _ in range(workers)]

    def copy(batch: Pixels, part: list[tuple[int, int]], *, compares: bool) -> None:
        for slot, (number, row) in enumerate(part):
            picture = shards[number].picture(row)
            batch[slot % batch_size] = picture[middle, middle]
            if compares:
                checksum_of(picture)

    rates = []
    parts = [samples[first::workers] for first in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        for epoch in range(1 + _LATER_EPOCHS):
            start_s = time.perf_counter()
            list(pool.map(partial(copy, compares=epoch == 0), batches, parts))
            rates.append(len(samples) / (time.perf_counter() - start_s))
    return {"warm": rates[0], "later": float(np.median(rates[1:]))}


def own_runs(
    tree: Path, squares: Path, jpegs: Path, whole: Path, batch_size: int, workers: int
) -> dict[str, harness.Run]:
    """Return the runs of torchvision's and of this project's loaders, by the names of their rows."""

    def run_of_build(path: Path, **settings: Any) -> harness.Run:
        settings = {"reading": loaders.Reading(workers=workers), "device": "cpu", **settings}
        opened = partial(loaders.build, path, size=_SIZE, batch_size=batch_size, dtype="uint8", **settings)
        return lambda: take_epochs(path, partial(run_in_process, time_epochs, opened))

    imagefolder = partial(
        ImageFolderLoader,
        tree,
        batch_size=batch_size,
        size=_SIZE,
        workers=workers,
        device=torch.device("cpu"),
        augment="eval",
        shuffle=True,
    )
    samples = len(open_split(squares, "train"))
    return {
        "the disk alone": partial(read_disk, squares, samples, 4),
        "the tree, torchvision's ImageFolder": lambda: take_epochs(
            tree, partial(run_in_process, time_epochs, imagefolder)
        ),
        "the tree, `pytorch`": run_of_build(tree),
        "squares, threads that copy (and compare, from memory), and nothing else": partial(
            copy_alone, squares, batch_size, workers
        ),
        "squares, `shards`": run_of_build(squares),
        "squares, `shards`, windows": run_of_build(squares, shuffle="window"),
        "squares, `shards`, random crops": run_of_build(squares, augment="train"),
        "photographs, `shards`, random crops": run_of_build(whole, augment="train"),
        "squares, threads that decode JPEG, and nothing else": partial(decode_alone, jpegs, workers),
        "squares, `webdataset`": run_of_build(jpegs),
    }


def peer_runs(
    names: Mapping[str, str], data: Mapping[str, Path], batch_size: int, workers: int, python: str
) -> dict[str, harness.Run]:
    """Return the runs of other libraries' loaders, by the titles of their rows.

    Args:
        names: names of PEERS, each with its library's version.
        data: the folder of each format that they read.
    """

    def run_of(name: str) -> harness.Run:
        path = data[PEERS[name].reads]

        def serve(epochs: int) -> list[float]:
            words = ("serve", name, path, "--stored", _STORED_SIDE, "--size", _SIZE, "--epochs", epochs)
            _, answer = run_libraries(python, *words, "--batch-size", batch_size, "--workers", workers)
            rates: list[float] = answer["images_per_s"]
            return rates

        return lambda: take_epochs(path, serve)

    return {PEERS[name].title: run_of(name) for name in names}


@click.command()
@click.argument("tree", type=click.Path(path_type=Path))
@click.option(
    "--peer-python", default=sys.executable, help="Python that has the libraries.  [default: this one]"
)
@click.option("--photographs", default=3000, show_default=True, help="Photographs that are made.")
@click.option("--batch-size", default=128, show_default=True)
@click.option("--workers", default=2, show_default=True, help="Threads or processes of each loader.")
@click.option("--repeats", default=5, show_default=True, help="Turns that the loaders take.")
def command(
    tree: Path, peer_python: str, photographs: int, batch_size: int, workers: int, repeats: int
) -> None:
    """Print images/s of first and later epochs of each loader."""
    versions = find_libraries(peer_python)
    with temporary_folder() as folder:
        photographs_tree = folder / "photographs"
        make_sample(photographs_tree, images=photographs, classes=16, seed=0, like="imagenet")
        squares, jpegs, whole = folder / "squares", folder / "jpegs", folder / "whole"
        for target, format_name in ((squares, "shards"), (jpegs, "webdataset")):
            recipe = Recipe(format=format_name, fit="crop", size=_STORED_SIDE, resample="bilinear")
            convert(tree, target, recipe)
        convert(photographs_tree, whole, Recipe(format="shards"))
        data = {"webdataset": jpegs}
        for name in dict.fromkeys(PEERS[name].reads for name in versions):
            if name not in FORMATS:
                source, size = (photographs_tree, 0) if PEERS[name].whole else (tree, _STORED_SIDE)
                data[name] = folder / name
                write_pictures(name, scan_tree(source), data[name], size, workers, peer_python)
        runs = own_runs(tree, squares, jpegs, whole, batch_size, workers)
        runs |= peer_runs(versions, data, batch_size, workers, peer_python)
        turns = harness.take_turns(runs, repeats)
        sizes = {
            path.name: sum(file.stat().st_size for file in path.rglob("*")) / 1e9 for path in folder.iterdir()
        }
    stored = ", ".join(f"{name} {gigabytes:.2f}" for name, gigabytes in sizes.items())
    settings = (
        f"squares of {_STORED_SIDE} pixels, {photographs:,} photographs, served at {_SIZE}; batches of "
        f"{batch_size}, {workers} workers; GB: {stored}; {', '.join(dict.fromkeys(versions.values()))}"
    )
    table = Table(_TITLES, turns.rows(_COLUMNS))
    harness.show(table, turns, settings, ("torch", "pillow", "simplejpeg", "xxhash"))


if __name__ == "__main__":
    harness.main(command, "peers")

"""Print the table of README: a loader's first epoch from the disk, its first from memory, and later ones.

    python -m bench.lab.peers TREE [--peer-python PEERS/bin/python] [--all]

It serves random crops, as a training does, of what README's commands make of TREE: whole pictures, as
converted by default. FFCV's are whole, too, at most 500 pixels a side. `--all` adds other libraries, squares
of 256 pixels, centre crops, what disk and CPUs can do at most, and photographs as large as ImageNet's, which
are made, and stored as each library's own documentation has it: FFCV's at most 500 pixels, half of them JPEG.

All loaders are timed alike: each opens its data in a new process, and an epoch counts from the start of its
iteration to its last batch. So a first epoch has all that happens once: workers start, FFCV compiles,
`shards` compares each picture with its checksum. A clock that starts after the first batch would miss what
the disk reads ahead while FFCV compiles: its rate was above that of the disk. 'First batch' is that of the
epoch from memory. That epoch's process begins after another one has read the same files.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from bench.lab.libraries import PEERS, EpochTime, time_epoch
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
_README_PEER, _PHOTOGRAPHS = "ffcv-crops", "ffcv-imagenet"
_SQUARES, _JPEGS = "decoded squares", "JPEG squares in tars"
_COLD_SHARE = 0.01  # of the bytes may be in memory when an epoch from the disk begins
_COLUMNS = (
    FigureColumn("from a cold disk", "cold"),
    FigureColumn("from memory", "warm"),
    FigureColumn("later epochs", "later"),
    FigureColumn("first batch, s", "first_batch_s", ".2f"),
)
_TITLES = ("loader, images/s", "reads", *(column.title for column in _COLUMNS))


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the table: a loader, or what limits one.

    Attributes:
        reads: what the files that it reads hold.
        path: the folder of these files.
        run: measures its figures once.
    """

    title: str
    reads: str
    path: Path
    run: harness.Run


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


def find_libraries(python: str, names: Iterable[str] = PEERS) -> dict[str, str]:
    """Return each peer's library and version, where this Python has it; print why another is left out."""
    versions: dict[str, str] = {}
    for name in names:
        # some libraries take seconds to import
        same = [version for other, version in versions.items() if PEERS[other].package == PEERS[name].package]
        try:
            versions[name] = same[0] if same else run_libraries(python, "version", name)[1]["version"]
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


def time_epochs(open_loader: Callable[[], Any], epochs: int) -> list[EpochTime]:
    """Return the times of each of `epochs` epochs of a loader."""
    with open_loader() as loader:
        return [time_epoch(loader) for _ in range(epochs)]


def take_epochs(path: Path, run: Callable[[int], list[EpochTime]]) -> dict[str, float]:
    """Return images/s of epochs: `cold`, the first from the disk; `warm`, the first from memory; `later`.

    `first_batch_s` is that of `warm`. `cold` is missing where the system keeps files in memory.

    Args:
        run: serves that many epochs of `path` in a process of its own, and returns the times of each.
    """
    is_cold = page_cache.drop(path) < _COLD_SHARE
    (cold,) = run(1)
    warm, *later = run(1 + _LATER_EPOCHS)
    figures = {"cold": cold.images_per_s} if is_cold else {}
    return figures | {
        "warm": warm.images_per_s,
        "later": float(np.median([epoch.images_per_s for epoch in later])),
        "first_batch_s": warm.first_batch_s,
    }


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


def run_of_build(path: Path, batch_size: int, workers: int, **settings: Any) -> harness.Run:
    """Return the run of `loaders.build` over `path`, which serves uint8 on the CPU."""
    settings = {"size": _SIZE, "batch_size": batch_size, "dtype": "uint8", "device": "cpu", **settings}
    opened = partial(loaders.build, path, reading=loaders.Reading(workers=workers), **settings)
    return partial(take_epochs, path, partial(run_in_process, time_epochs, opened))


def readme_rows(data: Mapping[str, Path], batch_size: int, workers: int) -> list[_Row]:
    """Return the rows of torchvision's loader and of this project's, with random crops."""
    tree, jpegs, whole = data["tree"], data["jpegs"], data["whole"]
    imagefolder = partial(
        ImageFolderLoader,
        tree,
        batch_size=batch_size,
        size=_SIZE,
        workers=workers,
        device=torch.device("cpu"),
        augment="train",
        shuffle=True,
    )
    run_imagefolder = partial(take_epochs, tree, partial(run_in_process, time_epochs, imagefolder))
    crops = partial(run_of_build, batch_size=batch_size, workers=workers, augment="train")
    return [
        _Row("torchvision's `ImageFolder`", "the pictures", tree, run_imagefolder),
        _Row("`build`, the tree", "the pictures", tree, crops(tree)),
        _Row("`build`, `webdataset`", "JPEGs in tars", jpegs, crops(jpegs)),
        _Row("`build`, `shards`", "decoded pictures", whole, crops(whole)),
    ]


def further_rows(data: Mapping[str, Path], batch_size: int, workers: int) -> list[_Row]:
    """Return the rows of this project over squares and photographs, and of what limits them."""
    squares, jpegs, photographs = data["squares"], data["webdataset"], data["photographs"]
    middle = partial(run_of_build, batch_size=batch_size, workers=workers)
    crops = partial(middle, augment="train")
    disk = partial(read_disk, squares, len(open_split(squares, "train")), 4)
    copied = partial(copy_alone, squares, batch_size, workers)
    windows = middle(squares, shuffle="window")
    return [
        _Row("`build`, `shards`, photographs", "decoded photographs", photographs, crops(photographs)),
        _Row("`build`, `shards`, squares", _SQUARES, squares, crops(squares)),
        _Row("`build`, `shards`, squares, centre crops", _SQUARES, squares, middle(squares)),
        _Row("`build`, `shards`, squares, centre crops, windows", _SQUARES, squares, windows),
        _Row("`build`, `webdataset`, squares, centre crops", _JPEGS, jpegs, middle(jpegs)),
        _Row("the disk alone", _SQUARES, squares, disk),
        _Row("threads that copy, and compare, alone", _SQUARES, squares, copied),
        _Row("threads that decode, alone", _JPEGS, jpegs, partial(decode_alone, jpegs, workers)),
    ]


def peer_rows(
    names: Iterable[str], data: Mapping[str, Path], batch_size: int, workers: int, python: str
) -> list[_Row]:
    """Return the rows of other libraries' loaders.

    Args:
        names: names of PEERS.
        data: the folder of each format that they read.
    """

    def run_of(name: str, path: Path) -> harness.Run:
        def serve(epochs: int) -> list[EpochTime]:
            words = ("serve", name, path, "--stored", _STORED_SIDE, "--size", _SIZE, "--epochs", epochs)
            _, answer = run_libraries(python, *words, "--batch-size", batch_size, "--workers", workers)
            return [EpochTime(**times) for times in answer["epochs"]]

        return lambda: take_epochs(path, serve)

    rows = []
    for name in names:
        peer = PEERS[name]
        path = data[peer.reads]
        reads = _JPEGS if peer.reads in FORMATS else _SQUARES
        if peer.whole:
            reads = "photographs, half as JPEG" if name == _PHOTOGRAPHS else "decoded pictures"
        rows.append(_Row(peer.title, reads, path, run_of(name, path)))
    return rows


def stored_gb(path: Path) -> float:
    """Return how much the files below a folder hold, GB."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e9


@click.command()
@click.argument("tree", type=click.Path(path_type=Path))
@click.option(
    "--peer-python", default=sys.executable, help="Python that has the libraries.  [default: this one]"
)
@click.option(
    "--all", "all_rows", is_flag=True, help="Other libraries, squares, limits and photographs, too."
)
@click.option("--photographs", default=3000, show_default=True, help="Photographs that --all makes.")
@click.option("--batch-size", default=128, show_default=True)
@click.option("--workers", default=2, show_default=True, help="Threads or processes of each loader.")
@click.option("--repeats", default=5, show_default=True, help="Turns that the loaders take.")
def command(
    tree: Path,
    peer_python: str,
    all_rows: bool,
    photographs: int,
    batch_size: int,
    workers: int,
    repeats: int,
) -> None:
    """Print images/s of first and later epochs of each loader: the table of README."""
    versions = find_libraries(peer_python, PEERS if all_rows else [_README_PEER])
    squares = partial(Recipe, fit="crop", size=_STORED_SIDE, resample="bilinear")
    with temporary_folder() as folder:
        sources = {"jpegs": (tree, Recipe(format="webdataset")), "whole": (tree, Recipe(format="shards"))}
        if all_rows:
            made = folder / "made"
            make_sample(made, images=photographs, classes=16, seed=0, like="imagenet")
            sources["photographs"] = made, Recipe(format="shards")
            sources["squares"] = tree, squares(format="shards")
            sources["webdataset"] = tree, squares(format="webdataset")
        data = {"tree": tree}
        for name, (source, recipe) in sources.items():
            data[name] = folder / name
            convert(source, data[name], recipe)
        for name in dict.fromkeys(PEERS[name].reads for name in versions):
            if name not in FORMATS:
                source = made if name == _PHOTOGRAPHS else tree
                data[name] = folder / name
                size = 0 if PEERS[name].whole else _STORED_SIDE
                write_pictures(name, scan_tree(source), data[name], size, workers, peer_python)
        others = partial(peer_rows, data=data, batch_size=batch_size, workers=workers, python=peer_python)
        rows = readme_rows(data, batch_size, workers) + others(versions.keys() & {_README_PEER})
        if all_rows:
            rows += further_rows(data, batch_size, workers)
            rows += others([name for name in versions if name != _README_PEER])
        turns = harness.take_turns({row.title: row.run for row in rows}, repeats)
        reads = [f"{row.reads}, {stored_gb(row.path):.2f} GB" for row in rows]
    cells = zip(reads, turns.rows(_COLUMNS), strict=True)
    table = Table(_TITLES, [[title, read, *figures] for read, (title, *figures) in cells])
    further = f", squares of {_STORED_SIDE} pixels, {photographs:,} photographs" if all_rows else ""
    settings = (
        f"{len(scan_tree(tree).samples):,} pictures{further}, served at {_SIZE}; batches of {batch_size}, "
        f"{workers} workers; {', '.join(dict.fromkeys(versions.values()))}"
    )
    harness.show(table, turns, settings, ("torch", "pillow", "simplejpeg", "xxhash"))


if __name__ == "__main__":
    harness.main(command, "peers")

"""What it costs a rank to open a set of a billion samples, and to know its first batch.

    python -m bench.measure.huge FOLDER --samples 1000000000 --shards 600000 --ranks 1024

Makes a converted folder of format `shards` in FOLDER, and one of a hundredth of it beside, so that what
grows shows. Manifest, table of shards and index are those of a real set. Of the index ids and labels are
written, 16 bytes a sample on the disk, and all else is zeros that take none; the shards are not read, and
not there. Each rank has a process of its own. Prints the seconds of `loaders.build`, of the ids and labels
of the first batch and of one in the middle of the epoch; samples/s that are looked up after it; and the most
memory that the process had, beside that before it built the loader.
"""

import json
import os
import platform
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import click
import numpy as np
import numpy.typing as npt

import loaders
from bench.measure.fresh import run_fresh
from precache import Recipe
from precache.console import commandline
from precache.dataset.arrays import checksum_of, parse_header
from precache.dataset.files import FileEntry
from precache.dataset.index import INDEX_NAME, SOURCE_STATE_NAME, RowChecksums
from precache.dataset.shard_table import ShardTable, suffixes_of, write_table
from precache.formats import FORMATS
from precache.manifest import Manifest, write_manifest
from precache.pictures.codecs import made_by
from precache.storage import check_new_folder

CLASSES, SIZE = 1000, 224
_COLUMNS = {
    "checksums": ("U64", 8, ()),
    "ids": ("I64", 8, ()),
    "labels": ("I64", 8, ()),
    "path_ends": ("I64", 8, ()),
    "paths": ("U8", 0, ()),
    "source_checksums": ("U64", 8, ()),
    "source_sizes": ("I32", 8, (2,)),
}
"""Name -> dtype, bytes of a row, and its shape; paths are empty."""
_WAYS = ("full", "window", "none")


@dataclass(frozen=True, slots=True)
class Opened:
    """What one rank measured.

    Attributes:
        build_s: of `loaders.build`.
        first_s, middle_s: of the ids and labels of a batch.
        ids_per_s: of the batches after the one in the middle.
        mib: the most memory that the process had, before it built the loader and in all.
    """

    build_s: float
    first_s: float
    middle_s: float
    ids_per_s: float
    mib: tuple[float, float]


def make(folder: Path, samples: int, shards: int) -> None:
    """Write the set into the new folder `folder`."""
    check_new_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    per_shard = np.full(shards, samples // shards) + (np.arange(shards) < samples % shards)
    index, rows = _write_index(folder / INDEX_NAME, per_shard)
    recipe = Recipe(format="shards", size=SIZE, fit="crop")
    table = ShardTable(
        ("train",),
        suffixes_of(FORMATS[recipe.format]),
        splits=np.zeros(shards, np.int32),
        numbers=np.arange(shards),
        samples=per_shard,
        bytes=(per_shard * SIZE * SIZE * 3 + 8192).reshape(-1, 1),
        crc32c=np.zeros((shards, 1), np.uint32),
        rows=rows,
    )
    each, more = divmod(samples, CLASSES)
    manifest = Manifest(
        recipe=recipe,
        made_by=made_by(),
        source_digest="0" * 64,
        source_bytes=0,
        classes=tuple(f"class {number}" for number in range(CLASSES)),
        samples_per_class={"train": (each + 1,) * more + (each,) * (CLASSES - more)},
        shards=table,
        index=index,
        scanned=samples,
        rejected=(),
        ignored=(),
        source_state=FileEntry(SOURCE_STATE_NAME, 0, "00000000"),
        table=write_table(folder, table),
    )
    write_manifest(folder, manifest)


def _write_index(path: Path, per_shard: npt.NDArray[np.int64]) -> tuple[FileEntry, RowChecksums]:
    samples = int(per_shard.sum())
    header: dict[str, Any] = {}
    places, end = {}, 0
    for name, (dtype, row_bytes, shape) in _COLUMNS.items():
        count = samples if row_bytes else 0
        places[name], end = end, end + count * row_bytes
        header[name] = {"dtype": dtype, "shape": [count, *shape], "data_offsets": [places[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    sums = np.empty((len(per_shard), len(_COLUMNS)), np.uint64)
    stops = np.cumsum(per_shard)
    with open(path, "wb") as file:
        file.write(start)
        file.truncate(len(start) + end)
        for number, (name, (_, row_bytes, _)) in enumerate(_COLUMNS.items()):
            if name in ("ids", "labels"):
                file.seek(len(start) + places[name])
                sums[:, number] = list(_write_column(file, name, stops, per_shard))
            else:  # zeros, which a file has where nothing was written
                of = {n: checksum_of(bytes(n * row_bytes)) for n in np.unique(per_shard).tolist()}
                sums[:, number] = [of[n] for n in per_shard.tolist()]
    entry = FileEntry(path.name, len(start) + end, "00000000")
    return entry, RowChecksums(parse_header(start, entry.bytes).checksum, sums)


def _write_column(
    file: BinaryIO, name: str, stops: npt.NDArray[np.int64], per_shard: npt.NDArray[np.int64]
) -> Iterator[int]:
    """Write ids, or labels, shard by shard; yields the checksum of each."""
    for stop, count in zip(stops.tolist(), per_shard.tolist(), strict=True):
        ids = np.arange(stop - count, stop)
        content = (ids if name == "ids" else ids % CLASSES).data.cast("B")
        file.write(content)
        yield checksum_of(content)


def measure(folder: Path, shuffle: str, rank: int, ranks: int, batch_size: int, batches: int) -> Opened:
    """Open the set as this rank, in this process, of which nothing else may be asked afterwards."""
    before = _most_mib()
    start_s = time.perf_counter()
    loader = loaders.build(
        folder,
        batch_size=batch_size,
        shuffle={"full": "full", "window": "window", "none": False}[shuffle],  # type: ignore[arg-type]
        rank=rank,
        world_size=ranks,
        last="drop",
    )
    build_s = time.perf_counter() - start_s
    with loader:
        first_s = _look_up(loader, [0])
        middle = len(loader) // 2
        middle_s = _look_up(loader, [middle])
        numbers = range(middle + 1, min(middle + 1 + batches, len(loader)))
        ids_per_s = len(numbers) * batch_size / _look_up(loader, numbers) if numbers else 0.0
        return Opened(build_s, first_s, middle_s, ids_per_s, (before, _most_mib()))


def _look_up(loader: Any, numbers: Sequence[int]) -> float:
    """Seconds until ids and labels of the batches of these numbers are known, which are compared."""
    start_s = time.perf_counter()
    shares = loader._order.batches(0)
    for number in numbers:
        positions = shares[number].positions
        ids, labels = loader._data.ids[positions], loader._data.labels[positions]
        if not (np.array_equal(ids, positions) and np.array_equal(labels, ids % CLASSES)):
            raise AssertionError(f"batch {number} has other samples than were written")
    return time.perf_counter() - start_s


def _most_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@click.command(cls=commandline.Command)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--samples", default=1_000_000_000, show_default=True)
@click.option("--shards", default=600_000, show_default=True)
@click.option("--ranks", default=1024, show_default=True)
@click.option("--batch-size", default=64, show_default=True)
@click.option("--batches", default=200, show_default=True, help="That are looked up after the one midway.")
@click.option("--repeats", default=5, show_default=True, help="Ranks, each in a process of its own.")
def huge(
    folder: Path, samples: int, shards: int, ranks: int, batch_size: int, batches: int, repeats: int
) -> None:
    """Make sets in FOLDER, unless they are there, and print what opening them costs."""
    sizes = [(max(1, samples // part), max(1, shards // part)) for part in (100, 1)]
    for size in sizes:
        if not _place(folder, size).exists():
            start_s = time.perf_counter()
            make(_place(folder, size), *size)
            print(f"{size[0]:,} samples in {size[1]:,} shards made in {time.perf_counter() - start_s:.1f} s")
    print(
        f"batch {batch_size}, {repeats} of {ranks} ranks, medians; Python {platform.python_version()}, NumPy "
        f"{np.__version__}, {os.cpu_count()} CPUs, {' '.join(os.uname()[::2])}"
    )
    print(f"{'samples':>13} {'shards':>8} {'shuffle':8}{'build, s':>9}{'first, s':>9}{'middle, s':>10}"
          f"{'samples/s':>12}{'MiB':>6}{'before':>8}")  # fmt: skip
    for size in sizes:
        for way in _WAYS:
            turns = [number * ranks // repeats for number in range(repeats)]
            found = [
                run_fresh(measure, _place(folder, size), way, rank, ranks, batch_size, batches)
                for rank in turns
            ]
            build_s, first_s, middle_s, ids_per_s, mib = zip(*map(astuple, found), strict=True)
            print(
                f"{size[0]:>13,} {size[1]:>8,} {way:8}{median(build_s):>9.2f}{median(first_s):>9.3f}"
                f"{median(middle_s):>10.3f}{median(ids_per_s):>12,.0f}{max(most for _, most in mib):>6.0f}"
                f"{median(before for before, _ in mib):>8.0f}"
            )


def _place(folder: Path, size: tuple[int, int]) -> Path:
    return folder / f"{size[0]}-in-{size[1]}"


if __name__ == "__main__":
    huge()

"""A converted folder of format `shards` with as many samples as asked for, and no shards: they are not read.

Manifest, table of shards and index are those of a real set. Of the index ids and labels are written, 16
bytes a sample on the disk, and all else is zeros that take none.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from precache import Recipe
from precache.dataset.arrays import checksum_of, parse_header
from precache.dataset.files import FileEntry
from precache.dataset.index import INDEX_NAME, SOURCE_STATE_NAME, RowChecksums
from precache.dataset.shard_table import ShardTable, suffixes_of, write_table
from precache.formats import FORMATS
from precache.manifest import Manifest, write_manifest
from precache.pictures.codecs import made_by

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


def make(folder: Path, samples: int, shards: int) -> None:
    """Write the set into the new folder `folder`."""
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

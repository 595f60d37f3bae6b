"""A converted folder of format `shards` with as many samples as asked for, and no shards: they are not read.

Manifest and index are those of a real set. Of the samples' columns ids and labels are written, 16 bytes a
sample on the disk, and all else is zeros that take none.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from precache import Recipe
from precache.dataset.index import SHARD, SOURCE, IndexEntry, checksum_of, index_name
from precache.dataset.manifest import Manifest, write_manifest
from precache.dataset.shard_table import ShardTable, suffixes_of
from precache.formats import FORMATS
from precache.pictures.codecs import made_by

CLASSES, SIZE = 1000, 224
_COLUMNS = {
    "checksums": ("U64", 8, ()),
    "ends:paths": ("I64", 8, ()),
    "ids": ("I64", 8, ()),
    "labels": ("I64", 8, ()),
    "paths": ("U8", 0, ()),
    "source_sizes": ("I32", 8, (2,)),
}
"""Name -> dtype, bytes of a row, and its shape; paths are empty."""


def make(folder: Path, samples: int, shards: int) -> None:
    """Write the set into the new folder `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    per_shard = np.full(shards, samples // shards) + (np.arange(shards) < samples % shards)
    recipe = Recipe(format="shards", size=SIZE, fit="crop")
    table = ShardTable(
        ("train",),
        suffixes_of(FORMATS[recipe.format]),
        splits=np.zeros(shards, np.int32),
        numbers=np.arange(shards),
        samples=per_shard,
        bytes=(per_shard * SIZE * SIZE * 3 + 8192).reshape(-1, 1),
        crc32c=np.zeros((shards, 1), np.uint32),
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
        index=_write_index(folder / index_name(), table),
        scanned=samples,
        rejected=(),
        ignored=(),
    )
    write_manifest(folder, manifest)


def _write_index(path: Path, table: ShardTable) -> IndexEntry:
    per_shard, samples = table.samples, int(table.samples.sum())
    none = np.empty(0, np.int64)
    others: dict[str, npt.NDArray[Any]] = {
        **table.arrays(),
        f"{SHARD}checksums": np.empty((len(table), len(_COLUMNS)), np.uint64),
        **{f"{SOURCE}{name}": none for name in ("bytes", "modified_ns")},
        f"{SOURCE}checksums": none.astype(np.uint64),
    }
    header: dict[str, Any] = {}
    places, end = {}, 0
    for name, (dtype, row_bytes, shape) in _COLUMNS.items():
        count = samples if row_bytes else 0
        places[name], end = end, end + count * row_bytes
        header[name] = {"dtype": dtype, "shape": [count, *shape], "data_offsets": [places[name], end]}
    for name, array in others.items():
        places[name], end = end, end + array.nbytes
        dtype = {"int64": "I64", "uint64": "U64", "int32": "I32", "uint32": "U32"}[str(array.dtype)]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [places[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    sums, stops = others[f"{SHARD}checksums"], np.cumsum(per_shard)
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
        for name, array in others.items():
            file.seek(len(start) + places[name])
            file.write(array.tobytes())
    checksums = {name: f"{checksum_of(array.tobytes()):016x}" for name, array in sorted(others.items())}
    return IndexEntry(path.name, len(start) + end, "00000000", f"{checksum_of(start):016x}", checksums)


def _write_column(
    file: BinaryIO, name: str, stops: npt.NDArray[np.int64], per_shard: npt.NDArray[np.int64]
) -> Iterator[int]:
    """Write ids, or labels, shard by shard; yields the checksum of each."""
    for stop, count in zip(stops.tolist(), per_shard.tolist(), strict=True):
        ids = np.arange(stop - count, stop)
        content = (ids if name == "ids" else ids % CLASSES).data.cast("B")
        file.write(content)
        yield checksum_of(content)

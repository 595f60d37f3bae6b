"""Format `shards`: decoded pixels in safetensors files.

    byte 0      uint64 little-endian: length of the header, always 4,088
    byte 8      the header: JSON, padded with spaces
    byte 4096   images  uint8 [n, size, size, 3], RGB (NHWC: permuted, it is channels-last)
    then        labels  int64 [n], little-endian
    then        ids     int64 [n], little-endian

Pixels start on a page boundary, so that a row can be mapped and read without touching the header.
Any safetensors reader opens these files: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from precache.errors import DatasetError
from precache.formats.sample import Format, Sample, StoredSample
from precache.jpeg import Pixels
from precache.output import OutputFile, write_beside
from precache.recipe import Recipe

SUFFIX = ".safetensors"
DATA_START = 4096
_TENSORS = (("images", "U8", 1), ("labels", "I64", 8), ("ids", "I64", 8))
_REMEDY = "run 'precache verify' on its folder, then 'precache convert --overwrite' to rewrite it"


@dataclass(frozen=True, slots=True)
class ShardArrays:
    """An open shard. `images` is mapped, read-only: its pages are read when they are touched.

    Attributes:
        images: uint8 [n, height, width, 3], RGB.
        labels: int64 [n].
        ids: int64 [n].
    """

    images: Pixels
    labels: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]


def write_shard(base: Path, samples: Iterable[Sample], count: int, recipe: Recipe) -> list[OutputFile]:
    """Write `base` + '.safetensors' beside; pixels stream through, only labels and ids are held."""
    path = base.with_name(base.name + SUFFIX)
    labels: list[int] = []
    ids: list[int] = []
    with write_beside(path) as file:
        file.write(_header(count, recipe.size))
        for sample in samples:
            file.write(np.ascontiguousarray(sample.data).data)
            labels.append(sample.label)
            ids.append(sample.id)
        file.write(np.array(labels, "<i8").tobytes())
        file.write(np.array(ids, "<i8").tobytes())
        if len(ids) < count:
            file.replace_start(_header(len(ids), recipe.size))
    return [file]


def read_shard(path: Path) -> Iterator[StoredSample]:
    """The samples of a shard in stored order; pixels are copies."""
    shard = open_shard(path)
    for row in range(len(shard.ids)):
        yield StoredSample(int(shard.ids[row]), int(shard.labels[row]), shard.images[row].copy())


def open_shard(path: Path) -> ShardArrays:
    """Map the shard at `path`.

    Raises:
        DatasetError: missing, truncated or not such a file; names the path and the bytes.
    """
    try:
        file_bytes = os.path.getsize(path)
        with open(path, "rb") as file:
            header = _read_header(path, file.read(DATA_START))
    except OSError as error:
        raise DatasetError(f"{path}: cannot be opened ({error.strerror}); {_REMEDY}") from error
    shapes = {name: header[name]["shape"] for name, _, _ in _TENSORS}
    expected_bytes = DATA_START + sum(math.prod(shapes[name]) * width for name, _, width in _TENSORS)
    if file_bytes != expected_bytes:
        raise DatasetError(
            f"{path}: expected {expected_bytes:,} bytes, got {file_bytes:,} (truncated?); {_REMEDY}"
        )
    if shapes["images"][0] == 0:
        return ShardArrays(np.empty(shapes["images"], np.uint8), np.empty(0, np.int64), np.empty(0, np.int64))
    mapped = np.memmap(path, np.uint8, "r")
    count = shapes["images"][0]
    labels_start = DATA_START + math.prod(shapes["images"])
    tail = mapped[labels_start:].tobytes()  # a copy: int64 in the file need not be aligned
    labels, ids = np.frombuffer(tail, "<i8").reshape(2, count).astype(np.int64)
    return ShardArrays(mapped[DATA_START:labels_start].reshape(shapes["images"]), labels, ids)


def _header(count: int, size: int) -> bytes:
    shapes = {"images": [count, size, size, 3], "labels": [count], "ids": [count]}
    header: dict[str, Any] = {}
    start = 0
    for name, dtype, width in _TENSORS:
        stop = start + math.prod(shapes[name]) * width
        header[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [start, stop]}
        start = stop
    body = json.dumps(header, separators=(",", ":")).encode().ljust(DATA_START - 8)
    return struct.pack("<Q", len(body)) + body


def _read_header(path: Path, start: bytes) -> dict[str, Any]:
    """Parse and check the first DATA_START bytes of a shard."""
    try:
        (length,) = struct.unpack_from("<Q", start)
        header: dict[str, Any] = json.loads(start[8 : 8 + length])
        layout_ok = length == DATA_START - 8 and all(
            header[name]["dtype"] == dtype for name, dtype, _ in _TENSORS
        )
        count, _, _, channels = header["images"]["shape"]
        layout_ok = layout_ok and channels == 3 and header["labels"]["shape"] == [count]
    except (struct.error, ValueError, KeyError, TypeError):
        layout_ok = False
    if not layout_ok:
        raise DatasetError(f"{path}: not a shard of this format (its header is damaged); {_REMEDY}")
    return header


FORMAT = Format(SUFFIX, None, write_shard, read_shard)

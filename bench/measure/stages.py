"""The stages of a loader that decodes here, each timed alone on some of its pictures."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure.settings import Settings
from loaders.augment.cpu import place
from loaders.augment.draw import shown_boxes
from loaders.backends import decoding
from loaders.dataset import RAW, SplitData
from loaders.settings import CROP_RATIO
from precache.engines import available_cpus
from precache.formats import FORMATS, StoredSample
from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import Size, sides

PICTURES = 200
DECODING = ("pytorch", "webdataset")
"""Backends whose reader and decoder are this project's, so that they can be run apart."""


def probe_files(data: SplitData) -> tuple[str, ...]:
    """What `time_stages` reads of it: some pictures of a raw tree, else the shards."""
    if data.kind != RAW:
        return tuple(data.files)
    rows = np.unique(np.linspace(0, len(data.files) - 1, PICTURES).round().astype(int))
    return tuple(data.files[row] for row in rows.tolist())


def time_stages(spec: Settings, kind: str, files: Sequence[str]) -> dict[str, float]:
    """Images/s of "read" and "decode", each alone, by as many threads as the loader has workers.

    "read" gives a picture's bytes, "decode" its pixels.

    Args:
        kind: of the data, see `loaders.dataset.SplitData`.
        files: see `probe_files`.
    """
    with spec.around():
        workers = max(1, spec.workers or available_cpus())
        with ThreadPoolExecutor(workers) as pool:
            if kind == RAW:
                read, encoded = _timed(pool, workers, decoding.read, files)
                decode, _ = _timed(pool, workers, partial(_serve, spec.size), encoded)
            else:
                read, samples = _read_shards(kind, files)
                decode, _ = _timed(pool, workers, lambda sample: sample[0].pixels(sample[1]), samples)
        return {"read": read, "decode": decode}


def _serve(size: Size, picture: decoding.Encoded) -> Pixels:
    pixels, out = picture.decode(), np.empty((*sides(size), 3), np.uint8)
    (box,) = shown_boxes(np.array([picture.shape]), size, CROP_RATIO).tolist()
    place(pixels, box, False, out)
    return out


def _read_shards(kind: str, files: Sequence[str]) -> tuple[float, list[tuple[StoredSample, str]]]:
    """One after the other, as a loader reads them."""
    samples: list[tuple[StoredSample, str]] = []
    start_s = time.perf_counter()
    for file in files:
        samples += [(sample, file) for sample in FORMATS[kind].read_shard(Path(file))]
        if len(samples) >= PICTURES:
            break
    read = len(samples) / (time.perf_counter() - start_s)
    return read, samples[:PICTURES]


def _timed(
    pool: ThreadPoolExecutor, workers: int, work: Callable[[Any], Any], items: Sequence[Any]
) -> tuple[float, list[Any]]:
    """Items per second of all threads together, and the results, in another order: one share per thread."""
    start_s = time.perf_counter()
    shares = list(pool.map(lambda first: [work(item) for item in items[first::workers]], range(workers)))
    return len(items) / (time.perf_counter() - start_s), [result for share in shares for result in share]

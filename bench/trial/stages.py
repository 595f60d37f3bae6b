"""The stages of a loader that decodes here, each timed alone on some of its pictures."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.trial.run import TrialSpec
from loaders.backends import decoding
from loaders.dataset import RAW, SplitData, open_split
from precache import images
from precache.formats import FORMATS, StoredSample

PICTURES = 200
DECODING = ("pytorch", "webdataset")
"""Backends whose reader and decoder are this project's, so that they can be run apart."""


def time_stages(spec: TrialSpec) -> dict[str, float]:
    """Images/s of "read", "decode" and "copy", each alone, by as many threads as the loader has workers.

    "read" gives a picture's bytes, "decode" its pixels, "copy" puts these into a batch.
    """
    with spec.around():
        data = open_split(spec.path, "train")
        workers = max(1, spec.workers)
        with ThreadPoolExecutor(workers) as pool:
            if data.kind == RAW:
                rows = np.unique(np.linspace(0, len(data.files) - 1, PICTURES).round().astype(int))
                files = [data.files[row] for row in rows.tolist()]
                read, encoded = _timed(pool, workers, lambda file: (images.read_bytes(file), file), files)
                decode, pixels = _timed(
                    pool, workers, lambda pair: decoding.render(pair[0], pair[1], spec.size), encoded
                )
            else:
                read, samples = _read_shards(data)
                decode, pixels = _timed(pool, workers, lambda sample: sample[0].pixels(sample[1]), samples)
            copy, _ = _timed(pool, workers, np.copy, pixels)
        return {"read": read, "decode": decode, "copy": copy}


def _read_shards(data: SplitData) -> tuple[float, list[tuple[StoredSample, str]]]:
    """One after the other, as a loader reads them."""
    samples: list[tuple[StoredSample, str]] = []
    start_s = time.perf_counter()
    for file in data.files:
        samples += [(sample, file) for sample in FORMATS[data.kind].read_shard(Path(file))]
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

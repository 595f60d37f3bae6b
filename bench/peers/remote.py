"""Loaders of other libraries that read from an object storage, an empty cache at first, for so many epochs.

    PYTHON remote.py litdata s3://bucket/litdata CACHE --batch-size 64 --workers 2 --epochs 2

Run in another virtual environment: imports nothing of ours. The environment says where the storage is
(AWS_ENDPOINT_URL) and with which credentials. Prints one line of JSON: `epochs`, [images, seconds] of each,
the first one with opening the dataset.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any


def _crop(pixels: Any, size: int) -> Any:
    offset = (pixels.shape[0] - size) // 2
    return pixels[offset : offset + size, offset : offset + size]


def litdata(url: str, cache: str, batch_size: int, workers: int, size: int) -> Callable[[], Iterable[Any]]:
    """Chunks of raw pixels [size, size, 3]."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # the storage on loopback has no certificate

    class Pictures(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[Any, Any]:
            sample = super().__getitem__(index)
            return _crop(sample["image"], size), sample["label"]

    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    dataset = Pictures(url, cache_dir=cache, shuffle=True, drop_last=False, storage_options=options)
    loader = StreamingDataLoader(
        dataset, batch_size=batch_size, num_workers=workers, persistent_workers=workers > 0
    )
    return lambda: loader


def mds(url: str, cache: str, batch_size: int, workers: int, size: int) -> Callable[[], Iterable[Any]]:
    """Shards of raw pixels."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    class Pictures(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[Any, Any]:
            sample = super().__getitem__(index)
            return _crop(sample["image"], size), sample["label"]

    os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
    clean_stale_shared_memory()
    dataset = Pictures(remote=url, local=cache, shuffle=True, batch_size=batch_size)
    loader: Any = DataLoader(dataset, batch_size, num_workers=workers, persistent_workers=workers > 0)
    return lambda: loader


PEERS = {"litdata": (litdata, "litdata"), "mds": (mds, "mosaicml-streaming")}


def main() -> None:
    """Measure the loader that is named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("url")
    parser.add_argument("cache")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    open_loader, package = PEERS[options.name]
    epochs = []
    start_s = time.perf_counter()
    start_epoch = open_loader(options.url, options.cache, options.batch_size, options.workers, options.size)
    for _ in range(options.epochs):
        images = sum(len(batch[1]) for batch in start_epoch())
        epochs.append([images, time.perf_counter() - start_s])
        start_s = time.perf_counter()
    print(
        "\n" + json.dumps({"version": f"{package} {metadata.version(package)}", "epochs": epochs}), flush=True
    )


if __name__ == "__main__":
    main()

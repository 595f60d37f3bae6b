"""Backend `webdataset`: tars read sequentially by the webdataset library, JPEGs decoded by threads."""

import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from loaders.batch import DecodedBatch, LoaderSpec, Positions
from loaders.dataset import SplitData
from loaders.encoded import read_batches
from precache.errors import DatasetError, ImageError, MissingDependencyError
from precache.formats import StoredSample
from precache.jpeg import Pixels


def open_reader(spec: LoaderSpec, data: SplitData, size: int) -> "WebdatasetReader":
    """A reader over `data`, a folder of format `webdataset`."""
    try:
        import webdataset  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "backend 'webdataset' needs the package webdataset; install it with 'pip install webdataset'"
        ) from error
    return WebdatasetReader(data, size, max(1, spec.workers), check=spec.check == "first-read")


class WebdatasetReader:
    """Decodes in `threads` threads; the JPEG decoder releases the interpreter lock."""

    random_access = False

    def __init__(self, data: SplitData, size: int, threads: int, *, check: bool) -> None:
        self._data = data
        self._check = check
        self._size = size
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    def read(self, batches: Iterator[Positions]) -> Iterator[DecodedBatch]:
        """Yield one decoded batch per array of positions."""
        for samples in read_batches(self._data, batches, read_tar, check=self._check):
            out = torch.empty((len(samples), self._size, self._size, 3), dtype=torch.uint8)
            errors = list(self._pool.map(self._decode, samples, out.numpy()))
            kept = torch.tensor([error is None for error in errors])
            yield DecodedBatch(
                out if kept.all() else out[kept],
                torch.tensor([sample.label for sample, _ in samples])[kept],
                torch.tensor([sample.id for sample, _ in samples])[kept],
                {s.id: error for (s, _), error in zip(samples, errors, strict=True) if error is not None},
            )

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _decode(self, stored: tuple[StoredSample, str], out: Pixels) -> ImageError | None:
        """Decode into `out`; what is wrong if that cannot be."""
        sample, shard = stored
        crop = self._data.centre_crop(self._size)
        try:
            np.copyto(out, sample.pixels(shard)[crop, crop])
        except ImageError as error:
            return error
        return None


def read_tar(path: str) -> list[StoredSample]:
    """All samples of a tar, in stored order, as the webdataset library groups its files."""
    from webdataset.tariterators import group_by_keys, tar_file_expander

    try:
        with open(path, "rb") as stream:
            grouped = group_by_keys(tar_file_expander([{"url": path, "stream": stream}]))
            return [StoredSample(int(s["__key__"]), int(s["cls"]), s["jpg"]) for s in grouped]
    except (OSError, tarfile.TarError, ValueError, KeyError) as error:
        raise DatasetError(
            f"{path}: cannot be read as a tar of samples ({error}); run 'precache verify' on its folder"
        ) from error

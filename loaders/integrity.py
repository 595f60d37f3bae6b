"""Whether shards hold what the manifest and the index say, found out when they are first touched."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loaders.dataset import SplitData
from loaders.threads import Pool
from precache.errors import DatasetError
from precache.storage import crc32c_file


def check_shard(data: SplitData, index: int) -> None:
    """Read shard `index` of the split whole.

    Raises:
        DatasetError: it cannot be read, or its bytes are not those that the conversion wrote.
    """
    path = Path(data.files[index])
    try:
        found = crc32c_file(path)
    except OSError as error:
        raise DatasetError(
            f"{path}: cannot be read ({error.strerror}); run 'precache verify {data.path}'"
        ) from error
    if found != data.checksums[index]:
        raise DatasetError(
            f"{path}: its checksum is not the manifest's (the bytes changed); "
            f"run 'precache verify {data.path}'"
        )


def check_index(
    data: SplitData,
    index: int,
    ids: Sequence[int] | npt.NDArray[np.int64],
    labels: Sequence[int] | npt.NDArray[np.int64],
) -> None:
    """Compare what shard `index` says of itself with the dataset's index.

    Raises:
        DatasetError: they differ.
    """
    start = sum(data.shard_samples[:index])
    rows = slice(start, start + data.shard_samples[index])
    if not (np.array_equal(ids, data.ids[rows]) and np.array_equal(labels, data.labels[rows])):
        raise DatasetError(
            f"{data.files[index]}: holds other samples than the dataset's index says; "
            f"run 'precache verify {data.path}'"
        )


class BackgroundCheck:
    """Checks shards in a thread of its own, each once.

    For random access: the first batch touches every shard, and should not wait for all to be read.
    """

    def __init__(self, data: SplitData) -> None:
        self._data = data
        self._pool = Pool(1, "check")
        self._running: list[Future[None]] = []

    def start(self, index: int) -> None:
        """Check shard `index`, after those that wait already."""
        self._running.append(self._pool.submit(check_shard, self._data, index))

    def raise_failure(self) -> None:
        """Raise the DatasetError of a shard that is done and damaged, if there is one."""
        while self._running and self._running[0].done():
            self._running.pop(0).result()

    def close(self) -> None:
        """End the thread."""
        self._pool.close()

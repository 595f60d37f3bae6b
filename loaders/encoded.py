"""Sequential reading of shards that hold JPEGs: each is read whole, and ahead of its first use."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from loaders.batch import Positions
from loaders.dataset import SplitData
from loaders.integrity import check_shard
from loaders.order import WINDOW_SHARDS
from precache.errors import DatasetError
from precache.formats import StoredSample

ReadShard = Callable[[str], list[StoredSample]]


def read_batches(
    data: SplitData, batches: Iterator[Positions], read_shard: ReadShard, *, check: bool
) -> Iterator[list[tuple[StoredSample, str]]]:
    """Yield the stored samples of each batch of positions, in order, each with its shard's path.

    Looks ahead by as many samples as a window of shards holds: the shards of those samples are in
    memory, or being read by a thread; no others are. In the order of `window_order` each shard is
    then read once an epoch, and memory is bounded by two windows. `check` compares each shard's
    checksum the first time.

    Raises:
        DatasetError: a shard is missing, damaged, or holds other samples than the index says.
    """
    starts = np.concatenate(([0], np.cumsum(data.shard_samples)))
    horizon = sum(sorted(data.shard_samples)[-WINDOW_SHARDS:])
    pending: deque[tuple[list[int], list[int]]] = deque()  # positions and their shards, per batch
    wanted: Counter[int] = Counter()  # shard -> its samples in `pending`
    shards: dict[int, Future[list[StoredSample]]] = {}
    checked: set[int] = set() if check else set(range(len(data.files)))
    pool = ThreadPoolExecutor(1, thread_name_prefix="read-shard")
    try:
        while True:
            while wanted.total() < horizon and (positions := next(batches, None)) is not None:
                indexes = (np.searchsorted(starts, positions, side="right") - 1).tolist()
                pending.append((positions.tolist(), indexes))
                wanted.update(indexes)
                for index in dict.fromkeys(indexes):
                    if index not in shards:
                        first = index not in checked
                        checked.add(index)
                        shards[index] = pool.submit(_read_shard, data, index, starts, read_shard, first)
            if not pending:
                return
            taken, indexes = pending.popleft()
            yield [
                (shards[index].result()[position - starts[index]], data.files[index])
                for position, index in zip(taken, indexes, strict=True)
            ]
            wanted.subtract(indexes)
            for index in set(indexes):
                if wanted[index] == 0:
                    del wanted[index], shards[index]
    finally:
        pool.shutdown(cancel_futures=True)


def _read_shard(
    data: SplitData, index: int, starts: Positions, read_shard: ReadShard, check: bool
) -> list[StoredSample]:
    if check:
        check_shard(data, index)
    samples = read_shard(data.files[index])
    rows = slice(starts[index], starts[index + 1])
    expected = zip(data.ids[rows].tolist(), data.labels[rows].tolist(), strict=True)
    if [(sample.id, sample.label) for sample in samples] != list(expected):
        raise DatasetError(
            f"{data.files[index]}: holds other samples than the dataset's index says; "
            f"run 'precache verify {data.path}'"
        )
    return samples

"""Sequential reading of shards that hold JPEGs: each is read whole, once, and the next one ahead."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from loaders.batch import Positions
from loaders.dataset import SplitData
from loaders.order import WINDOW_SHARDS
from precache.errors import DatasetError
from precache.formats import StoredSample

ReadShard = Callable[[str], list[StoredSample]]


def read_batches(
    data: SplitData, batches: Sequence[Positions], read_shard: ReadShard
) -> Iterator[list[StoredSample]]:
    """Yield the stored samples of each batch of positions, in order.

    A shard is in memory from the first sample that is wanted of it to the last; as many as a window
    has are read ahead, in a thread. With `window_order` memory is bounded to two windows.

    Raises:
        DatasetError: a shard is missing, damaged, or holds other samples than the index says.
    """
    starts = np.concatenate(([0], np.cumsum(data.shard_samples)))
    shards = [np.searchsorted(starts, positions, side="right") - 1 for positions in batches]
    wanted = Counter(np.concatenate(shards).tolist()) if shards else Counter[int]()
    upcoming = iter(wanted)  # in order of first use, as a Counter keeps it
    ahead: deque[Future[list[StoredSample]]] = deque()
    held: dict[int, list[StoredSample]] = {}
    with ThreadPoolExecutor(1, thread_name_prefix="read-shard") as pool:

        def read_next() -> None:
            index = next(upcoming, None)
            if index is not None:
                ahead.append(pool.submit(_read_checked, data, index, starts, read_shard))

        for _ in range(WINDOW_SHARDS):
            read_next()
        for positions, batch_shards in zip(batches, shards, strict=True):
            samples = []
            for position, index in zip(positions.tolist(), batch_shards.tolist(), strict=True):
                if index not in held:
                    held[index] = ahead.popleft().result()  # shards are read in order of first use
                    read_next()
                samples.append(held[index][position - starts[index]])
                wanted[index] -= 1
                if wanted[index] == 0:
                    del held[index]
            yield samples


def _read_checked(
    data: SplitData, index: int, starts: Positions, read_shard: ReadShard
) -> list[StoredSample]:
    samples = read_shard(data.files[index])
    ids = [sample.id for sample in samples]
    if ids != data.ids[starts[index] : starts[index + 1]].tolist():
        raise DatasetError(
            f"{data.files[index]}: holds other samples than the dataset's index says; "
            f"run 'precache verify {data.path}'"
        )
    return samples

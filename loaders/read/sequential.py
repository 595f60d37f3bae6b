"""Reading whole shards one after the other, and fetching those at a URL, ahead of their first use."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import numpy as np

from loaders.batch import Request
from loaders.dataset import RemoteShards, SplitData
from loaders.threads import Pool, stop_check

T = TypeVar("T")
_AT_A_TIME = 4  # shards that are fetched, each in several parts


def look_ahead(
    data: SplitData,
    requests: Iterator[Request],
    window_shards: int,
    open_shard: Callable[[int], T],
    close_shard: Callable[[T], None],
    at_end: ExitStack,
    *,
    kept: int = 0,
    most_samples: int = 0,
) -> Iterator[tuple[Request, dict[int, T]]]:
    """Yield each request with the shards of the split, by number, that its samples lie in.

    Looks ahead by as many samples as `window_shards` shards hold, but not over more than two windows of
    shards, of which a rank among others takes a part each: the shards of those samples are open, or being
    opened by a thread; no others are. In the order of windows each shard is then opened once an epoch, and
    at most two windows of them are open. The shards of a request stay open
    until the second one after it is asked for: see `loaders.read.filler`. `at_end` closes those that
    are left, not this iterator: when it ends or fails, the requests before may still be read.

    Args:
        kept: of a full shuffle: nothing is opened ahead, and shards stay open until there are so many.
        most_samples: by which shards at a URL are fetched ahead then.
    """
    remote = data.remote
    horizon = 0 if kept else int(np.sort(data.shard_samples)[-window_shards:].sum())
    most_shards = kept
    if remote is not None and not kept:
        most_shards = remote.max_shards_ahead(window_shards, int(data.shard_bytes.max()))
    fetching = FetchAhead(data, most_shards, horizon or most_samples)
    requests = fetching.requests(requests)
    pending: deque[tuple[Request, list[int]]] = deque()  # with the shard of each sample
    wanted: Counter[int] = Counter()  # shard -> its samples in `pending`
    coming: dict[int, Future[T]] = {}
    opened: dict[int, T] = {}  # the one that was used last is last
    previous: list[int] = []  # shards of the request before
    pool = Pool(1, "read-shard")

    def open_next(index: int) -> T:
        with fetching.fetched(index):
            return open_shard(index)

    def close() -> None:
        fetching.close()
        pool.close()
        for future in coming.values():
            if not future.cancelled() and future.exception() is None:
                close_shard(future.result())
        for shard in opened.values():
            close_shard(shard)

    at_end.callback(close)
    while True:
        while (not pending or (wanted.total() < horizon and len(wanted) < 2 * window_shards)) and (
            request := next(requests, None)
        ) is not None:
            indexes = data.locate(request.positions)[0].tolist()
            pending.append((request, indexes))
            wanted.update(indexes)
            for index in dict.fromkeys(indexes):
                if index not in opened and index not in coming:
                    coming[index] = pool.submit(open_next, index)
        if not pending:
            return
        request, indexes = pending.popleft()
        for index in set(indexes):
            opened[index] = opened.pop(index) if index in opened else coming.pop(index).result()
        yield request, opened
        wanted.subtract(previous)
        previous = indexes
        if len(opened) > kept:
            for index in [index for index in opened if not wanted[index]][: len(opened) - kept]:
                close_shard(opened.pop(index))
                del wanted[index]
                fetching.closed(index)


class FetchAhead:
    """Fetches the shards of requests in the order in which they will be needed, where they are at a URL.

    Several at a time, and long before the shards are opened: what is fetched stays in the cache until then.

    Args:
        most_shards: that are fetched and not yet opened.
        most_samples: to look ahead; requests may have no end.
    """

    def __init__(self, data: SplitData, most_shards: int, most_samples: int) -> None:
        self._data = data
        self._most_shards, self._most_samples = most_shards, most_samples
        self._pool = Pool(min(_AT_A_TIME, max(1, most_shards)), "fetch-shard")
        self._check = stop_check()
        self._coming: dict[int, Future[ExitStack]] = {}
        self._asked: set[int] = set()  # until they are closed

    def requests(self, requests: Iterator[Request]) -> Iterator[Request]:
        """The same requests; the shards of later ones come meanwhile."""
        if self._data.remote is None:
            yield from requests
            return
        waiting: deque[Request] = deque()
        samples = 0
        while True:
            # of what comes behind an empty request nothing is known yet: see `ray_reader`
            while not waiting or (
                len(self._coming) < self._most_shards
                and samples < self._most_samples
                and len(waiting[-1].positions)
            ):
                if (request := next(requests, None)) is None:
                    break
                waiting.append(request)
                samples += len(request.positions)
                for number in dict.fromkeys(self._data.locate(request.positions)[0].tolist()):
                    if number not in self._asked:
                        self._asked.add(number)
                        self._coming[number] = self._pool.submit(self._fetch, self._data.remote, number)
            if not waiting:
                return
            samples -= len(waiting[0].positions)
            yield waiting.popleft()

    @contextmanager
    def fetched(self, number: int) -> Iterator[None]:
        """Wait for shard `number`, which stays in the cache until the end of the block.

        Raises:
            StorageError: it cannot be fetched.
        """
        coming = self._coming.pop(number, None)
        if coming is not None:
            with coming.result():
                yield
        elif self._data.remote is not None:
            with self._data.local_shard(number):
                yield
        else:
            yield

    def _fetch(self, remote: RemoteShards, number: int) -> ExitStack:
        own = stop_check()

        def check() -> None:
            own()
            self._check()  # the one that waits for this has been asked to end: it cannot say so itself

        return remote.hold(number, check=check)

    def closed(self, number: int) -> None:
        """Note that shard `number` is not open any more; who asks for it again has it fetched again."""
        self._asked.discard(number)

    def close(self) -> None:
        """End the threads."""
        self._pool.close()
        while self._coming:
            coming = self._coming.popitem()[1]
            if not coming.cancelled() and coming.exception() is None:
                coming.result().close()

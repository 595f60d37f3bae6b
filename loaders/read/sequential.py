"""Open whole shards in the order of need, and fetch those at a URL before they are opened."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import numpy as np

from loaders.batch import Request
from loaders.dataset import SplitData
from loaders.threads import Pool, stop_check

T = TypeVar("T")
_CONCURRENT_FETCHES = 4  # shards; each is fetched in several parts


def open_shards_ahead(
    data: SplitData,
    requests: Iterator[Request],
    window_shards: int,
    open_shard: Callable[[int], T],
    close_shard: Callable[[T], None],
    exit_stack: ExitStack,
    *,
    max_open: int = 0,
    max_samples: int = 0,
) -> Iterator[tuple[Request, dict[int, T]]]:
    """Yield each request with the open shards, by number, that hold its samples.

    A thread opens the shards of later requests meanwhile: as far ahead as `window_shards` shards hold
    samples, and at most two windows of shards (a rank takes only some samples of each shard, so those samples
    may lie in more shards). Read in the order of windows, each shard is opened once an epoch, and at most two
    windows of shards are open.

    A request's shards stay open until the second request after it is asked for: `filler.BatchFiller` still
    reads from them. Shards that are open in the end are closed by `exit_stack` and not by this iterator,
    because the requests before its end may still be read.

    Args:
        max_open: for a full shuffle: open nothing ahead, and keep up to so many shards open. 0: by windows.
        max_samples: for a full shuffle: how many samples ahead shards at a URL are fetched.
    """
    horizon = 0 if max_open else int(np.sort(data.shard_samples)[-window_shards:].sum())
    max_fetched = max_open
    if data.download_cache is not None and not max_open:
        max_fetched = data.max_shards_ahead(window_shards)
    fetcher = ShardFetcher(data, max_fetched, horizon or max_samples)
    requests = fetcher.fetch_ahead(requests)
    pending: deque[tuple[Request, list[int]]] = deque()  # with the shard of each sample
    wanted: Counter[int] = Counter()  # shard -> its samples in `pending`
    opening: dict[int, Future[T]] = {}
    opened: dict[int, T] = {}  # the least recently used first
    previous: list[int] = []  # shards of the previous request
    pool = Pool(1, "read-shard")

    def fetch_and_open(number: int) -> T:
        with fetcher.hold(number):
            return open_shard(number)

    def close() -> None:
        fetcher.close()
        pool.close()
        for future in opening.values():
            if not future.cancelled() and future.exception() is None:
                close_shard(future.result())
        for shard in opened.values():
            close_shard(shard)

    exit_stack.callback(close)
    while True:
        while not pending or (wanted.total() < horizon and len(wanted) < 2 * window_shards):
            if (request := next(requests, None)) is None:
                break
            numbers = data.locate(request.positions)[0].tolist()
            pending.append((request, numbers))
            wanted.update(numbers)
            for number in dict.fromkeys(numbers):
                if number not in opened and number not in opening:
                    opening[number] = pool.submit(fetch_and_open, number)
        if not pending:
            return
        request, numbers = pending.popleft()
        for number in set(numbers):
            if number in opened:
                opened[number] = opened.pop(number)  # now the most recently used
            else:
                opened[number] = opening.pop(number).result()
        yield request, opened
        wanted.subtract(previous)
        previous = numbers
        if len(opened) > max_open:
            unwanted = [number for number in opened if not wanted[number]]
            for number in unwanted[: len(opened) - max_open]:
                close_shard(opened.pop(number))
                del wanted[number]
                fetcher.forget(number)


class ShardFetcher:
    """Fetches shards at a URL in the order in which requests will need them; does nothing for local shards.

    Several are fetched at a time, long before they are opened: a fetched shard stays in the cache until then.

    Args:
        max_shards: shards that are fetched and not opened yet.
        max_samples: how far to look ahead; requests may have no end.
    """

    def __init__(self, data: SplitData, max_shards: int, max_samples: int) -> None:
        self._data = data
        self._max_shards, self._max_samples = max_shards, max_samples
        self._pool = Pool(min(_CONCURRENT_FETCHES, max(1, max_shards)), "fetch-shard")
        self._check = stop_check()
        self._fetching: dict[int, Future[ExitStack]] = {}
        self._requested: set[int] = set()  # shards that have not been closed since

    def fetch_ahead(self, requests: Iterator[Request]) -> Iterator[Request]:
        """Yield the same requests while threads fetch the shards of later ones."""
        if self._data.download_cache is None:
            yield from requests
            return
        waiting: deque[Request] = deque()
        samples = 0  # in `waiting`
        while True:
            # Never past an empty request: what follows it is not known yet (see `ray_reader.decode`).
            while not waiting or (
                len(self._fetching) < self._max_shards
                and samples < self._max_samples
                and len(waiting[-1].positions)
            ):
                if (request := next(requests, None)) is None:
                    break
                waiting.append(request)
                samples += len(request.positions)
                for number in dict.fromkeys(self._data.locate(request.positions)[0].tolist()):
                    if number not in self._requested:
                        self._requested.add(number)
                        self._fetching[number] = self._pool.submit(self._fetch, number)
            if not waiting:
                return
            samples -= len(waiting[0].positions)
            yield waiting.popleft()

    @contextmanager
    def hold(self, number: int) -> Iterator[None]:
        """Wait for shard `number`, which then stays in the cache until the end of the block.

        Raises:
            StorageError: it cannot be fetched.
        """
        fetched = self._fetching.pop(number, None)
        with self._data.hold(number) if fetched is None else fetched.result():
            yield

    def _fetch(self, number: int) -> ExitStack:
        check_this_thread = stop_check()

        def check() -> None:
            check_this_thread()
            # The thread that made this object waits for the shard: asked to stop, it cannot tell this one.
            self._check()

        return self._data.hold(number, check=check)

    def forget(self, number: int) -> None:
        """Fetch shard `number` again when it is requested again; called when it has been closed."""
        self._requested.discard(number)

    def close(self) -> None:
        """End the threads, and release the shards that nobody has opened."""
        self._pool.close()
        while self._fetching:
            fetched = self._fetching.popitem()[1]
            if not fetched.cancelled() and fetched.exception() is None:
                fetched.result().close()

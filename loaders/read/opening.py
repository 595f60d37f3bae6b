"""Open the shards of later requests, and bring their bytes near: all that disk and network do ahead."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from loaders.batch import Request
from loaders.dataset import SplitData
from loaders.read.blocks import BlockReader
from loaders.threads import Pool, stop_check

T = TypeVar("T")
_CONCURRENT_FETCHES = 4  # shards; each is fetched in several parts


@dataclass(frozen=True, slots=True)
class _Located:
    """A request whose shards are open or being opened.

    Attributes:
        numbers, rows: number of the shard, and row in it, of each sample.
        shards: the numbers of its shards, each once.
    """

    request: Request
    numbers: list[int]
    rows: list[int]
    shards: list[int]


class OpenShards(Generic[T]):
    """The open shards of a split: those of requests that were yielded, and of some after them.

    A thread opens the shards of later requests: as far ahead as `window_shards` shards hold samples, and at
    most two windows of shards (a rank takes only some samples of each shard, so those samples may lie in more
    shards). Read in the order of windows, each shard is opened once an epoch, and at most two windows of
    shards are open.

    Args:
        max_open: for a full shuffle: open nothing ahead, and keep up to so many shards open. 0: by windows.
        max_samples: for a full shuffle: how many samples ahead shards at a URL are fetched.
        near: reads blocks of local shards ahead of the opening, if any does.
    """

    def __init__(
        self,
        data: SplitData,
        window_shards: int,
        open_shard: Callable[[int], T],
        close_shard: Callable[[T], None],
        *,
        max_open: int = 0,
        max_samples: int = 0,
        near: BlockReader | None = None,
    ) -> None:
        self._data = data
        self._open_shard, self._close_shard = open_shard, close_shard
        self._max_open, self._max_wanted = max_open, 2 * window_shards
        self._max_samples = 0 if max_open else int(np.sort(data.shard_samples)[-window_shards:].sum())
        self._near: BlockReader | ShardFetcher | None = near
        self._fetcher: ShardFetcher | None = None
        if data.download_cache is not None:
            max_fetched = max_open or data.max_shards_ahead(window_shards)
            self._near = self._fetcher = ShardFetcher(data, max_fetched, self._max_samples or max_samples)
        self._waiting: deque[Request] = deque()  # taken, but their shards are not being opened yet
        self._pending: deque[_Located] = deque()
        # Shard that is open or being opened -> how many requests need it that were not yielded, or just now.
        self._wanted: dict[int, int] = {}
        self._samples = 0  # of these requests
        self._opening: dict[int, Future[T]] = {}
        self._opened: dict[int, T] = {}  # the least recently used first
        self._pool = Pool(1, "read-shard")

    def read(self, requests: Iterator[Request]) -> Iterator[tuple[Request, list[tuple[T, int]]]]:
        """Yield each request with the open shard of each sample, and the sample's row in it.

        A request's shards stay open until the second request after it is asked for: `filler.BatchFiller`
        still reads from them.
        """
        previous: _Located | None = None
        while self._look_ahead(requests):
            located = self._pending.popleft()
            for number in located.shards:
                if number in self._opened:
                    self._opened[number] = self._opened.pop(number)  # now the most recently used
                else:
                    self._opened[number] = self._opening.pop(number).result()
            shards = map(self._opened.__getitem__, located.numbers)
            yield located.request, list(zip(shards, located.rows, strict=True))
            if previous is not None:
                self._release(previous)
            previous = located

    def close(self) -> None:
        """End the threads, and close all shards; whoever reads from them must have ended."""
        if self._fetcher is not None:
            self._fetcher.close()
        self._pool.close()
        for future in self._opening.values():
            if not future.cancelled() and future.exception() is None:
                self._close_shard(future.result())
        for shard in self._opened.values():
            self._close_shard(shard)

    def _look_ahead(self, requests: Iterator[Request]) -> bool:
        """Open the shards of requests as far ahead as there is room; False if no request is left."""
        while not self._pending or (
            self._samples < self._max_samples and len(self._wanted) < self._max_wanted
        ):
            self._take(requests)
            if not self._waiting:
                break
            self._open(self._waiting.popleft())
        return bool(self._pending)

    def _take(self, requests: Iterator[Request]) -> None:
        """Take the next request, if none waits, and those whose bytes are to be brought near meanwhile."""
        near, waiting = self._near, self._waiting
        # Never past an empty request: what follows it is not known yet (see `ray_reader.decode`).
        while not waiting or (near is not None and len(waiting[-1].positions) and near.has_room(waiting)):
            if (request := next(requests, None)) is None:
                return
            if near is not None:
                near.bring(request)
            waiting.append(request)

    def _open(self, request: Request) -> None:
        """Begin to open the shards of a request."""
        numbers, rows = (array.tolist() for array in self._data.locate(request.positions))
        located = _Located(request, numbers, rows, list(dict.fromkeys(numbers)))
        self._pending.append(located)
        self._samples += len(numbers)
        for number in located.shards:
            if number not in self._wanted:
                self._wanted[number] = 0
                self._opening[number] = self._pool.submit(self._fetch_and_open, number)
            self._wanted[number] += 1

    def _fetch_and_open(self, number: int) -> T:
        if self._fetcher is None:
            return self._open_shard(number)
        with self._fetcher.hold(number):
            return self._open_shard(number)

    def _release(self, located: _Located) -> None:
        """Count a request as read, and close what nobody needs beyond the shards that may stay open."""
        self._samples -= len(located.numbers)
        for number in located.shards:
            self._wanted[number] -= 1
        surplus = len(self._opened) - self._max_open
        if surplus <= 0:
            return
        unwanted = [number for number in self._opened if not self._wanted[number]]
        for number in unwanted[:surplus]:
            self._close_shard(self._opened.pop(number))
            del self._wanted[number]
            if self._fetcher is not None:
                self._fetcher.forget(number)


class ShardFetcher:
    """Fetches shards at a URL in the order in which requests will need them.

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

    def bring(self, request: Request) -> None:
        """Queue the shards of a request."""
        for number in dict.fromkeys(self._data.locate(request.positions)[0].tolist()):
            if number not in self._requested:
                self._requested.add(number)
                self._fetching[number] = self._pool.submit(self._fetch, number)

    def has_room(self, waiting: Sequence[Request]) -> bool:
        """Whether to go on with a request after those in `waiting`."""
        samples = sum(len(request.positions) for request in waiting)
        return len(self._fetching) < self._max_shards and samples < self._max_samples

    @contextmanager
    def hold(self, number: int) -> Iterator[None]:
        """Wait for shard `number`, which then stays in the cache until the end of the block.

        Raises:
            StorageError: it cannot be fetched.
        """
        fetched = self._fetching.pop(number, None)
        with self._data.hold(number) if fetched is None else fetched.result():
            yield

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

    def _fetch(self, number: int) -> ExitStack:
        check_this_thread = stop_check()

        def check() -> None:
            check_this_thread()
            # The thread that made this object waits for the shard: asked to stop, it cannot tell this one.
            self._check()

        return self._data.hold(number, check=check)

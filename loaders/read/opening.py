"""Open the shards of later requests, and fetch their bytes: all that disk and network do ahead."""

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

    Args:
        fetcher: fetches what later requests need, before their shards are opened.
        samples_ahead: how many samples ahead shards are opened; 0: none before its request is the next.
        shards_ahead: how many shards may be open or opened for that.
        max_open: how many shards stay open for later requests, although none that is known needs them.
    """

    def __init__(
        self,
        data: SplitData,
        open_shard: Callable[[int], T],
        close_shard: Callable[[T], None],
        fetcher: "BlockReader | ShardFetcher | None" = None,
        *,
        samples_ahead: int = 0,
        shards_ahead: int = 0,
        max_open: int = 0,
    ) -> None:
        self._data = data
        self._open_shard, self._close_shard = open_shard, close_shard
        self._fetcher = fetcher
        self._shard_fetcher = fetcher if isinstance(fetcher, ShardFetcher) else None
        self._samples_ahead, self._shards_ahead, self._max_open = samples_ahead, shards_ahead, max_open
        self._waiting: deque[Request] = deque()  # taken, but their shards are not being opened yet
        self._pending: deque[_Located] = deque()
        # Shard that is open or being opened -> how many requests need it that were not yielded, or just now.
        self._wanted: dict[int, int] = {}
        self._samples = 0  # of these requests
        self._opening: dict[int, Future[T]] = {}
        self._opened: dict[int, T] = {}  # the least recently used first
        self._pool = Pool(1, "read-shard")

    @classmethod
    def in_windows(
        cls,
        data: SplitData,
        window_shards: int,
        open_shard: Callable[[int], T],
        close_shard: Callable[[T], None],
    ) -> "OpenShards[T]":
        """Open the shards of requests in the order of windows ahead, each once an epoch, in a thread.

        It opens as far ahead as `window_shards` shards hold samples, and at most two windows of shards are
        open: a rank takes only some samples of each shard, so those samples may lie in more shards.
        """
        samples_ahead = int(np.sort(data.shard_samples)[-window_shards:].sum())
        fetcher = None
        if data.download_cache is not None:
            fetcher = ShardFetcher(data, data.max_shards_ahead(window_shards), samples_ahead)
        shards_ahead = 2 * window_shards
        return cls(
            data, open_shard, close_shard, fetcher, samples_ahead=samples_ahead, shards_ahead=shards_ahead
        )

    @classmethod
    def at_random(
        cls,
        data: SplitData,
        max_open: int,
        open_shard: Callable[[int], T],
        close_shard: Callable[[T], None],
        *,
        fetch_samples: int,
        blocks: BlockReader | None = None,
    ) -> "OpenShards[T]":
        """Open no shard of a full shuffle ahead, and keep up to `max_open` shards open.

        Args:
            fetch_samples: how many samples ahead shards at a URL are fetched.
            blocks: reads blocks of local shards ahead, if any does.
        """
        fetcher = blocks if data.download_cache is None else ShardFetcher(data, max_open, fetch_samples)
        return cls(data, open_shard, close_shard, fetcher, max_open=max_open)

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
        if self._shard_fetcher is not None:
            self._shard_fetcher.close()
        self._pool.close()
        for future in self._opening.values():
            if not future.cancelled() and future.exception() is None:
                self._close_shard(future.result())
        for shard in self._opened.values():
            self._close_shard(shard)

    def _look_ahead(self, requests: Iterator[Request]) -> bool:
        """Open the shards of requests as far ahead as there is room; False if no request is left."""
        while not self._pending or (
            self._samples < self._samples_ahead and len(self._wanted) < self._shards_ahead
        ):
            self._take(requests)
            if not self._waiting:
                break
            self._open(self._waiting.popleft())
        return bool(self._pending)

    def _take(self, requests: Iterator[Request]) -> None:
        """Take the next request, if none waits, and those for which to fetch meanwhile."""
        fetcher, waiting = self._fetcher, self._waiting
        # Never past an empty request: what follows it is not known yet (see `ray_reader.decode`).
        while not waiting or (
            fetcher is not None and len(waiting[-1].positions) and fetcher.may_fetch_after(waiting)
        ):
            if (request := next(requests, None)) is None:
                return
            if fetcher is not None:
                fetcher.fetch(request)
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
        if self._shard_fetcher is None:
            return self._open_shard(number)
        with self._shard_fetcher.hold(number):
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
            if self._shard_fetcher is not None:
                self._shard_fetcher.mark_closed(number)


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

    def fetch(self, request: Request) -> None:
        """Queue the shards of a request."""
        for number in dict.fromkeys(self._data.locate(request.positions)[0].tolist()):
            if number not in self._requested:
                self._requested.add(number)
                self._fetching[number] = self._pool.submit(self._fetch, number)

    def may_fetch_after(self, waiting: Sequence[Request]) -> bool:
        """Whether to fetch for a request after those in `waiting`, too."""
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

    def mark_closed(self, number: int) -> None:
        """Note that shard `number` has been closed: it is fetched again when it is requested again."""
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

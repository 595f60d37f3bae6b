"""The shards of a dataset at a URL, fetched to this machine before they are needed."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from loaders.batch import Positions, Request
from loaders.delivery.threads import Pool, stop_check
from precache.dataset.converted import ConvertedDataset
from precache.dataset.files import FileEntry, check_file
from precache.dataset.shard_table import ShardTable
from precache.errors import SettingError
from precache.formats import StoredSample
from precache.storage.shard_cache import FilePart

_AT_A_TIME = 4  # shards that are fetched, each in several parts


class ReadablePart(FilePart, Protocol):
    """Some samples of a shard, see `loaders.samples.parts`."""

    def read(self, path: Path) -> Mapping[int, StoredSample]:
        """Row -> sample, of the file at `path`."""


@dataclass(frozen=True, slots=True)
class RemoteShards:
    """What is fetched for each shard of a split.

    Attributes:
        shards: in stored order.
        parts: by number, of those shards that are not fetched whole, see `loaders.samples.parts`.
    """

    dataset: ConvertedDataset
    shards: ShardTable
    parts: Mapping[int, ReadablePart] = field(default_factory=dict)

    @classmethod
    def of(cls, dataset: ConvertedDataset, shards: ShardTable) -> "RemoteShards | None":
        """Of a dataset at a URL; None: it lies on this machine."""
        return None if dataset.mirror is None else cls(dataset, shards)

    def hold(
        self, number: int, *, with_index: bool = False, check: Callable[[], None] | None = None
    ) -> "Hold":
        """Have shard `number` on this machine until the hold is released; it is fetched if need be.

        Args:
            check: called meanwhile, by several threads; what it raises ends the fetching. Default: Ending if
                the thread that calls this is to end.

        Raises:
            StorageError: it cannot be fetched.
        """
        assert self.dataset.mirror is not None
        check, hold = check or stop_check(), Hold()
        shard, *others = self.shards[number].files
        part = self.parts.get(number)
        try:
            for file in others if with_index or part is not None else ():
                hold.descriptors.append(self._hold_index(file, check))
            hold.descriptors.append(self.dataset.mirror.hold(shard, check, part))
        except BaseException:
            hold.release()
            raise
        return hold

    def _hold_index(self, file: FileEntry, check: Callable[[], None]) -> int:
        """A descriptor of the index of a shard; it says where samples lie, so all of it is compared."""
        assert self.dataset.mirror is not None
        descriptor = self.dataset.mirror.hold(file, check)
        if check_file(self.dataset.mirror.folder, file) is None:
            return descriptor
        os.close(descriptor)
        self.dataset.mirror.forget(file.name)
        return self.dataset.mirror.hold(file, check)

    def damaged(self, number: int) -> str:
        """Shard `number` was damaged here: remove it, so that it is fetched again; what to say of it."""
        assert self.dataset.mirror is not None
        part = self.parts.get(number)
        for file in self.shards[number].files:
            self.dataset.mirror.forget(file.name)
            if part is not None:
                self.dataset.mirror.forget(f"{part.prefix}{file.name}")
        return (
            f"its bytes changed since they were fetched (checksum), so its shard was removed from the cache; "
            f"run again, and it is fetched from {self.dataset.place}"
        )

    def is_here(self, number: int) -> bool:
        """Whether all of shard `number` lies in the cache."""
        assert self.dataset.mirror is not None
        return (self.dataset.mirror.folder / self.shards[number].files[0].name).exists()

    def keep(self, descriptor: int) -> None:
        """Have an open file of the cache stay there until it is closed."""
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_SH)

    def ahead(self, window_shards: int, largest_bytes: int) -> int:
        """How many shards may be fetched beyond two windows, the one that is served and the one behind it.

        Raises:
            SettingError: the cache is too small for two windows.
        """
        assert self.dataset.mirror is not None
        most_bytes = self.dataset.mirror.cache.bytes
        if most_bytes is None:
            return window_shards
        windows_bytes = 2 * min(window_shards, len(self.shards)) * largest_bytes
        if most_bytes < windows_bytes:
            raise SettingError(
                f"cache_bytes is too small: needs {windows_bytes:,} for two windows of shards of "
                f"{self.dataset.place}, got {most_bytes:,}; raise it, or pass memory_bytes={most_bytes} for "
                f"smaller windows"
            )
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun sets it
        return min(window_shards, max(0, most_bytes // ranks - windows_bytes) // largest_bytes)


class Hold:
    """Files of the cache that stay where they are until they are released.

    Attributes:
        descriptors: each of an open file, which is locked.
    """

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def release(self) -> None:
        """Let them go; idempotent."""
        while self.descriptors:
            os.close(self.descriptors.pop())


class FetchAhead:
    """Fetches the shards of requests in the order in which they will be needed, several at a time.

    What is fetched stays in the cache until it was opened.

    Args:
        most_shards: to fetch before they are opened.
        most_samples: to look ahead; requests may have no end.
    """

    def __init__(self, remote: RemoteShards, most_shards: int, most_samples: int) -> None:
        self._remote = remote
        self._most_shards, self._most_samples = most_shards, most_samples
        self._pool = Pool(min(_AT_A_TIME, max(1, most_shards)), "fetch-shard")
        self._check = stop_check()
        self._coming: dict[int, Future[Hold]] = {}
        self._asked: set[int] = set()  # until they are closed

    def requests(
        self, requests: Iterator[Request], shards_of: Callable[[Positions], Positions]
    ) -> Iterator[Request]:
        """The same requests; the shards of later ones, as `shards_of` tells of positions, come meanwhile."""
        waiting: deque[Request] = deque()
        samples = 0
        while True:
            # of what comes behind an empty request nothing is known yet: see `ray_decoder`
            while not waiting or (
                len(self._coming) < self._most_shards
                and samples < self._most_samples
                and len(waiting[-1].positions)
            ):
                if (request := next(requests, None)) is None:
                    break
                waiting.append(request)
                samples += len(request.positions)
                for number in dict.fromkeys(shards_of(request.positions).tolist()):
                    if number not in self._asked:
                        self._asked.add(number)
                        self._coming[number] = self._pool.submit(self._fetch, number)
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
        hold = self._remote.hold(number) if coming is None else coming.result()
        try:
            yield
        finally:
            hold.release()

    def _fetch(self, number: int) -> Hold:
        own = stop_check()

        def check() -> None:
            own()
            self._check()  # the one that waits for this has been asked to end: it cannot say so itself

        return self._remote.hold(number, check=check)

    def closed(self, number: int) -> None:
        """Note that shard `number` is not open any more; who asks for it again has it fetched again."""
        self._asked.discard(number)

    def close(self) -> None:
        """End the threads."""
        self._pool.close()
        while self._coming:
            coming = self._coming.popitem()[1]
            if not coming.cancelled() and coming.exception() is None:
                coming.result().release()

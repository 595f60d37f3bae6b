"""The shards of a dataset at a URL, fetched to this machine before they are needed."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from loaders.batch import Positions, Request
from loaders.deliver.threads import Pool, stop_check
from precache.dataset.converted import ConvertedDataset
from precache.dataset.files import FileEntry, check_file
from precache.dataset.index import checksum_of
from precache.dataset.shard_table import ShardTable
from precache.errors import DatasetError, SettingError, shell_command
from precache.formats import FORMATS, StoredSample
from precache.formats.shards import DATA_START, picture_starts
from precache.storage import read_regular_part

if TYPE_CHECKING:
    from loaders.dataset import SplitData

_AT_A_TIME = 4  # shards that are fetched, each in several parts
_FEW = 4  # a shard of which a quarter is needed is fetched whole


@dataclass(frozen=True, slots=True)
class RemoteShards:
    """What is fetched for each shard of a split.

    Attributes:
        shards: in stored order.
        parts: by number, of those shards that are not fetched whole, see `ShardPart`.
    """

    dataset: ConvertedDataset
    shards: ShardTable
    parts: Mapping[int, "ShardPart"] = field(default_factory=dict)

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


def with_parts(data: "SplitData", wanted: npt.NDArray[np.bool_] | None) -> "SplitData":
    """`data`, but at a URL the shards that hold few of its samples are fetched in part.

    Args:
        wanted: bool [n], the samples that an epoch may ask for; None: all of them.
    """
    remote, index = data.remote, data.whole.index
    if remote is None or index is None or "mask_checksums" in index.columns:
        return data
    if wanted is None and data.part_of is None:  # all of each shard
        return data
    positions = np.arange(len(data.ids)) if wanted is None else np.flatnonzero(wanted)
    numbers, rows = data.locate(positions)
    counts = np.bincount(numbers, minlength=len(data.files))
    few = (counts > 0) & (counts * _FEW <= np.array(data.whole.shard_samples))
    chosen = [number for number in np.flatnonzero(few).tolist() if not remote.is_here(number)]
    if not chosen:
        return data
    key = hashlib.sha256(data.ids[positions].tobytes()).hexdigest()[:16]
    firsts = np.concatenate(([0], np.cumsum(counts)))  # positions ascend, and so do the shards
    parts = {
        number: ShardPart(f"{key}-", data.whole, number, rows[firsts[number] : firsts[number + 1]])
        for number in chosen
    }
    files = list(data.files)
    for number in chosen:
        path = Path(files[number])
        files[number] = str(path.with_name(f"{key}-{path.name}"))
    return replace(data, files=tuple(files), remote=replace(remote, parts=parts))


@dataclass(frozen=True, slots=True)
class ShardPart:
    """Some samples of a shard: where few of one are needed, these alone are fetched, each by its range.

    A part lies in the cache as a file of the shard's size, with holes where nothing was fetched; its name
    tells what was asked for. So later epochs, other ranks and runs find it there, and few readers need know.

    Attributes:
        prefix: of the name in the cache.
        whole: the split as it is stored.
        rows: int64 [n], of the shard, ascending.
    """

    prefix: str
    whole: "SplitData"
    number: int
    rows: Positions

    def ranges(self) -> list[tuple[int, int]]:
        """First byte and number of bytes of what is fetched: that of the samples first, in order."""
        places = self._places()
        ranges: list[tuple[int, int]] = places[self.rows].tolist()
        if self.whole.kind == "shards":
            end = int(places[-1].sum())
            ranges += [(0, DATA_START), (end, int(self.whole.shard_bytes[self.number]) - end)]
        return ranges

    def is_right(self, number: int, content: bytes) -> bool:
        """Whether what was fetched of range `number` is what was written; of all but samples not known."""
        if number >= len(self.rows):
            return True
        try:
            sample = FORMATS[self.whole.kind].read_sample(content)
        except ValueError:
            return False
        index = self.whole.index
        assert index is not None
        position = int(self.whole.shard_starts[self.number] + self.rows[number])
        return not sample.damage and checksum_of(sample.data) == index["checksums"][position]

    def read(self, path: Path) -> dict[int, StoredSample]:
        """Row -> sample, of the part at `path`, of a format that holds JPEGs.

        Raises:
            DatasetError: something else lies where the index says.
        """
        samples = {}
        first = int(self.whole.shard_starts[self.number])
        for row, (start, count) in zip(self.rows.tolist(), self._places()[self.rows].tolist(), strict=True):
            try:
                sample = FORMATS[self.whole.kind].read_sample(read_regular_part(path, start, count))
            except ValueError as error:
                raise self._error(path, str(error)) from error
            if sample.id not in (-1, self.whole.ids[first + row]):
                raise self._error(path, f"sample {sample.id} in row {row}")
            expected = int(self.whole.ids[first + row]), int(self.whole.labels[first + row])
            samples[row] = replace(sample, id=expected[0], label=expected[1])
        return samples

    def _places(self) -> Positions:
        """int64 [samples of the shard, 2], where they lie: first byte and bytes."""
        if self.whole.kind != "shards":
            return FORMATS[self.whole.kind].find_samples(Path(self.whole.files[self.number]))
        shapes = self.whole.shapes_at(self.whole.shard_positions(self.number))
        sizes = shapes.prod(axis=1) * self.whole.pixel_bytes
        return np.stack((picture_starts(shapes, self.whole.pixel_bytes), sizes), axis=1)

    def _error(self, path: Path, problem: str) -> DatasetError:
        verify = shell_command("precache verify", self.whole.path)
        return DatasetError(f"{path}: does not hold what its index says ({problem}); run: {verify}")


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

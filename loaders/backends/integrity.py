"""Whether what was read is what the conversion wrote, found out by whoever has just read it.

Each sample has its checksum in the dataset's index. It is compared in the thread that has the sample in its
CPU's cache, before anybody else sees it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loaders.dataset import SplitData
from precache.dataset.files import check_file
from precache.dataset.index import checksum_of
from precache.errors import DatasetError, shell_command


class SampleCheck:
    """Compares the samples of a split with their checksums; used by several threads at a time.

    Args:
        when: `always`, `first-read` (until a sample was right once) or `never`.
    """

    def __init__(self, data: SplitData, when: str) -> None:
        self._data = data
        self._when = when
        self._always = when == "always"
        self._compares = when != "never" and data.index is not None
        self._passed = _Flags(len(data) if self._compares and not self._always else 0)

    def wants(self, position: int) -> bool:
        """Whether the sample at `position` is to be compared when it is read."""
        return self._compares and (self._always or not self._passed.get(position))

    def wants_any(self, positions: npt.NDArray[np.int64]) -> bool:
        """Whether any of those at `positions` is."""
        return self._compares and (self._always or not self._passed.all(positions))

    def compare(self, position: int, stored: bytes | npt.NDArray[np.uint8], damage: str = "") -> None:
        """Compare all that is stored of the sample at `position`, if that is wanted.

        Args:
            damage: what the format's own checksum says is wrong with it.

        Raises:
            SampleError: it is not what was written; so is it the next time.
        """
        if damage or self.wants(position):
            index = self._data.index
            assert index is not None
            if damage or checksum_of(stored) != index["checksums"][position]:
                if self._data.remote is not None:
                    damage = self._data.remote.damaged(int(self._data.locate(np.array([position]))[0][0]))
                raise index.error(position, self._data.file(position), damage)
            self.passed(np.array([position]))

    def written(self, positions: npt.NDArray[np.int64]) -> list[int]:
        """Checksums of what was written of the samples at `positions`, for who compares many at a time."""
        assert self._data.index is not None
        checksums: list[int] = self._data.index["checksums"][positions].tolist()
        return checksums

    def passed(self, positions: npt.NDArray[np.int64]) -> None:
        """Note that those at `positions` were compared, and right."""
        if self._compares and not self._always:
            self._passed.set(positions)

    def open_file(self, number: int) -> None:
        """To be called before shard `number` of the split is read: compares its size.

        Raises:
            DatasetError: it cannot be read, or has another size than the conversion wrote.
        """
        if self._when == "never":
            return
        assert self._data.shards is not None
        path = Path(self._data.files[number])  # a part of a shard has a name of its own
        entry = replace(self._data.shards[number].files[0], name=path.name)
        if problem := check_file(path.parent, entry, content=False):
            raise DatasetError(f"{problem}; run: {shell_command('precache verify', self._data.path)}")


class _Flags:
    """A bit for each sample, 0 at first; memory is taken where some are set.

    Two threads that set flags of one byte at a time may lose one of them: what it stands for is done again.
    """

    def __init__(self, count: int) -> None:
        self._bytes = np.zeros(-(-count // 8), np.uint8)

    def get(self, position: int) -> bool:
        return bool(self._bytes[position >> 3] >> (position & 7) & 1)

    def all(self, positions: npt.NDArray[np.int64]) -> bool:
        return bool((self._bytes[positions >> 3] >> (positions & 7) & 1).all())

    def set(self, positions: npt.NDArray[np.int64]) -> None:
        np.bitwise_or.at(self._bytes, positions >> 3, (1 << (positions & 7)).astype(np.uint8))


def check_index(
    data: SplitData,
    number: int,
    ids: Sequence[int] | npt.NDArray[np.int64],
    labels: Sequence[int] | npt.NDArray[np.int64],
) -> None:
    """Compare what shard `number` says of itself with the dataset's index.

    Raises:
        DatasetError: they differ.
    """
    whole = data.whole
    stored = whole.shard_positions(number)
    if not (np.array_equal(ids, whole.ids[stored]) and np.array_equal(labels, whole.labels[stored])):
        raise DatasetError(
            f"{data.files[number]}: holds other samples than the dataset's index says; "
            f"run: {shell_command('precache verify', data.path)}"
        )

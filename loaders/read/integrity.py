"""Whether what was read is what the conversion wrote, found out by whoever has just read it.

Each sample has its checksum in the dataset's index. It is compared in the thread that has the sample in its
CPU's cache, before anybody else sees it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loaders.batch import Positions
from loaders.dataset import RAW, SplitData
from precache.dataset.files import file_problem
from precache.dataset.index import checksum_of
from precache.errors import DatasetError, SampleError, shell_command
from precache.pictures.jpeg import Pixels


class SampleCheck:
    """Compares the samples of a split with their checksums; used by several threads at a time.

    Args:
        when: `always`, `first-read` (until a sample was right once) or `never`.
    """

    def __init__(self, data: SplitData, when: str) -> None:
        self._data = data
        self._when = when
        self._always = when == "always"
        self._compares = when != "never" and data.kind != RAW
        self._passed = bytearray(len(data) // 8 + 1)  # a bit for each

    def compare(self, position: int, stored: bytes | npt.NDArray[np.uint8], damage: str = "") -> None:
        """Compare all that is stored of the sample at `position`, if that is still to be done.

        Args:
            damage: what the format's own checksum says is wrong with it.

        Raises:
            SampleError: it is not what was written; so is it the next time.
        """
        byte, bit = position >> 3, 1 << (position & 7)
        if not damage and not (self._compares and (self._always or not self._passed[byte] & bit)):
            return
        if damage or checksum_of(stored) != self._data.index["checksums"][position]:
            raise self._error(position, damage)
        self._passed[byte] |= bit  # two threads at one byte may lose a bit: that sample is compared again

    def of_batch(
        self, positions: Positions
    ) -> Callable[[Mapping[int, Pixels]], dict[int, SampleError]] | None:
        """Tells of pictures of the batch at `positions`, by their numbers in it, which are wrong, and why.

        None: nothing is to be compared any more.
        """
        passed = np.frombuffer(self._passed, np.uint8)
        bytes_of, bits = positions >> 3, (1 << (positions & 7)).astype(np.uint8)
        if not self._compares or (not self._always and (passed[bytes_of] & bits).all()):
            return None
        checksums = self._data.index["checksums"][positions]

        def compare(pictures: Mapping[int, Pixels]) -> dict[int, SampleError]:
            slots = np.array([*pictures])
            # by `map`: who asks for the interpreter's lock again behind each picture waits for other threads
            right = np.fromiter(map(checksum_of, pictures.values()), np.uint64) == checksums[slots]
            np.bitwise_or.at(passed, bytes_of[slots[right]], bits[slots[right]])
            return {slot: self._error(int(positions[slot])) for slot in slots[~right].tolist()}

        return compare

    def _error(self, position: int, damage: str = "") -> SampleError:
        if self._data.remote is not None:
            damage = self._data.remote.remove_damaged(int(self._data.locate(np.array([position]))[0][0]))
        return self._data.index.error(position, self._data.file_at(position), damage)

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
        if problem := file_problem(path.parent, entry, content=False):
            raise DatasetError(f"{problem}; run: {shell_command('precache verify', self._data.path)}")


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

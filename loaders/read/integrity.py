"""Compare samples and shards, as they are read, with the checksums and sizes that the conversion recorded.

The dataset's index has the checksum of each sample. A sample is compared by the thread that has just read it,
while it is in that CPU's cache, and before it is served.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from loaders.batch import Positions
from loaders.dataset import RAW, SplitData
from precache.dataset.files import file_problem
from precache.errors import DatasetError, SampleError
from precache.pictures.jpeg import Pixels
from precache.storage import checksum_of


class SampleCheck:
    """Compares the samples of a split with their checksums; several threads may use it at a time.

    Args:
        when: `always`, `first-read` (until the sample was right once) or `never`.
    """

    def __init__(self, data: SplitData, when: str) -> None:
        self._data = data
        self._when = when
        self._always = when == "always"
        self._compares = when != "never" and data.kind != RAW
        self._passed = bytearray(len(data) // 8 + 1)  # a bit per sample: whether it was right once

    def compare(self, position: int, stored: bytes | npt.NDArray[np.uint8], damage: str = "") -> None:
        """Compare all that is stored of the sample at `position`, if that is still to be done.

        Args:
            damage: the fault that the format's own checksum found, if any.

        Raises:
            SampleError: it is not as it was written; raised again whenever it is compared again.
        """
        byte, bit = position >> 3, 1 << (position & 7)
        if not damage and not (self._compares and (self._always or not self._passed[byte] & bit)):
            return
        if damage or checksum_of(stored) != self._data.index["checksums"][position]:
            raise self._error(position, damage)
        # Two threads that write to one byte may lose a bit; that sample is then compared once more.
        self._passed[byte] |= bit

    def batch_comparison(self, positions: Positions) -> Callable[[int, Pixels], SampleError | None] | None:
        """Function that compares pictures of the batch at `positions`; None where none has to be compared.

        It takes the slot of a picture, and the picture; it returns an error if the picture is damaged.
        """
        passed = self._passed
        bytes_of, bits = positions >> 3, 1 << (positions & 7)
        if not self._compares or (
            not self._always and (np.frombuffer(passed, np.uint8)[bytes_of] & bits).all()
        ):
            return None
        checksums = self._data.index["checksums"][positions].tolist()
        byte_list, bit_list = bytes_of.tolist(), bits.tolist()

        def compare(slot: int, picture: Pixels) -> SampleError | None:
            if checksum_of(picture) != checksums[slot]:
                return self._error(int(positions[slot]))
            passed[byte_list[slot]] |= bit_list[slot]
            return None

        return compare

    def _error(self, position: int, damage: str = "") -> SampleError:
        number = int(self._data.locate(np.array([position]))[0][0])
        if self._data.find_shard(number)[0].downloads is not None:
            damage = self._data.forget(number)
        return self._data.index.error(position, self._data.file_at(position), damage)

    def compare_size(self, number: int) -> None:
        """Compare the size of shard `number` with its manifest; call it before the shard is read.

        Raises:
            DatasetError: the shard cannot be read, or has another size than the conversion wrote.
        """
        if self._when == "never":
            return
        dataset, own_number = self._data.find_shard(number)
        assert dataset.shards is not None
        path = Path(self._data.files[number])  # where only a part of a shard was fetched, the part's own name
        entry = replace(dataset.shards[own_number].files[0], name=path.name)
        if problem := file_problem(path.parent, entry, content=False):
            raise DatasetError(
                problem.removeprefix(f"{path}: "),
                path=path,
                remedy=self._data.verify_remedy(number),
            )


def check_index(
    data: SplitData,
    number: int,
    ids: Sequence[int] | npt.NDArray[np.int64],
    labels: Sequence[int] | npt.NDArray[np.int64],
) -> None:
    """Compare the ids and labels that shard `number` holds with those in the dataset's index.

    Raises:
        DatasetError: they differ.
    """
    whole = data.whole
    stored = whole.shard_positions(number)
    if not (np.array_equal(ids, whole.ids[stored]) and np.array_equal(labels, whole.labels[stored])):
        raise DatasetError(
            "holds other samples than the dataset's index says",
            path=data.files[number],
            remedy=data.verify_remedy(number),
        )

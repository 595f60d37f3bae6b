"""Parts of shards at URLs: where few samples of one are needed, these alone are fetched, each by its range.

A part lies in the cache as a file of the shard's size, with holes where nothing was fetched; its name tells
what was asked for. So later epochs, other ranks and runs find it there, and few readers need know.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loaders.batch import Positions
from loaders.dataset import SplitData
from precache.dataset.index import checksum_of
from precache.errors import DatasetError, shell_command
from precache.formats import FORMATS, StoredSample
from precache.formats.shards import DATA_START, picture_starts
from precache.storage import read_regular_part

_FEW = 4  # a shard of which a quarter is needed is fetched whole


def with_parts(data: SplitData, wanted: npt.NDArray[np.bool_] | None) -> SplitData:
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
    """Some samples of a shard.

    Attributes:
        prefix: of the name in the cache.
        whole: the split as it is stored.
        rows: int64 [n], of the shard, ascending.
    """

    prefix: str
    whole: SplitData
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

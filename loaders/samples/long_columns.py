"""What a split has one of for each sample or shard, without a list of all of them.

Of a large converted set (see `precache.dataset.converted.WHOLE_SAMPLES`) ids, labels and what else the index
has are read shard by shard, when rows are asked for. Where classes, subset or updates leave samples out, each
of the others costs 8 bytes.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy.typing as npt

from loaders.batch import Positions
from precache.dataset.index import Sizes
from precache.dataset.index_rows import LazyArray
from precache.dataset.shard_table import ShardTable
from precache.errors import SettingError
from precache.storage.urls import Location

_BLOCK_SAMPLES = 1 << 20


class ShardPaths(Sequence[str]):
    """Paths of the files of shards, each made when it is asked for."""

    def __init__(self, folder: Path, shards: ShardTable) -> None:
        self._folder, self._shards = str(folder), shards

    def __len__(self) -> int:
        return len(self._shards)

    @overload
    def __getitem__(self, number: int) -> str: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[str]: ...

    def __getitem__(self, number: int | slice) -> str | Sequence[str]:
        if isinstance(number, slice):
            return tuple(self[one] for one in range(*number.indices(len(self))))
        return f"{self._folder}/{self._shards.file_name(range(len(self))[number])}"


def blocks(column: Any, positions: Positions | None = None) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """The values of an array or a LazyArray, or those at `positions`, as many at a time as memory holds.

    Each block comes with the number of its first value.
    """
    if not isinstance(column, LazyArray):
        yield 0, column if positions is None else column[positions]
    elif positions is None:
        yield from column.blocks()
    else:
        for start in range(0, len(positions), _BLOCK_SAMPLES):
            yield start, column[positions[start : start + _BLOCK_SAMPLES]]


def at(column: Any, positions: Positions) -> Any:
    """Its values at these positions; of a LazyArray another one; None of None."""
    if column is None:
        return None
    return column.at(positions) if isinstance(column, LazyArray) else column[positions]


def digest_of(digest: str, ids: Any, positions: Positions) -> str:
    """Identity of the samples at `positions` of a dataset of identity `digest`, SHA-256 in hex."""
    known = hashlib.sha256(digest.encode())
    for _, block in blocks(ids, positions):
        known.update(block.tobytes())
    return known.hexdigest()


def most_sides(shapes: Sizes, shards: ShardTable | None) -> tuple[int, int]:
    """The greatest height and width of `shapes`, int32 [n, 2], the pictures of `shards`."""
    largest = shapes if shards is None or shards.largest is None else shards.largest
    height, width = largest.max(axis=0).tolist()
    return height, width


def fitting_shards(path: Location, shard_bytes: Positions, memory_bytes: int) -> int:
    """How many shards a window holds so that two of them fit into `memory_bytes`: see `SplitData`.

    Raises:
        SettingError: not even two shards fit.
    """
    largest = int(shard_bytes.max())
    if memory_bytes < 2 * largest:
        raise SettingError(
            f"memory_bytes {memory_bytes:,} holds no two shards of {path}, of {largest:,} bytes "
            f"each; give at least {2 * largest:,}, or convert again with smaller --shard-bytes"
        )
    return memory_bytes // (2 * largest)

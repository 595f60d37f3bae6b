"""What a split has one of for each sample or shard, without a list of all of them.

Of a large converted set (see `precache.dataset.converted.WHOLE_SAMPLES`) ids, labels and what else the index
has are read shard by shard, when rows are asked for. Where classes, subset or updates leave samples out, each
of the others costs 8 bytes.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from loaders.batch import Positions
from precache.dataset.columns import Column
from precache.dataset.shard_table import ShardTable
from precache.errors import SettingError
from precache.storage.urls import Location


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


def digest_of(digest: str, ids: Column, positions: Positions) -> str:
    """Identity of the samples at `positions` of a dataset of identity `digest`, SHA-256 in hex."""
    known = hashlib.sha256(digest.encode())
    for _, block in ids.blocks(positions):
        known.update(block.tobytes())
    return known.hexdigest()


def fitting_shards(path: Location, shard_bytes: Positions, memory_bytes: int) -> int:
    """How many shards a window holds so that two of them fit into `memory_bytes`: see `SplitData`.

    Raises:
        SettingError: not even two shards fit.
    """
    largest = int(shard_bytes.max())
    if memory_bytes < 2 * largest:
        raise SettingError(
            f"memory_bytes is too small: needs {2 * largest:,} for two shards of {path}, got "
            f"{memory_bytes:,}; give at least that, or convert again with smaller --shard-bytes"
        )
    return memory_bytes // (2 * largest)

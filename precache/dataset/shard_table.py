"""Table of a dataset's shards, kept in columns of its index so that 600,000 shards open at once.

The index (see `precache.dataset.index`) has these columns of the s shards, in written order, of a format with
f files per shard:

    shard:splits      int32  [s]     position of its split in the manifest
    shard:numbers     int64  [s]     number of the shard in its split, of which its name is made: `shard_name`
    shard:samples     int64  [s]     number of its samples
    shard:bytes       int64  [s, f]  sizes of its files
    shard:crc32c      uint32 [s, f]  CRC-32C of its files
    shard:largest     int32  [s, 2]  greatest height and width of its pictures, in pixels; only where the
                                     pictures of the dataset have sizes of their own
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from precache.dataset.files import FileEntry
from precache.dataset.index import SHARD, Array, IndexFile, Ints, Sizes, damaged_index_error
from precache.errors import SettingError
from precache.formats import FORMATS, Format
from precache.pictures.images import CHANNELS, MAX_KEPT_SIDE, sides
from precache.pictures.jpeg import MAX_EXPANSION
from precache.recipe import SPLIT_NAME, Recipe

_MAX_NUMBER, _MAX_BYTES = (1 << 31) - 1, 1 << 60
_COLUMNS = ("splits", "numbers", "samples", "bytes", "crc32c")
Crcs: TypeAlias = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """Finished shard: its `files` are the shard file, then its index file if the format has one."""

    name: str
    split: str
    samples: int
    files: tuple[FileEntry, ...]

    @property
    def file_name(self) -> str:
        """Name of the shard file."""
        return self.files[0].name


def shard_name(split: str, number: int) -> str:
    """Name, without suffix, of the shard of this number in `split`.

    Raises:
        SettingError: `split` is not a valid name of a split, and might lead out of the dataset's folder.
    """
    if not isinstance(split, str) or not SPLIT_NAME.fullmatch(split):
        raise SettingError(f"{split!r:.99} is not a name for a split; use letters and digits, such as train")
    return f"{split}-{number:05d}"


def file_names(shard: str, shard_format: Format) -> tuple[str, ...]:
    """Names of the files of the shard of this name."""
    return tuple(f"{shard}{suffix}" for suffix in file_suffixes(shard_format))


def file_suffixes(shard_format: Format) -> tuple[str, ...]:
    """Suffixes of the files of a shard: of the shard file, then of its index if there is one."""
    if shard_format.index_suffix is None:
        return (shard_format.suffix,)
    return shard_format.suffix, shard_format.index_suffix


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable(Sequence[ShardEntry]):
    """Sequence of the shards as columns; a `ShardEntry` is made when an item is read.

    A shard has a position in this table, and a number in its split, of which its name is made.

    Attributes:
        split_names: names of the splits, into which `splits` holds positions.
        suffixes: suffixes of the files of each shard.
        splits, numbers, samples, bytes, crc32c, largest: columns, see the module.
    """

    split_names: tuple[str, ...]
    suffixes: tuple[str, ...]
    splits: Sizes
    numbers: Ints
    samples: Ints
    bytes: Ints
    crc32c: Crcs
    largest: Sizes | None = None

    @classmethod
    def from_entries(cls, entries: Iterable[ShardEntry], shard_format: Format) -> "ShardTable":
        """Make the table of these shards, without `largest`."""
        shards = list(entries)
        split_names = tuple(dict.fromkeys(shard.split for shard in shards))
        position_of = {split: position for position, split in enumerate(split_names)}
        suffixes = file_suffixes(shard_format)
        file_bytes = [[file.bytes for file in shard.files] for shard in shards]
        file_crcs = [[int(file.crc32c, 16) for file in shard.files] for shard in shards]
        return cls(
            split_names,
            suffixes,
            splits=np.array([position_of[shard.split] for shard in shards], np.int32),
            numbers=np.array([_number(shard) for shard in shards], np.int64),
            samples=np.array([shard.samples for shard in shards], np.int64),
            bytes=np.array(file_bytes, np.int64).reshape(-1, len(suffixes)),
            crc32c=np.array(file_crcs, np.uint32).reshape(-1, len(suffixes)),
        )

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[ShardEntry]:
        return map(self._entry, range(len(self)))

    @overload
    def __getitem__(self, position: int) -> ShardEntry: ...

    @overload
    def __getitem__(self, position: slice) -> Sequence[ShardEntry]: ...

    def __getitem__(self, position: int | slice) -> ShardEntry | Sequence[ShardEntry]:
        positions = range(len(self))[position]
        if isinstance(positions, int):
            return self._entry(positions)
        return tuple(map(self._entry, positions))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardTable | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def file_name(self, position: int) -> str:
        """Name of the file of the shard at this position."""
        return self._name(position) + self.suffixes[0]

    def split_mask(self, split: str) -> npt.NDArray[np.bool_]:
        """Mask of the shards of `split`, bool [s]."""
        position = self.split_names.index(split) if split in self.split_names else -1
        mask: npt.NDArray[np.bool_] = self.splits == position
        return mask

    def select(self, mask: npt.NDArray[np.bool_]) -> "ShardTable":
        """Make a table of the shards where `mask`, bool [s], is True."""
        if mask.all():
            return self
        columns: dict[str, Any] = {name: getattr(self, name)[mask] for name in _COLUMNS}
        if self.largest is not None:
            columns["largest"] = self.largest[mask]
        return replace(self, **columns)

    def arrays(self) -> dict[str, Array]:
        """Columns of the table, by their names in the index."""
        arrays = {f"{SHARD}{name}": getattr(self, name) for name in _COLUMNS}
        if self.largest is not None:
            arrays[f"{SHARD}largest"] = self.largest
        return arrays

    @property
    def starts(self) -> Ints:
        """Row in the index of each shard's first sample, int64 [s]."""
        starts: Ints = np.cumsum(self.samples) - self.samples
        return starts

    def rows_of_split(self, split: str) -> range:
        """Rows of the samples of `split` in the index."""
        positions = np.flatnonzero(self.split_mask(split))
        if not len(positions):
            return range(0)
        first, last = positions[0], positions[-1]
        return range(int(self.starts[first]), int(self.starts[last] + self.samples[last]))

    def _name(self, position: int) -> str:
        return shard_name(self.split_names[self.splits[position]], int(self.numbers[position]))

    def _entry(self, position: int) -> ShardEntry:
        name = self._name(position)
        sizes, crcs = self.bytes[position].tolist(), self.crc32c[position].tolist()
        files = tuple(
            FileEntry(f"{name}{suffix}", size, f"{crc:08x}")
            for suffix, size, crc in zip(self.suffixes, sizes, crcs, strict=True)
        )
        return ShardEntry(name, self.split_names[self.splits[position]], int(self.samples[position]), files)


def read_table(file: IndexFile, split_names: tuple[str, ...], recipe: Recipe, samples: int) -> ShardTable:
    """Read the shards of a dataset of these splits and so many samples, made by this recipe, from its index.

    Raises:
        IndexFileError: the index is damaged, or its values are out of range.
    """
    columns: dict[str, Any] = {name: file.read(f"{SHARD}{name}") for name in _COLUMNS}
    if f"{SHARD}largest" in file.arrays:
        columns["largest"] = file.read(f"{SHARD}largest")
    table = ShardTable(split_names, file_suffixes(FORMATS[recipe.format]), **columns)
    try:
        _check(table, samples, recipe)
    except ValueError as error:
        raise damaged_index_error(file.path, str(error)) from error
    return table


def max_pixels_bytes(shard_bytes: Ints, *, holds_pixels: bool) -> Ints:
    """Compute the most bytes of pixels that shards of these sizes can hold, int64 [shards].

    Args:
        shard_bytes: int64 [shards], size of each shard's file in bytes.
        holds_pixels: whether the shards hold pixels; else they hold JPEGs, which expand when decoded.
    """
    return shard_bytes if holds_pixels else np.minimum(shard_bytes, 1 << 48) * MAX_EXPANSION


def _check(table: ShardTable, samples: int, recipe: Recipe) -> None:
    """Raise ValueError unless this can be the table of shards that hold `samples` samples in all."""
    _check_values("samples", table.samples, 1, samples)
    _check_values("split", table.splits, 0, len(table.split_names) - 1)
    _check_values("number", table.numbers, 0, _MAX_NUMBER)
    _check_values("bytes", table.bytes, 1, _MAX_BYTES)
    if table.largest is not None:
        _check_values("largest sides", table.largest, 1, MAX_KEPT_SIDE)
    if int(table.samples.sum()) != samples:
        raise ValueError(f"shards of {int(table.samples.sum()):,} samples, expected {samples:,}")
    if table.bytes.sum(dtype=np.float64) > _MAX_BYTES:
        raise ValueError(f"shards of more than {_MAX_BYTES:,} bytes")
    if (np.bincount(table.splits, minlength=len(table.split_names)) == 0).any():
        raise ValueError("a split without shards")
    if (np.diff(table.splits) < 0).any():
        raise ValueError("shards that are not sorted by split")
    if (np.diff(np.sort((table.splits.astype(np.int64) << 32) + table.numbers)) == 0).any():
        raise ValueError("a shard is there twice")
    if recipe.stored_size is not None:
        pixels_bytes = math.prod(sides(recipe.stored_size)) * CHANNELS[recipe.channels]
        max_bytes = max_pixels_bytes(table.bytes[:, 0], holds_pixels=FORMATS[recipe.format].holds_pixels)
        if (table.samples * pixels_bytes > max_bytes).any():
            raise ValueError("shards of fewer bytes than their samples have")


def _check_values(name: str, values: npt.NDArray[Any], low: int, high: int) -> None:
    """Raise ValueError unless the values of a column are from `low` to `high`."""
    if len(values) and not low <= int(values.min()) <= int(values.max()) <= high:
        raise ValueError(
            f"{name} of shards from {values.min():,} to {values.max():,}, not from {low:,} to {high:,}"
        )


def _number(shard: ShardEntry) -> int:
    return int(shard.name.removeprefix(f"{shard.split}-"))

"""The shards of a dataset in columns of its index: a set of 600,000 of them opens at once.

Of the s shards, in written order, of format with f files each, `precache.dataset.index` has:

    shard:splits      int32  [s]     numbers of the manifest's splits
    shard:numbers     int64  [s]     of the shard among those of its split: its name, see `shard_name`
    shard:samples     int64  [s]     how many it holds
    shard:bytes       int64  [s, f]  sizes of its files
    shard:crc32c      uint32 [s, f]  CRC-32C of its files
    shard:largest     int32  [s, 2]  the greatest height and width of a picture stored in it, in pixels, where
                                     these vary
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from precache.dataset.bounds import most_pixels_bytes
from precache.dataset.columns import Rows
from precache.dataset.files import FileEntry
from precache.dataset.index import SHARD, Array, IndexFile, Ints, Sizes, damaged_index_error
from precache.errors import SettingError
from precache.formats import FORMATS, Format
from precache.pictures.images import MAX_KEPT_SIDE
from precache.pictures.sizes import sides
from precache.recipe import SPLIT_NAME, Recipe

_MOST_NUMBER, _MOST_BYTES = (1 << 31) - 1, 1 << 60
_COLUMNS = ("splits", "numbers", "samples", "bytes", "crc32c")
Crcs: TypeAlias = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One finished shard: the shard file first, then its index where the format has one."""

    name: str
    split: str
    samples: int
    files: tuple[FileEntry, ...]

    @property
    def file_name(self) -> str:
        """Name of the shard file."""
        return self.files[0].name


def shard_name(split: str, index: int) -> str:
    """Name, without suffix, of the shard `index` of `split`.

    Raises:
        SettingError: that is no name of a split, and might lead out of the dataset's folder.
    """
    if not isinstance(split, str) or not SPLIT_NAME.fullmatch(split):
        raise SettingError(f"{split!r:.99} is not a name for a split; use letters and digits, such as train")
    return f"{split}-{index:05d}"


def file_names(shard: str, form: Format) -> tuple[str, ...]:
    """Names of the files of the shard of this name."""
    return tuple(f"{shard}{suffix}" for suffix in suffixes_of(form))


def suffixes_of(form: Format) -> tuple[str, ...]:
    """Of the files of a shard."""
    return (form.suffix, form.index_suffix) if form.index_suffix else (form.suffix,)


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable(Sequence[ShardEntry]):
    """The shards, each as a `ShardEntry` made when it is asked for; see the module for the columns.

    Attributes:
        split_names: what `splits` are numbers of.
        suffixes: of the files of each shard.
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
    def from_entries(cls, entries: Iterable[ShardEntry], form: Format) -> "ShardTable":
        """The table of these shards."""
        listed = list(entries)
        split_names = tuple(dict.fromkeys(shard.split for shard in listed))
        number_of = {split: number for number, split in enumerate(split_names)}
        files = [shard.files for shard in listed]
        count = len(suffixes_of(form))
        return cls(
            split_names,
            suffixes_of(form),
            np.array([number_of[shard.split] for shard in listed], np.int32),
            np.array([_number(shard) for shard in listed], np.int64),
            np.array([shard.samples for shard in listed], np.int64),
            np.array([[f.bytes for f in of] for of in files], np.int64).reshape(-1, count),
            np.array([[int(f.crc32c, 16) for f in of] for of in files], np.uint32).reshape(-1, count),
        )

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[ShardEntry]:
        return map(self._entry, range(len(self)))

    @overload
    def __getitem__(self, number: int) -> ShardEntry: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[ShardEntry]: ...

    def __getitem__(self, number: int | slice) -> ShardEntry | Sequence[ShardEntry]:
        found = range(len(self))[number]
        return self._entry(found) if isinstance(found, int) else tuple(map(self._entry, found))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardTable | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def file_name(self, number: int) -> str:
        """Name of the shard's file."""
        return self._name(number) + self.suffixes[0]

    def split_mask(self, split: str) -> npt.NDArray[np.bool_]:
        """bool [n]: which shards are of `split`."""
        known = self.split_names.index(split) if split in self.split_names else -1
        chosen: npt.NDArray[np.bool_] = self.splits == known
        return chosen

    def select(self, chosen: npt.NDArray[np.bool_]) -> "ShardTable":
        """Those that are True."""
        if chosen.all():
            return self
        every = (*_COLUMNS, "largest")
        known = {name: getattr(self, name) for name in every}
        columns: dict[str, Any] = {n: c if c is None else c[chosen] for n, c in known.items()}
        return replace(self, **columns)

    def begins_with(self, other: "ShardTable") -> bool:
        """Whether its first shards are those of `other`, byte for byte: it is the same, or an update."""
        count = len(other)
        ours, theirs = (np.array(table.split_names)[table.splits] for table in (self, other))
        columns = [(getattr(self, name), getattr(other, name)) for name in _COLUMNS if name != "splits"]
        return self.suffixes == other.suffixes and all(
            np.array_equal(new[:count], old) for new, old in ((ours, theirs), *columns)
        )

    def arrays(self) -> dict[str, Array]:
        """The columns of the index."""
        arrays = {f"{SHARD}{name}": getattr(self, name) for name in _COLUMNS}
        return arrays if self.largest is None else {**arrays, f"{SHARD}largest": self.largest}

    @property
    def starts(self) -> Ints:
        """int64 [n], the row of each shard's first sample in the index."""
        starts: Ints = np.cumsum(self.samples) - self.samples
        return starts

    def rows_of_split(self, split: str) -> Rows:
        """The rows of the index that the shards of `split` hold: a range, unless updates came between."""
        chosen = np.flatnonzero(self.split_mask(split))
        starts, samples = self.starts[chosen], self.samples[chosen]
        if (starts[1:] == (starts + samples)[:-1]).all():
            return range(int(starts[0]), int(starts[-1] + samples[-1])) if len(chosen) else range(0)
        return np.flatnonzero(np.repeat(self.split_mask(split), self.samples))

    def samples_per_split(self) -> dict[str, int]:
        """Split -> how many samples its shards hold."""
        return {name: int(self.samples[self.split_mask(name)].sum()) for name in self.split_names}

    def _name(self, number: int) -> str:
        return shard_name(self.split_names[self.splits[number]], int(self.numbers[number]))

    def _entry(self, number: int) -> ShardEntry:
        name = self._name(number)
        about = zip(self.suffixes, self.bytes[number].tolist(), self.crc32c[number].tolist(), strict=True)
        files = tuple(FileEntry(f"{name}{suffix}", size, f"{crc:08x}") for suffix, size, crc in about)
        return ShardEntry(name, self.split_names[self.splits[number]], int(self.samples[number]), files)


def read_table(file: IndexFile, split_names: tuple[str, ...], recipe: Recipe) -> ShardTable:
    """The shards of a dataset of these splits, made by this recipe.

    Raises:
        IndexFileError: the index is damaged, or says what cannot be.
    """
    columns: dict[str, Any] = {name: file.read(f"{SHARD}{name}") for name in _COLUMNS}
    if f"{SHARD}largest" in file.places:
        columns["largest"] = file.read(f"{SHARD}largest")
    table = ShardTable(split_names, suffixes_of(FORMATS[recipe.format]), **columns)
    try:
        _check(table, file.places["ids"].shape[0], recipe)
    except ValueError as error:
        raise damaged_index_error(file.path, str(error)) from error
    return table


def _check(table: ShardTable, samples: int, recipe: Recipe) -> None:
    """Raise ValueError unless this can be the table of the shards of so many samples."""
    numbers: dict[str, tuple[npt.NDArray[Any], int, int]] = {
        "samples": (table.samples, 1, samples),
        "split": (table.splits, 0, len(table.split_names) - 1),
        "number": (table.numbers, 0, _MOST_NUMBER),
        "bytes": (table.bytes, 1, _MOST_BYTES),
        "largest sides": (table.samples[:0] if table.largest is None else table.largest, 1, MAX_KEPT_SIDE),
    }
    for name, (values, low, high) in numbers.items():
        if len(values) and not low <= int(values.min()) <= int(values.max()) <= high:
            raise ValueError(
                f"{name} of shards from {values.min():,} to {values.max():,}, not from {low:,} to {high:,}"
            )
    if int(table.samples.sum()) != samples:
        raise ValueError(f"shards of {int(table.samples.sum()):,} samples, expected {samples:,}")
    if table.bytes.sum(dtype=np.float64) > _MOST_BYTES:
        raise ValueError(f"shards of more than {_MOST_BYTES:,} bytes")
    if (np.bincount(table.splits, minlength=len(table.split_names)) == 0).any():
        raise ValueError("a split without shards")
    if (np.diff(np.sort((table.splits.astype(np.int64) << 32) + table.numbers)) == 0).any():
        raise ValueError("a shard is there twice")
    if recipe.stored_size is not None:
        pixels_bytes = math.prod(sides(recipe.stored_size)) * recipe.pixel_bytes
        most_bytes = most_pixels_bytes(table.bytes[:, 0], holds_pixels=FORMATS[recipe.format].holds_pixels)
        if (table.samples * pixels_bytes > most_bytes).any():
            raise ValueError("shards of fewer bytes than their samples have")


def _number(shard: ShardEntry) -> int:
    return int(shard.name.removeprefix(f"{shard.split}-"))

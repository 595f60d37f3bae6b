"""The shards of a dataset in columns, `shards.safetensors`: a set of 600,000 of them opens at once.

Of the n shards, in written order, of format with f files each; an index of c columns (see
`precache.dataset.index`):

    splits            int32  [n]     numbers of the manifest's splits
    numbers           int64  [n]     of the shard among those of its split: its name, see `shard_name`
    samples           int64  [n]     how many it holds
    bytes             int64  [n, f]  sizes of its files
    crc32c            uint32 [n, f]  CRC-32C of its files
    index_checksums   uint64 [n, c]  XXH3-64 of its rows of each column of the index, by the columns' names
    index_header      uint64 [1]     XXH3-64 of the header of the index
    largest           int32  [n, 2]  the greatest height and width of a picture stored in it, in pixels, where
                                     these vary
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from precache.dataset.arrays import Arrays, damaged, read_arrays, write_arrays
from precache.dataset.files import FileEntry, Held
from precache.dataset.index import Ints, RowChecksums, Sizes, name_after
from precache.errors import DatasetError, SettingError
from precache.formats import Format
from precache.recipe import SPLIT_NAME

TABLE_NAME = "shards.safetensors"
_MOST_SAMPLES = 2**40  # of a shard: their sum stays within 64 bits
_MOST_NUMBER = 2**40
_COLUMNS = {
    "splits": np.int32,
    "numbers": np.int64,
    "samples": np.int64,
    "bytes": np.int64,
    "crc32c": np.uint32,
}
Crcs: TypeAlias = npt.NDArray[np.uint32]


class TableError(DatasetError):
    """The table of shards cannot be read, or is not as it was written.

    Attributes:
        file_name: of the table.
    """

    def __init__(self, message: str, file_name: str = "") -> None:
        super().__init__(message)
        self.file_name = file_name


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
        raise SettingError(f"{split!r:.99} is no name of a split; write letters and digits, such as train")
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
        rows: XXH3-64 of rows of the index; None until that is written.
    """

    split_names: tuple[str, ...]
    suffixes: tuple[str, ...]
    splits: Sizes
    numbers: Ints
    samples: Ints
    bytes: Ints
    crc32c: Crcs
    rows: RowChecksums | None = None
    largest: Sizes | None = None

    @classmethod
    def of(
        cls,
        entries: Iterable[ShardEntry],
        form: Format,
        rows: RowChecksums | None = None,
        largest: Sizes | None = None,
    ) -> "ShardTable":
        """The table of these shards.

        Raises:
            ValueError: one of them has names that no conversion gives, or other files.
        """
        listed = list(entries)
        split_names = tuple(dict.fromkeys(shard.split for shard in listed))
        number_of = {split: number for number, split in enumerate(split_names)}
        for shard in listed:
            names = tuple(file.name for file in shard.files)
            if not _is_as_made(shard) or names != file_names(shard.name, form):
                raise ValueError(f"files of the shard {shard.name!r}: not as this project names them")
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
            rows,
            largest,
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

    def has_file(self, name: str) -> bool:
        """Whether a shard has a file of this name."""
        stem, dot, suffix = name.partition(".")
        split, _, number = stem.rpartition("-")
        if f"{dot}{suffix}" not in self.suffixes or not number.isdecimal() or len(number) > 18:
            return False
        is_it = self.of_split(split) & (self.numbers == int(number))
        return bool(is_it.any()) and stem == shard_name(split, int(number))

    def of_split(self, split: str) -> npt.NDArray[np.bool_]:
        """bool [n]: which shards are of `split`."""
        known = self.split_names.index(split) if split in self.split_names else -1
        chosen: npt.NDArray[np.bool_] = self.splits == known
        return chosen

    def select(self, chosen: npt.NDArray[np.bool_]) -> "ShardTable":
        """Those that are True."""
        if chosen.all():
            return self
        rows, largest = self.rows, self.largest
        return replace(
            self,
            **{name: getattr(self, name)[chosen] for name in _COLUMNS},
            rows=rows if rows is None else RowChecksums(rows.header, rows.columns[chosen]),
            largest=largest if largest is None else largest[chosen],
        )

    def samples_of_splits(self) -> dict[str, int]:
        """Split -> how many samples its shards hold."""
        return {name: int(self.samples[self.of_split(name)].sum()) for name in self.split_names}

    def _name(self, number: int) -> str:
        return shard_name(self.split_names[self.splits[number]], int(self.numbers[number]))

    def _entry(self, number: int) -> ShardEntry:
        name = self._name(number)
        about = zip(self.suffixes, self.bytes[number].tolist(), self.crc32c[number].tolist(), strict=True)
        files = tuple(FileEntry(f"{name}{suffix}", size, f"{crc:08x}") for suffix, size, crc in about)
        return ShardEntry(name, self.split_names[self.splits[number]], int(self.samples[number]), files)


def write_table(folder: Path, table: ShardTable, updates: int = 0) -> FileEntry:
    """Write the table of a dataset of so many updates into `folder`."""
    assert table.rows is not None
    arrays: Arrays = {name: getattr(table, name) for name in _COLUMNS}
    arrays["index_checksums"] = table.rows.columns
    arrays["index_header"] = np.array([table.rows.header], np.uint64)
    if table.largest is not None:
        arrays["largest"] = table.largest
    entry, _ = write_arrays(folder / name_after(TABLE_NAME, updates), arrays)
    return entry


def read_table(held: Held, entry: FileEntry, split_names: tuple[str, ...], form: Format) -> ShardTable:
    """The table that `entry` of a manifest describes.

    Raises:
        TableError: it cannot be read, is damaged, or is none of a dataset of these splits and this format.
    """
    with held(entry) as path:
        try:
            arrays = read_arrays(path, entry)
        except DatasetError as error:
            raise TableError(str(error), entry.name) from error
    suffixes = suffixes_of(form)
    samples = arrays.get("samples", np.empty(0, np.int64))
    count, files = len(samples), len(suffixes)
    shapes = {"bytes": (count, files), "crc32c": (count, files)}
    fitting = count > 0 and all(
        name in arrays and arrays[name].dtype == dtype and arrays[name].shape == shapes.get(name, (count,))
        for name, dtype in _COLUMNS.items()
    )
    largest, sums, header = (arrays.get(name) for name in ("largest", "index_checksums", "index_header"))
    fitting = fitting and (largest is None or (largest.dtype == np.int32 and largest.shape == (count, 2)))
    if not fitting or sums is None or header is None or not _are_checksums(sums, header, count):
        raise TableError(str(damaged(path, "its columns are not as this project writes them")), entry.name)
    columns: dict[str, Any] = {name: arrays[name] for name in _COLUMNS}
    rows = RowChecksums(int(header[0]), sums)
    table = ShardTable(split_names, suffixes, **columns, rows=rows, largest=largest)
    if problem := _problem(table):
        raise TableError(str(damaged(path, problem)), entry.name)
    return table


def _are_checksums(sums: npt.NDArray[Any], header: npt.NDArray[Any], count: int) -> bool:
    return (
        sums.dtype == header.dtype == np.uint64
        and header.shape == (1,)
        and sums.ndim == 2
        and len(sums) == count
    )


def _problem(table: ShardTable) -> str:
    """What an edited table says, and no conversion; else nothing."""
    if table.splits.min() < 0 or table.splits.max() >= len(table.split_names):
        return "a shard is of no split"
    if table.samples.min() < 1 or table.samples.max() > _MOST_SAMPLES or table.bytes.min() < 0:
        return "a shard has an impossible number of samples or bytes"
    if table.numbers.min() < 0 or table.numbers.max() > _MOST_NUMBER:
        return "a shard has an impossible number"
    names = table.numbers * len(table.split_names) + table.splits
    names.sort()
    return "a shard is named twice" if (names[1:] == names[:-1]).any() else ""


def _is_as_made(shard: ShardEntry) -> bool:
    """Whether a conversion gives the shard this name."""
    number = str(shard.name).removeprefix(f"{shard.split}-")
    return number.isdecimal() and len(number) < 19 and shard.name == shard_name(shard.split, int(number))


def _number(shard: ShardEntry) -> int:
    return int(shard.name.removeprefix(f"{shard.split}-"))

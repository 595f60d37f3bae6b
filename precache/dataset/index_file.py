"""The file of an index, of which the rows of one shard are read at a time.

What is read of a shard is compared with its checksum in the table of shards, and kept for a while. Nothing
stays open, so that it may be pickled, forked and used by several threads.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from precache.dataset.arrays import Header, Place, checksum_of, damaged, header_bytes, parse_header
from precache.dataset.columns import ENDS, VALUES, Column
from precache.dataset.files import FileEntry, Held
from precache.dataset.index import REMEDY, Ints, ends_of
from precache.dataset.shard_table import ShardTable
from precache.errors import DatasetError, SourceError
from precache.pictures.reading import steadily
from precache.storage import read_regular_part

_KEPT_BYTES = 16 << 20  # of rows, in each process
_FIRST_BYTES = 1 << 16  # hold the header of any usual index
_NEEDED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "ids": (np.int64, ()),
    "labels": (np.int64, ()),
    "source_sizes": (np.int32, (2,)),
    "checksums": (np.uint64, ()),
    "source_checksums": (np.uint64, ()),
    "path_ends": (np.int64, ()),
    "paths": (np.uint8, ()),
}
_MAY_BE: dict[str, tuple[Any, tuple[int, ...]]] = {
    "shapes": (np.int32, (2,)),
    "mask_checksums": (np.uint64, ()),
    "removed": (np.uint8, ()),
    "target_ends": (np.int64, ()),
}
Range = tuple[int, int]
Array = npt.NDArray[Any]


def open_index(
    held: Held,
    entry: FileEntry,
    table: ShardTable,
    chosen: npt.NDArray[np.bool_],
    limits: Mapping[str, Range],
) -> "IndexFile":
    """The index that `entry` of a manifest describes, of the chosen shards of its table.

    Args:
        limits: least and greatest value that columns may hold.

    Raises:
        DatasetError: it cannot be read, or is not as it was written, as far as its size and header tell.
    """
    with held(entry) as path:
        header = _read_header(path, entry, table)
    first_rows = np.cumsum(table.samples) - table.samples
    for problem in _problems(header.places, int(table.samples.sum()), table):
        raise damaged(path, problem)
    return IndexFile((held, entry, path), header, table.select(chosen), first_rows[chosen], limits)


class IndexFile:
    """The rows of the shards of a split in an index.

    Args:
        file: which one it is, and where it lies.
        header: of the file.
        table: the shards.
        first_rows: int64 [shards], where the rows of each begin.
        limits: least and greatest value that columns may hold.
    """

    def __init__(
        self,
        file: tuple[Held, FileEntry, Path],
        header: Header,
        table: ShardTable,
        first_rows: Ints,
        limits: Mapping[str, Range],
    ) -> None:
        assert table.rows is not None
        self._held, self._entry, self.path = file
        self.places = header.places
        self.starts = np.concatenate(([0], np.cumsum(table.samples)))
        self._table, self._first_rows, self._limits = table, first_rows, limits
        self._sums, self._number_of = table.rows.columns, {n: i for i, n in enumerate(sorted(header.places))}
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], tuple[Array, ...]] = OrderedDict()
        self._kept_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def rows(self, name: str, shard: int) -> Array:
        """The rows of a shard in a column of one value, or k, each.

        Raises:
            DatasetError: they cannot be read, or are not as they were written.
        """
        return self._known(name, shard)[0]

    def values(self, name: str, shard: int) -> tuple[Array, Ints]:
        """The values of a shard in a column of any number each, and where each sample's end: from 0 on."""
        values, ends = self._known(name, shard)
        return values, ends

    def _known(self, name: str, shard: int) -> tuple[Array, ...]:
        with self._lock:
            if (found := self._kept.get((name, shard))) is not None:
                self._kept.move_to_end((name, shard))
                return found
        ragged = ends_of(name) in self.places
        read = self._read_values(name, shard) if ragged else (self._read_rows(name, shard),)
        self._check_limits(name, shard, read[0])
        with self._lock:
            if (name, shard) not in self._kept:
                self._kept[name, shard] = read
                self._kept_bytes += sum(array.nbytes for array in read)
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= sum(array.nbytes for array in self._kept.popitem(last=False)[1])
        return read

    def _read_rows(self, name: str, shard: int) -> Array:
        first = int(self._first_rows[shard])
        return self._read(name, shard, first, first + int(self._table.samples[shard]))

    def _read_values(self, name: str, shard: int) -> tuple[Array, ...]:
        ends, first = self._read_rows(ends_of(name), shard), int(self._first_rows[shard])
        before = 0
        if first:  # no row of this shard: what it begins is compared
            place = self.places[ends_of(name)]
            before = int.from_bytes(self._read_bytes(place, first - 1, first, shard), "little")
        bounds = np.concatenate(([before], ends))
        if before > self.places[name].shape[0] or bounds[-1] > self.places[name].shape[0]:
            raise self._damaged(shard, f"its {name} end behind the column")
        if (np.diff(bounds) < 0).any():
            raise self._damaged(shard, f"its {name} do not add up")
        return self._read(name, shard, before, int(bounds[-1])), ends - before

    def _read(self, name: str, shard: int, start: int, stop: int) -> Array:
        """Rows of the file, those of a shard, compared with their checksum."""
        place = self.places[name]
        content = self._read_bytes(place, start, stop, shard)
        if checksum_of(content) != self._sums[shard, self._number_of[name]]:
            raise self._damaged(shard, f"the checksum of its {name} is another")
        return np.frombuffer(content, place.dtype).reshape(stop - start, *place.shape[1:])

    def _read_bytes(self, place: Place, start: int, stop: int, shard: int) -> bytes:
        at, count = place.start + start * place.row_bytes, (stop - start) * place.row_bytes
        with self._held(self._entry) as path:
            content = _read_part(path, at, count)
        if len(content) != count:
            raise self._damaged(shard, f"the file ends before byte {at + count:,}")
        return content

    def _check_limits(self, name: str, shard: int, values: Array) -> None:
        least, greatest = self._limits.get(name, (None, None))
        if least is not None and len(values) and (values.min() < least or values.max() > greatest):
            raise self._damaged(shard, f"its {name} are not from {least} to {greatest:,}")

    def _damaged(self, shard: int, why: str) -> DatasetError:
        file = self._table.file_name(shard)
        return DatasetError(f"{self.path}: its rows of the shard {file} are damaged ({why}); {REMEDY}")


def _read_header(path: Path, entry: FileEntry, table: ShardTable) -> Header:
    try:
        found_bytes = path.stat().st_size
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from error
    if found_bytes != entry.bytes:
        raise damaged(path, f"expected {entry.bytes:,} bytes, got {found_bytes:,}")
    assert table.rows is not None
    try:
        start = _read_part(path, 0, _FIRST_BYTES)
        if (count := header_bytes(start)) > len(start):
            start = _read_part(path, 0, count)
        header = parse_header(start[:count], found_bytes)
    except ValueError as error:
        raise damaged(path, str(error)) from error
    if header.checksum != table.rows.header:
        raise damaged(path, "the checksum of its header is another")
    return header


def _read_part(path: Path, start: int, count: int) -> bytes:
    try:
        return steadily(lambda: read_regular_part(path, start, count), path)
    except SourceError as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise DatasetError(f"{path}: cannot be read ({reason}); {REMEDY}") from error


def _problems(places: Mapping[str, Place], samples: int, table: ShardTable) -> Iterator[str]:
    """What is wrong with the columns of an index of so many samples."""
    assert table.rows is not None
    if table.rows.columns.shape[1] != len(places):
        yield "the table of shards has checksums of other columns"
    yield from (f"column {name} is missing" for name in _NEEDED if name not in places)
    for name, place in places.items():
        dtype, row_shape = (_NEEDED | _MAY_BE).get(name, (place.dtype, place.shape[1:]))
        has_ends = ends_of(name) in places
        if (
            (place.dtype, place.shape[1:]) != (np.dtype(dtype), row_shape)
            or not place.shape
            or (place.shape[0] != samples and not has_ends)
        ):
            yield f"column {name} is of another shape"
        if name.startswith(ENDS) and place.dtype != np.int64:
            yield f"column {name} is of another shape"
        if name == "targets" or name.startswith(VALUES):
            none = np.empty((0, *place.shape[1:]), place.dtype)
            try:
                Column(none, np.empty(0, np.int64) if has_ends else None)
            except ValueError as error:
                yield f"a field has {error}"

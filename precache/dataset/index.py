"""Reading and writing `dataset.index`: columns that describe a dataset's samples, shards and source.

It answers questions about samples without opening a shard. It is a safetensors file
(https://huggingface.co/docs/safetensors) with another suffix, so that the pattern `*.safetensors` matches
shards alone. Its first 8 bytes are the length of the header; the header is JSON with dtype, shape and
position of each array; the arrays follow, one behind the other.

Columns of the n samples, in written order:

    ids               int64  [n]     ranks in the sorted scan of the source
    labels            int64  [n]     indices of the manifest's classes
    source_sizes      int32  [n, 2]  width and height of the upright source picture, in pixels
    checksums         uint64 [n]     XXH3-64 of the stored sample: the pixels of `shards`, else the JPEG
    byte_ranges       int64  [n, 2]  first byte of the sample in its shard, and number of its bytes
    paths             text           paths in the source
    value:NAME                       the field of this name, of any kind of `precache.dataset.columns`
    targets                          targets, of any such kind, where samples have not just one class each
    shapes            int32  [n, 2]  height and width of the stored picture, in pixels, where these vary

Columns of the s shards, see `precache.dataset.shard_table`:

    shard:...

Columns of all pictures of the source, rejected ones included, by id, to detect that the source has changed:

    source:modified_ns  int64  [m]   times of their last writes, as the file system counts, in ns
    source:checksums    uint64 [m]   XXH3-64 of the files

The times belong to the source: where they differ, as in a copy of a tree, this file's bytes and its checksum
in the manifest differ, too. No other output depends on them, and a dataset's digest leaves them out, so that
both conversions are the same dataset.

Columns of r pictures that cannot be decoded, and of i paths that are no pictures, where there are any:

    rejected:ids                       int64 [r]   ids that are reserved for these pictures
    rejected:paths, rejected:reasons   text
    ignored:paths, ignored:reasons     text

A column whose samples have any number of values, such as text, which is uint8, comes with `ends:COLUMN`,
int64 [n]: the end of each sample's values. The rows of a shard are one range of each column.

The file is mapped: the processes of a machine share the pages that they use, and need no other memory for it.
The manifest has checksums of the header, which is compared when the file is mapped, and of each column, which
is compared when a process first uses it. It is never truncated: that would kill the processes that have
mapped it with SIGBUS.
"""

import csv
import io
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import google_crc32c
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from precache.dataset.bounds import Limits
from precache.dataset.columns import Column, Kind, Rows, Target, rows_at
from precache.dataset.files import READ_REMEDY, FileEntry, LocalFile
from precache.errors import DatasetError, SampleError, SourceError
from precache.pictures.reading import read_with_retries
from precache.storage import atomic_write, checksum_of, open_regular
from precache.storage.stored_json import Count, decode, encode

REMEDY = "run 'precache verify' on its folder, then convert it again with --overwrite"
CONVERT_AGAIN = "remove the dataset and convert it again"
"""Remedy where it is unknown which files belong to the dataset, so that --overwrite is refused."""
VALUE, ENDS, SHARD, SOURCE = "value:", "ends:", "shard:", "source:"
"""Prefixes of the names of columns."""
_OTHER_PREFIXES = (SHARD, SOURCE, "rejected:", "ignored:")  # of columns that are not of the samples
Array: TypeAlias = npt.NDArray[Any]
Ints: TypeAlias = npt.NDArray[np.int64]
Sizes: TypeAlias = npt.NDArray[np.int32]
Checksums: TypeAlias = npt.NDArray[np.uint64]
INDEX_NAME: Final = "dataset.index"
REJECTED_NAME = "rejected.csv"
_TEXT_ERRORS = "surrogatepass"  # names of files may be no Unicode
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_QUOTE = 200  # characters of an error that quotes the file
Dtype: TypeAlias = Literal["U8", "I32", "U32", "I64", "U64", "F64"]
"""Dtype of a column, as a header of safetensors names it."""
_DTYPES: dict[Dtype, np.dtype[Any]] = {
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F64": np.dtype(np.float64),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class IndexFileError(DatasetError):
    """The index of a dataset is missing, or has changed since it was written."""


class IndexEntry(FileEntry, frozen=True, forbid_unknown_fields=True):
    """Index of a dataset as its manifest describes it.

    Attributes:
        header: XXH3-64 of the header, 16 hex digits.
        columns: name -> XXH3-64 of each column, 16 hex digits.
    """

    name: Literal["dataset.index"]
    header: str
    columns: dict[str, str]


class Counts(Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of what an index describes.

    Attributes:
        converted: samples in all splits.
        rejected: pictures that could not be decoded.
        ignored: paths of the source that are no pictures.
        shards: shards of all splits.
    """

    converted: Count
    rejected: Count
    ignored: Count
    shards: Count

    @property
    def scanned(self) -> int:
        """Number of paths that the source holds; all ids are less than that."""
        return self.converted + self.rejected + self.ignored


class ArrayEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """Array in an index, as the file's header describes it.

    Attributes:
        dtype: dtype of the values, little-endian.
        shape: shape of the array.
        data_offsets: first byte behind the header, and the byte behind the last one.
    """

    dtype: Dtype
    shape: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=2)]
    data_offsets: tuple[Count, Count]

    def view(self, data: npt.NDArray[np.uint8]) -> Array:
        """Show the array in `data`, the bytes behind the header."""
        start, stop = self.data_offsets
        return data[start:stop].view(_DTYPES[self.dtype]).reshape(self.shape)

    def lies_in(self, data_bytes: int) -> bool:
        """Whether `data_bytes` behind the header have room for an array of this shape there."""
        start, stop = self.data_offsets
        row_bytes = math.prod(self.shape[1:]) * _DTYPES[self.dtype].itemsize
        # where there are no rows, the other sides must still be more than 0, and no larger than the file
        has_rows_of_size = 0 < row_bytes <= data_bytes
        return has_rows_of_size and stop - start == self.shape[0] * row_bytes and stop <= data_bytes


def damaged_index_error(path: Path, reason: str) -> IndexFileError:
    """Make the error to raise when the index at `path` has changed since it was written."""
    return IndexFileError(f"is damaged ({reason})", path=path, remedy=CONVERT_AGAIN)


@dataclass(frozen=True, slots=True, eq=False)
class SampleIndex:
    """Columns that describe n samples, a row for each sample.

    Attributes:
        columns: name -> column, of an index file or in memory.
        rows: rows of these columns that make up the index, in this order; None for all.
        own: columns of the selected rows that replace those of `columns` or are added to them.
    """

    columns: Mapping[str, Column]
    rows: Rows | None = None
    own: Mapping[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self["ids"]) if self.rows is None else len(self.rows)

    def __contains__(self, name: str) -> bool:
        return name in self.own or name in self.columns

    def __getitem__(self, name: str) -> Column:
        if name in self.own:
            return self.own[name]
        column = self.columns[name]
        return column if self.rows is None else column.view_rows(self.rows)

    def get(self, name: str) -> Column | None:
        """Get the column of this name; None if there is none."""
        if name in self:
            return self[name]
        return None

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(dict.fromkeys((*self.columns, *self.own)))

    @property
    def ids(self) -> Ints:
        """Ids of the samples, int64 [n]."""
        return self["ids"].values

    @property
    def labels(self) -> Ints:
        """Class of each sample, int64 [n]; -1 where it has no class, or several."""
        return self["labels"].values

    @property
    def source_sizes(self) -> Sizes:
        """Width and height of the upright source pictures, in pixels, int32 [n, 2]."""
        return self["source_sizes"].values

    @property
    def checksums(self) -> Checksums:
        """Checksum of each stored sample, uint64 [n]."""
        return self["checksums"].values

    @property
    def byte_ranges(self) -> Column:
        """First byte of each sample in its shard, and number of its bytes, int64 [n, 2]."""
        return self["byte_ranges"]

    @property
    def shapes(self) -> Sizes | None:
        """Height and width of the stored pictures, in pixels, int32 [n, 2]; None if all are of one size."""
        return self["shapes"].values if "shapes" in self else None

    @property
    def targets(self) -> Column | None:
        """Targets of the samples; None if each is labelled with one class, or with nothing."""
        return self.get("targets")

    @property
    def fields(self) -> dict[str, Column]:
        """Columns of the fields, by name."""
        return {name.removeprefix(VALUE): self[name] for name in self.names if name.startswith(VALUE)}

    def with_columns(self, columns: Mapping[str, Column]) -> "SampleIndex":
        """Make an index with these columns added, or put in place of those of the same names."""
        return SampleIndex(self.columns, self.rows, {**self.own, **columns})

    def view_rows(self, rows: Rows) -> "SampleIndex":
        """Make an index of these rows over the same columns; reads nothing, and takes up to 8 bytes a row."""
        own = {name: column.view_rows(rows) for name, column in self.own.items()}
        return SampleIndex(self.columns, rows_at(self.rows, rows), own)

    def select(self, rows: npt.NDArray[Any]) -> "SampleIndex":
        """Make an index of these rows, int64 [m] or bool [n], with columns that are read into memory."""
        rows = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return SampleIndex({name: self[name].select(rows) for name in self.names})

    def check(self, row: int, stored: bytes | npt.NDArray[np.uint8], file: str, damage: str = "") -> None:
        """Compare a sample that was read from a shard with the checksum of what was written.

        Args:
            row: row of the sample.
            stored: bytes or pixels that were read.
            file: path of the shard.
            damage: what is wrong according to the format's own checksum, see `StoredSample`.

        Raises:
            SampleError: the checksums differ, or `damage` is not empty.
        """
        if damage or checksum_of(stored) != self["checksums"][row]:
            raise self.error(row, file, damage)

    def error(self, row: int, file: str, damage: str = "") -> SampleError:
        """Make the error to raise when the sample at `row` is damaged; arguments as of `check`."""
        if damage:
            return SampleError(self._sample_name(row, file), damage)
        reason = "its bytes changed since they were written (checksum)"
        return SampleError(self._sample_name(row, file), reason, remedy=REMEDY)

    def path(self, row: int) -> str:
        """Path in the source of the sample at `row`."""
        return os.fsdecode(self["paths"].row_array(row).tobytes())

    def _sample_name(self, row: int, file: str) -> str:
        return f"{file}: sample {self['ids'][row]} ({self.path(row)})"


@dataclass(frozen=True, slots=True, eq=False)
class SourceState:
    """Columns `source:` of an index: times and checksums of the pictures of the source."""

    modified_ns: Ints
    checksums: Checksums

    def __len__(self) -> int:
        return len(self.checksums)


def column_arrays(columns: Mapping[str, Column]) -> dict[str, Array]:
    """Arrays of columns, values and ends, by their names in an index."""
    arrays = {}
    for name, column in columns.items():
        arrays[name] = column.values
        if column.ends is not None:
            arrays[f"{ENDS}{name}"] = column.ends
    return arrays


def write_index(folder: Path, index: SampleIndex, others: Mapping[str, Array]) -> IndexEntry:
    """Write the index of a dataset.

    Args:
        folder: folder of the dataset.
        index: columns of the samples.
        others: columns of shards, source, rejected and ignored pictures.
    """
    columns = {name: index[name] for name in index.names}
    return write_arrays(folder, {**column_arrays(columns), **others})


def write_arrays(folder: Path, columns: Mapping[str, Array]) -> IndexEntry:
    """Write an index of these columns into `folder`."""
    header: dict[str, ArrayEntry] = {}
    data_bytes = 0
    # the widest dtypes first, so that each array is aligned
    names = sorted(columns, key=lambda name: (-columns[name].itemsize, name))
    for name in names:
        array = columns[name]
        begin, data_bytes = data_bytes, data_bytes + array.nbytes
        header[name] = ArrayEntry(_NAMES[array.dtype], array.shape, (begin, data_bytes))
    text = encode(header)
    text += b" " * (-len(text) % 8)
    header_content = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    checksums, crc = {}, google_crc32c.value(header_content)
    with atomic_write(folder / INDEX_NAME) as file:
        file.write(header_content)
        for name in names:
            part = np.ascontiguousarray(columns[name]).reshape(-1).view(np.uint8)
            checksums[name] = f"{checksum_of(part):016x}"
            file.write(part.data)
            crc = google_crc32c.extend(crc, part)
    return IndexEntry(
        INDEX_NAME,
        len(header_content) + data_bytes,
        f"{crc:08x}",
        header=f"{checksum_of(header_content):016x}",
        columns=dict(sorted(checksums.items())),
    )


class MappedIndex(NamedTuple):
    """Mapped index file: its path, the bytes behind its header, uint8 [bytes], and its arrays by name."""

    path: Path
    data: npt.NDArray[np.uint8]
    arrays: dict[str, ArrayEntry]


class IndexFile:
    """Index file whose header is compared with its checksum when it is mapped, and a column when it is read.

    Several threads may use it. When it is sent to another process, it is mapped there at its first use, which
    detects that the file has changed.

    Args:
        local_file: makes files of the dataset local, see `LocalFile`.
        entry: description of the index in the manifest.

    Raises:
        IndexFileError: the file cannot be read, or has changed since it was written.
    """

    def __init__(self, local_file: LocalFile, entry: IndexEntry) -> None:
        self._local_file, self._entry = local_file, entry
        self._mapped  # noqa: B018 (maps the file now, so that a damaged one is an error here)

    def __getstate__(self) -> dict[str, Any]:
        return {"_local_file": self._local_file, "_entry": self._entry}

    @cached_property
    def _mapped(self) -> MappedIndex:
        with self._local_file(self._entry) as path:
            return _read_header(path, _map_file(path, self._entry), self._entry)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._mapped.path

    @property
    def arrays(self) -> dict[str, ArrayEntry]:
        """Dtypes, shapes and byte ranges of all arrays, by name."""
        return self._mapped.arrays

    def read(self, name: str) -> Array:
        """Read the array of this name.

        Raises:
            IndexFileError: the array has changed since it was written.
        """
        path, data, arrays = self._mapped
        array = arrays[name].view(data)
        if f"{checksum_of(array.reshape(-1).view(np.uint8)):016x}" != self._entry.columns.get(name):
            raise damaged_index_error(path, f"column {name} does not match its checksum")
        return array

    def read_column(self, name: str) -> Column:
        """Read the column of this name: its values and, if samples have any number of them, their ends.

        Raises:
            IndexFileError: the column has changed since it was written.
        """
        values = self.read(name)
        if f"{ENDS}{name}" not in self.arrays:
            return Column(values)
        ends = self.read(f"{ENDS}{name}")
        if len(ends) and (ends[0] < 0 or (ends[1:] < ends[:-1]).any() or ends[-1] > len(values)):
            raise damaged_index_error(self.path, f"the values of column {name} end where there are none")
        return Column(values, ends)


class SampleColumns(Mapping[str, Column]):
    """Columns of the samples in an index, by name.

    A column is read, compared with its checksum and checked against `limits` when a process first uses it.
    """

    def __init__(self, file: IndexFile, limits: Limits) -> None:
        self._file, self._limits = file, limits
        self._checked: dict[str, Column] = {}

    def __reduce__(self) -> Any:
        return SampleColumns, (self._file, self._limits)

    def __iter__(self) -> Iterator[str]:
        return filter(self.__contains__, self._file.arrays)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        is_other = str(name).startswith((ENDS, *_OTHER_PREFIXES))
        return name in self._file.arrays and not is_other

    def __getitem__(self, name: str) -> Column:
        """Column of this name.

        Raises:
            IndexFileError: the column has changed since it was written, or has values out of range.
        """
        if name not in self._checked:
            column = self._file.read_column(name)
            try:
                self._limits.check(name, column)
            except ValueError as error:
                raise damaged_index_error(self._file.path, str(error)[:_MAX_QUOTE]) from error
            self._checked[name] = column
        return self._checked[name]


def read_source_state(file: IndexFile) -> SourceState:
    """Read the columns of the source from an index.

    Raises:
        IndexFileError: a column has changed since it was written.
    """
    return SourceState(file.read(f"{SOURCE}modified_ns"), file.read(f"{SOURCE}checksums"))


@dataclass(frozen=True, slots=True)
class Rejected:
    """Picture that cannot be decoded, and is left out of the dataset.

    Attributes:
        path: path relative to the source tree, with forward slashes.
        reason: what is wrong with the picture.
        id: sample id that is reserved for it; -1 if it was read from the list that `precache check` writes.
        bytes: size of the file when it was read; -1 if it comes from a conversion, which does not record it.
        modified_ns: time of the file's last write when it was read, as the file system counts; -1 likewise.
    """

    path: str
    reason: str
    id: int = field(default=-1, compare=False)
    bytes: int = -1
    modified_ns: int = -1


def left_out_arrays(rejected: Sequence[Rejected], ignored: Sequence[tuple[str, str]]) -> dict[str, Array]:
    """Columns of an index for rejected pictures, and for ignored paths, each (path, reason)."""
    arrays: dict[str, Array] = {}
    if rejected:
        arrays["rejected:ids"] = np.array([picture.id for picture in rejected], np.int64)
        pairs = [(picture.path, picture.reason) for picture in rejected]
        arrays |= _path_and_reason_arrays("rejected", pairs)
    if ignored:
        arrays |= _path_and_reason_arrays("ignored", ignored)
    return arrays


def read_rejected(file: IndexFile, scanned: int) -> tuple[Rejected, ...]:
    """Read the rejected pictures from an index.

    Raises:
        IndexFileError: a column has changed since it was written, or is no text, or has an id that is not
            less than `scanned`.
    """
    pairs = _read_paths_and_reasons(file, "rejected")
    ids = file.read("rejected:ids").tolist() if pairs else []
    if any(not 0 <= id_ < scanned for id_ in ids):
        raise damaged_index_error(file.path, f"a rejected picture has no id from 0 to {scanned:,}")
    return tuple(Rejected(path, reason, id_) for (path, reason), id_ in zip(pairs, ids, strict=True))


def read_ignored(file: IndexFile) -> tuple[tuple[str, str], ...]:
    """Read (path, reason) of each ignored path from an index; raises as `read_rejected`."""
    return _read_paths_and_reasons(file, "ignored")


def write_rejected(folder: Path, rejected: Sequence[Rejected]) -> None:
    """Write `rejected.csv` into `folder` for people to read, unless there are no rejected pictures.

    The index has the same list.
    """
    if not rejected:
        return
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("id", "path", "reason"))
    writer.writerows((sample.id, sample.path, sample.reason) for sample in rejected)
    with atomic_write(folder / REJECTED_NAME) as file:
        file.write(text.getvalue().encode(errors="backslashreplace"))


def _path_and_reason_arrays(section: str, pairs: Sequence[tuple[str, str]]) -> dict[str, Array]:
    columns = {}
    for name, texts in zip(("paths", "reasons"), zip(*pairs, strict=True), strict=True):
        encoded = [text.encode(errors=_TEXT_ERRORS) for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        columns[f"{section}:{name}"] = Column(np.frombuffer(b"".join(encoded), np.uint8), ends)
    return column_arrays(columns)


def _read_paths_and_reasons(file: IndexFile, section: str) -> tuple[tuple[str, str], ...]:
    if f"{section}:paths" not in file.arrays:
        return ()
    columns = [file.read_column(f"{section}:{name}") for name in ("paths", "reasons")]
    try:
        paths, reasons = (
            [column.row_array(row).tobytes().decode(errors=_TEXT_ERRORS) for row in range(len(column))]
            for column in columns
        )
    except UnicodeDecodeError as error:
        raise damaged_index_error(file.path, f"{section}: {error}") from error
    return tuple(zip(paths, reasons, strict=True))


def _map_file(path: Path, entry: IndexEntry) -> npt.NDArray[np.uint8]:
    """Map the file at `path`; IndexFileError unless it is there and has the size of `entry`."""

    def open_and_map() -> npt.NDArray[np.uint8]:
        with open_regular(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            if file_bytes != entry.bytes:
                raise damaged_index_error(path, f"expected {entry.bytes:,} bytes, got {file_bytes:,}")
            if not file_bytes:
                raise damaged_index_error(path, "it has no header")
            return np.frombuffer(mmap.mmap(file.fileno(), file_bytes, access=mmap.ACCESS_READ), np.uint8)

    try:
        return read_with_retries(open_and_map, path)
    except SourceError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise IndexFileError("is missing", path=path, remedy=CONVERT_AGAIN) from error
        reason = getattr(error.__cause__, "strerror", None) or error
        raise DatasetError(f"cannot be read ({reason})", path=path, remedy=READ_REMEDY) from error


def _read_header(path: Path, content: npt.NDArray[np.uint8], entry: IndexEntry) -> MappedIndex:
    """Read the header of a mapped index; IndexFileError unless each of its arrays lies in the file."""
    header_bytes = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES].tobytes(), "little")
    if not _LENGTH_BYTES < header_bytes <= min(len(content), _MAX_HEADER_BYTES):
        raise damaged_index_error(path, "it has no header")
    header = content[:header_bytes].tobytes()
    if f"{checksum_of(header):016x}" != entry.header:
        raise damaged_index_error(path, "its header does not match its checksum")
    arrays = decode(
        header[_LENGTH_BYTES:], dict[str, ArrayEntry], path=path, error=IndexFileError, remedy=CONVERT_AGAIN
    )
    data = content[header_bytes:]
    for name, array in arrays.items():
        if not array.lies_in(len(data)):
            raise damaged_index_error(path, f"column {name!r:.99} of {array.shape} does not lie in its file")
    return MappedIndex(path, data, arrays)


_Form: TypeAlias = tuple[type[np.generic], tuple[int | None, ...]]
"""Dtype and shape of a column; None stands for any length."""


def check_columns(
    file: IndexFile, counts: Counts, target: Target, fields: Mapping[str, Kind], *, files: int, varying: bool
) -> None:
    """Check that an index has the columns that its manifest requires, in their dtypes and shapes.

    Args:
        counts, target, fields: from the manifest.
        files: number of files of each shard.
        varying: whether the stored pictures have sizes of their own.

    Raises:
        IndexFileError: a column is missing, of another form, or there is one more.
    """
    forms = _column_forms(counts, files, varying=varying)
    kinds: dict[str, tuple[str, ...]] = {f"{VALUE}{name}": (kind,) for name, kind in fields.items()}
    if target == "classes":
        kinds["targets"] = ("ragged",)
        forms["targets"] = np.int64, (None,)
    elif target == "number":
        kinds["targets"] = ("int", "float", "vector")
    for name, allowed_kinds in kinds.items():
        array, has_ends = file.arrays.get(name), f"{ENDS}{name}" in file.arrays
        kind = "no column" if array is None else _kind(array, has_ends=has_ends)
        if array is None or kind not in allowed_kinds:
            raise damaged_index_error(file.path, f"{name!r:.99} is {kind}, expected {allowed_kinds}")
        rows = None if has_ends else counts.converted
        forms.setdefault(name, (_DTYPES[array.dtype].type, (rows, *array.shape[1:])))
        if has_ends:
            forms[f"{ENDS}{name}"] = np.int64, (counts.converted,)
    if unlike := sorted(forms.keys() ^ file.arrays.keys()):
        problem = "missing" if unlike[0] in forms else "none of such an index"
        raise damaged_index_error(file.path, f"column {unlike[0]!r:.99} is {problem}")
    for name, (dtype, shape) in forms.items():
        array = file.arrays[name]
        sides = [side if length is None else length for side, length in zip(array.shape, shape, strict=False)]
        if _DTYPES[array.dtype] != dtype or len(array.shape) != len(shape) or [*array.shape] != sides:
            expected = f"expected {np.dtype(dtype)} {shape}"
            raise damaged_index_error(
                file.path, f"column {name!r:.99} is {array.dtype} {array.shape}, {expected}"
            )


def _column_forms(counts: Counts, files: int, *, varying: bool) -> dict[str, _Form]:
    """Forms of the columns that an index has whatever its targets and fields are."""
    samples, shards = counts.converted, counts.shards
    pictures = samples + counts.rejected
    forms: dict[str, _Form] = {
        "ids": (np.int64, (samples,)),
        "labels": (np.int64, (samples,)),
        "source_sizes": (np.int32, (samples, 2)),
        "checksums": (np.uint64, (samples,)),
        "byte_ranges": (np.int64, (samples, 2)),
        **_text_forms("paths", samples),
        "shard:splits": (np.int32, (shards,)),
        "shard:numbers": (np.int64, (shards,)),
        "shard:samples": (np.int64, (shards,)),
        "shard:bytes": (np.int64, (shards, files)),
        "shard:crc32c": (np.uint32, (shards, files)),
        "source:modified_ns": (np.int64, (pictures,)),
        "source:checksums": (np.uint64, (pictures,)),
    }
    if varying:
        forms |= {"shapes": (np.int32, (samples, 2)), "shard:largest": (np.int32, (shards, 2))}
    if counts.rejected:
        forms["rejected:ids"] = np.int64, (counts.rejected,)
    for part, count in (("rejected", counts.rejected), ("ignored", counts.ignored)):
        if count:
            forms |= _text_forms(f"{part}:paths", count) | _text_forms(f"{part}:reasons", count)
    return forms


def _text_forms(name: str, rows: int) -> dict[str, _Form]:
    return {name: (np.uint8, (None,)), f"{ENDS}{name}": (np.int64, (rows,))}


def _kind(array: ArrayEntry, *, has_ends: bool) -> str:
    """Kind of a column, or what it is where it is of no kind."""
    dimensions = len(array.shape)
    if array.dtype == "U8" and has_ends and dimensions == 1:
        return "text"
    if array.dtype not in ("I64", "F64"):
        return array.dtype
    if has_ends:
        return "ragged"
    if dimensions == 2:
        return "vector"
    return "int" if array.dtype == "I64" else "float"

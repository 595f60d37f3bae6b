"""`dataset.index`: what is known of samples, shards and the source, so that no shard is opened for it.

It is a safetensors file (https://huggingface.co/docs/safetensors) under another suffix, so that a pattern
`*.safetensors` finds shards alone. 8 bytes have the length of the header; the header is JSON, and has dtype,
shape and place of each array; the arrays follow, one behind the other.

Of the n samples, in written order:

    ids               int64  [n]     ranks in the sorted scan of the source
    labels            int64  [n]     indices of the manifest's classes
    source_sizes      int32  [n, 2]  width and height of the upright source picture, in pixels
    checksums         uint64 [n]     XXH3-64 of what is stored: the pixels of `shards`, else the JPEG
    paths             text           paths in the source
    value:NAME        see `precache.dataset.columns`: the field of this name
    targets           likewise, where the samples are not labelled with one class each
    shapes            int32  [n, 2]  height and width of what is stored, in pixels, where these vary
    mask_checksums    uint64 [n]     XXH3-64 of the pixels of the masks, where there are any
    removed           uint8  [n]     1: an update found the picture gone or changed, and it is served no more;
                                     only where there are such

Of the s shards, see `precache.dataset.shard_table`:

    shard:...

Of all pictures of the source, rejected ones too, by their ids, to tell whether it is still what it was:

    source:bytes        int64  [m]   sizes of the files
    source:modified_ns  int64  [m]   when they were last written, as the file system counts
    source:checksums    uint64 [m]   XXH3-64 of the files

These times belong to the source: where they differ, as in a copy of a tree, so do the bytes of this file, and
its checksum in the manifest. Nothing else that is written depends on them, and a dataset's digest leaves them
out: both conversions are the same dataset.

Of r pictures that cannot be decoded, and i paths that are no pictures, where there are any:

    rejected:ids                       int64 [r]   of the samples that they would be
    rejected:paths, rejected:reasons   text
    ignored:paths, ignored:reasons     text

A column whose samples have any number of values, such as text, which is uint8, comes with `ends:COLUMN`,
int64 [n]: where the values of each sample end. The rows of a shard are one range of each column.

The file is mapped: all processes of a machine share what they use of it, and it costs no other memory. The
manifest has checksums of the header, which is compared when the file is mapped, and of each column, which is
compared when a process first asks for it.

An update (see `precache.conversion.update`) writes a new index, `dataset-00001.index` and so on, because
others may have mapped the one before. Nobody truncates such a file: that would end them by SIGBUS.
"""

import csv
import io
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash

from precache.dataset.bounds import Limits
from precache.dataset.columns import Column, Rows, rows_at
from precache.dataset.files import FileEntry, Held
from precache.errors import DatasetError, SampleError, SourceError
from precache.pictures.reading import read_with_retries
from precache.storage import atomic_write, open_regular

REMEDY = "run 'precache verify' on its folder, then convert it again with --overwrite"
AGAIN = "remove the dataset and convert it again"
"""Where nobody knows which files are the dataset's, so that it cannot be overwritten."""
VALUE, ENDS, SHARD, SOURCE = "value:", "ends:", "shard:", "source:"
"""Before the names of columns."""
_OTHERS = (SHARD, SOURCE, "rejected:", "ignored:")  # before those that are not of the samples
Array: TypeAlias = npt.NDArray[Any]
Ints: TypeAlias = npt.NDArray[np.int64]
Sizes: TypeAlias = npt.NDArray[np.int32]
Checksums: TypeAlias = npt.NDArray[np.uint64]
REJECTED_NAME = "rejected.csv"
_TEXT_ERRORS = "surrogatepass"  # names of files may be no Unicode
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # what the stock reader takes
_MOST_WORDS = 200  # characters of an error that quotes what the file says
_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F64": np.dtype(np.float64),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class IndexFileError(DatasetError):
    """The index of a dataset cannot be read, or is not as it was written."""


@dataclass(frozen=True, slots=True)
class IndexEntry(FileEntry):
    """The index, as a manifest describes it.

    Attributes:
        header: XXH3-64 of its header, 16 hex digits.
        columns: likewise of each column, by name.
    """

    header: str = ""
    columns: dict[str, str] = field(default_factory=dict)


class Place(NamedTuple):
    """Where an array lies: `start` is its first byte in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def checksum_of(stored: bytes | memoryview | npt.NDArray[np.uint8]) -> int:
    """XXH3-64 of something contiguous: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md

    It finds what disks, memory and networks do to bytes, nearly as fast as the CPU's cache is read; it does
    not find what a forger does.
    """
    return xxhash.xxh3_64_intdigest(stored)  # type: ignore[arg-type]  # NumPy 1's arrays do not say Buffer


def index_name(updates: int = 0) -> str:
    """Name of the index of a dataset that was updated so many times."""
    return f"dataset-{updates:05d}.index" if updates else "dataset.index"


def damaged(path: Path, why: str) -> IndexFileError:
    """What to raise of an index that is not as it was written."""
    return IndexFileError(f"{path}: is damaged ({why}); {AGAIN}")


@dataclass(frozen=True, slots=True, eq=False)
class SampleIndex:
    """What is known of samples, a row each.

    Attributes:
        columns: by their names: of an index file, or in memory.
        rows: which rows of these it has, in this order; None: all.
        own: columns of these rows beside `columns`, or in their place.
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
        return column if self.rows is None else column.at(self.rows)

    def get(self, name: str) -> Column | None:
        """The column of this name; None: there is none."""
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
        """Class of each sample, int64 [n]; -1 where it has not just one."""
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
    def shapes(self) -> Sizes | None:
        """Height and width of what is stored; None: all are of one size."""
        return self["shapes"].values if "shapes" in self else None

    @property
    def mask_checksums(self) -> Checksums | None:
        """Checksum of each mask, uint64 [n]; None: there are no masks."""
        return self["mask_checksums"].values if "mask_checksums" in self else None

    @property
    def targets(self) -> Column | None:
        """Targets of the samples; None: each is labelled with one class, or with nothing."""
        return self.get("targets")

    @property
    def fields(self) -> dict[str, Column]:
        """Fields by their names."""
        return {name.removeprefix(VALUE): self[name] for name in self.names if name.startswith(VALUE)}

    @property
    def served(self) -> npt.NDArray[np.bool_]:
        """bool [n]: those that are not removed."""
        if "removed" not in self:
            return np.ones(len(self), np.bool_)
        served: npt.NDArray[np.bool_] = self["removed"].values == 0
        return served

    def with_columns(self, columns: Mapping[str, Column]) -> "SampleIndex":
        """With these instead of those of their names, or beside the others."""
        return SampleIndex(self.columns, self.rows, {**self.own, **columns})

    def at(self, rows: Rows) -> "SampleIndex":
        """The samples of these rows; nothing is read, and rows that are no range take 8 bytes each."""
        own = {name: column.at(rows) for name, column in self.own.items()}
        return SampleIndex(self.columns, rows_at(self.rows, rows), own)

    def select(self, rows: npt.NDArray[Any]) -> "SampleIndex":
        """The samples of these rows, int64 [m] or bool [n], in memory."""
        rows = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return SampleIndex({name: self[name].select(rows) for name in self.names})

    def join(self, other: "SampleIndex") -> "SampleIndex":
        """Its samples, then those of `other`, which has the same columns; without what is removed."""
        names = [name for name in self.names if name != "removed"]
        return SampleIndex({name: Column.concatenate((self[name], other[name])) for name in names})

    def check(self, row: int, stored: bytes | npt.NDArray[np.uint8], file: str, damage: str = "") -> None:
        """Compare what was read of the sample at `row`, from the shard `file`, with what was written.

        Args:
            damage: what the format's own checksum says is wrong with it, see `StoredSample`.

        Raises:
            SampleError: they differ, or it is damaged.
        """
        if damage or checksum_of(stored) != self["checksums"][row]:
            raise self.error(row, file, damage)

    def check_mask(self, row: int, mask: npt.NDArray[np.uint8], file: str) -> None:
        """As `check`, of the pixels of its mask."""
        if "mask_checksums" in self and checksum_of(mask) != self["mask_checksums"][row]:
            raise self.error(row, file, f"its mask changed since it was written (checksum); {REMEDY}")

    def error(self, row: int, file: str, damage: str = "") -> SampleError:
        """What to raise of the damaged sample at `row`, see `check`."""
        reason = damage or f"its bytes changed since they were written (checksum); {REMEDY}"
        return SampleError(f"{file}: sample {self['ids'][row]} ({self.path(row)})", reason)

    def path(self, row: int) -> str:
        """The path in the source of the sample at `row`."""
        return os.fsdecode(self["paths"].array(row).tobytes())


@dataclass(frozen=True, slots=True, eq=False)
class SourceState:
    """The columns `source:` of an index."""

    bytes: Ints
    modified_ns: Ints
    checksums: Checksums

    def __len__(self) -> int:
        return len(self.bytes)

    def arrays(self) -> dict[str, Array]:
        """By their names in the file."""
        return {f"{SOURCE}{name}": getattr(self, name) for name in ("bytes", "modified_ns", "checksums")}


def column_arrays(names: Mapping[str, Column]) -> dict[str, Array]:
    """The arrays of columns, by their names in a file."""
    arrays = {}
    for name, column in names.items():
        arrays[name] = column.values
        if column.ends is not None:
            arrays[f"{ENDS}{name}"] = column.ends
    return arrays


def write_index(
    folder: Path, index: SampleIndex, others: Mapping[str, Array], updates: int = 0
) -> IndexEntry:
    """Write the index of a dataset of so many updates into `folder`; `others`: what is not of the samples."""
    columns = {name: index[name] for name in index.names}
    return write_arrays(folder / index_name(updates), {**column_arrays(columns), **others})


def write_arrays(path: Path, columns: Mapping[str, Array]) -> IndexEntry:
    """Write an index of these columns."""
    header, place = {}, 0
    names = sorted(columns, key=lambda name: (-columns[name].itemsize, name))  # so that each is aligned
    for name in names:
        array = columns[name]
        span = [place, place := place + array.nbytes]
        header[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    checksums, crc = {}, google_crc32c.value(start)
    with atomic_write(path) as file:
        file.write(start)
        for name in names:
            part = np.ascontiguousarray(columns[name]).reshape(-1).view(np.uint8)
            checksums[name] = f"{checksum_of(part):016x}"
            file.write(part.data)
            crc = google_crc32c.extend(crc, part)
    found = f"{checksum_of(start):016x}"
    return IndexEntry(path.name, len(start) + place, f"{crc:08x}", found, dict(sorted(checksums.items())))


class Mapped(NamedTuple):
    """An index file in memory: uint8 [bytes] of it, and the places of its columns by name."""

    path: Path
    content: npt.NDArray[np.uint8]
    places: dict[str, Place]


class IndexFile:
    """An index, whose header is compared when it is mapped, and a column each time it is read.

    Several threads may use it. Sent to another process, it is mapped there when it is first asked for
    something: that finds out whether the file is still the same.

    Args:
        held: of the dataset's files.
        entry: of the manifest.

    Raises:
        IndexFileError: it cannot be read, or is not as it was written.
    """

    def __init__(self, held: Held, entry: IndexEntry) -> None:
        self._held, self._entry = held, entry
        self._mapped  # noqa: B018 (mapped now)

    def __getstate__(self) -> dict[str, Any]:
        return {"_held": self._held, "_entry": self._entry}

    @cached_property
    def _mapped(self) -> Mapped:
        with self._held(self._entry) as path:
            content = _map(path, self._entry)
            return Mapped(path, content, _read_header(path, content, self._entry))

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._mapped.path

    @property
    def places(self) -> dict[str, Place]:
        """Places of all columns, by name."""
        return self._mapped.places

    def read(self, name: str) -> Array:
        """The array of this name.

        Raises:
            IndexFileError: it is not as it was written.
        """
        path, content, places = self._mapped
        place = places[name]
        part = content[place.start : place.start + place.shape[0] * place.row_bytes]
        if name not in self._entry.columns:
            raise damaged(path, f"column {name} has no checksum")
        if f"{checksum_of(part):016x}" != self._entry.columns[name]:
            raise damaged(path, f"column {name} does not match its checksum")
        return part.view(place.dtype).reshape(place.shape)

    def read_column(self, name: str) -> Column:
        """The column of this name: its values and, if samples have any number of them, where they end.

        Raises:
            IndexFileError: it is not as it was written.
        """
        values = self.read(name)
        if f"{ENDS}{name}" not in self.places:
            return Column(values)
        ends = self.read(f"{ENDS}{name}")
        if len(ends) and (ends[0] < 0 or (ends[1:] < ends[:-1]).any() or ends[-1] > len(values)):
            raise damaged(self.path, f"the values of column {name} end where there are none")
        return Column(values, ends)


class SampleColumns(Mapping[str, Column]):
    """The columns of the samples in an index, by their names.

    Each is read when a process first asks for it: compared with its checksum, and its numbers with `limits`.
    """

    def __init__(self, file: IndexFile, limits: Limits) -> None:
        self._file, self._limits = file, limits
        self._compared: dict[str, Column] = {}

    def __reduce__(self) -> Any:
        return SampleColumns, (self._file, self._limits)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._file.places if not name.startswith((ENDS, *_OTHERS)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._file.places

    def __getitem__(self, name: str) -> Column:
        """The column of this name.

        Raises:
            IndexFileError: it is not as it was written, or says what cannot be.
        """
        if name not in self._compared:
            column = self._file.read_column(name)
            try:
                self._limits.check(name, column)
            except ValueError as error:
                raise damaged(self._file.path, str(error)[:_MOST_WORDS]) from error
            self._compared[name] = column
        return self._compared[name]


def read_source_state(file: IndexFile) -> SourceState:
    """The state of the source.

    Raises:
        IndexFileError: it is not as it was written.
    """
    return SourceState(*(file.read(f"{SOURCE}{name}") for name in ("bytes", "modified_ns", "checksums")))


@dataclass(frozen=True, slots=True)
class Rejected:
    """A picture that cannot be decoded, so that it is left out.

    Attributes:
        path: relative to the source tree, with forward slashes.
        reason: what is wrong with it.
        id: of the sample that it would be; -1 if it was read from the list that `precache check` writes.
        bytes: size of the file when it was tried; -1 if it comes from a conversion, which has no such record.
        modified_ns: when the file had last been written then, as the file system counts; or -1, likewise.
    """

    path: str
    reason: str
    id: int = field(default=-1, compare=False)
    bytes: int = -1
    modified_ns: int = -1


def left_out_arrays(rejected: Sequence[Rejected], ignored: Sequence[tuple[str, str]]) -> dict[str, Array]:
    """Both as columns of the index."""
    arrays: dict[str, Array] = {}
    if rejected:
        arrays["rejected:ids"] = np.array([picture.id for picture in rejected], np.int64)
        arrays |= _texts("rejected", [(picture.path, picture.reason) for picture in rejected])
    return arrays | (_texts("ignored", ignored) if ignored else {})


def read_rejected(file: IndexFile) -> tuple[Rejected, ...]:
    """The pictures that were rejected.

    Raises:
        IndexFileError: they cannot be read, or are not as they were written.
    """
    ids = file.read("rejected:ids").tolist() if "rejected:ids" in file.places else ()
    return tuple(
        Rejected(*text, number) for text, number in zip(_read_texts(file, "rejected"), ids, strict=True)
    )


def read_ignored(file: IndexFile) -> tuple[tuple[str, str], ...]:
    """As `read_rejected`: (path, reason) of what was ignored."""
    return _read_texts(file, "ignored")


def write_rejected(folder: Path, rejected: Sequence[Rejected]) -> None:
    """Write `rejected.csv` into `folder`, for people; the dataset has the same. None if none is."""
    if not rejected:
        return
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("id", "path", "reason"))
    writer.writerows((sample.id, sample.path, sample.reason) for sample in rejected)
    with atomic_write(folder / REJECTED_NAME) as file:
        file.write(text.getvalue().encode(errors="backslashreplace"))


def _texts(section: str, pairs: Sequence[tuple[str, str]]) -> dict[str, Array]:
    columns = {}
    for name, texts in zip(("paths", "reasons"), zip(*pairs, strict=True), strict=True):
        encoded = [text.encode(errors=_TEXT_ERRORS) for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        columns[f"{section}:{name}"] = Column(np.frombuffer(b"".join(encoded), np.uint8), ends)
    return column_arrays(columns)


def _read_texts(file: IndexFile, section: str) -> tuple[tuple[str, str], ...]:
    if f"{section}:paths" not in file.places:
        return ()
    columns = [file.read_column(f"{section}:{name}") for name in ("paths", "reasons")]
    try:
        paths, reasons = (
            [column.array(row).tobytes().decode(errors=_TEXT_ERRORS) for row in range(len(column))]
            for column in columns
        )
    except UnicodeDecodeError as error:
        raise damaged(file.path, f"{section}: {error}") from error
    return tuple(zip(paths, reasons, strict=True))


def parse_header(header: bytes, file_bytes: int) -> dict[str, Place]:
    """Where the header of a file says that arrays lie.

    Raises:
        ValueError: in no place of a file of so many bytes, or it says something else.
    """
    places = {}
    for name, entry in json.loads(header[_LENGTH_BYTES:]).items():
        shape, (start, stop) = entry["shape"], entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise ValueError(f"column {name!r:.99} has shape {shape!r:.99} from {start!r:.99} on")
        place = Place(_DTYPES[entry["dtype"]], tuple(shape), len(header) + start)
        is_its_size = bool(shape) and stop - start == shape[0] * place.row_bytes
        # rows are of something, also where there are none, and their other sides are as small as the file
        if not is_its_size or not 0 < place.row_bytes <= file_bytes or len(header) + stop > file_bytes:
            raise ValueError(f"column {name!r:.99} of shape {shape!r:.99} does not lie in its file")
        places[name] = place
    return places


def _map(path: Path, entry: IndexEntry) -> npt.NDArray[np.uint8]:
    """The file at `path`, which has the size that was written."""

    def open_it() -> npt.NDArray[np.uint8]:
        with open_regular(path) as file:
            found_bytes = os.fstat(file.fileno()).st_size
            if found_bytes != entry.bytes:
                raise damaged(path, f"expected {entry.bytes:,} bytes, got {found_bytes:,}")
            if not found_bytes:
                raise damaged(path, "it has no header")
            return np.frombuffer(mmap.mmap(file.fileno(), found_bytes, access=mmap.ACCESS_READ), np.uint8)

    try:
        return read_with_retries(open_it, path)
    except SourceError as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise IndexFileError(f"{path}: cannot be read ({reason}); {AGAIN}") from error


def _read_header(path: Path, content: npt.NDArray[np.uint8], entry: IndexEntry) -> dict[str, Place]:
    header_bytes = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES].tobytes(), "little")
    if not _LENGTH_BYTES < header_bytes <= min(len(content), _MOST_HEADER_BYTES):
        raise damaged(path, "it has no header")
    header = content[:header_bytes].tobytes()
    if f"{checksum_of(header):016x}" != entry.header:
        raise damaged(path, "its header does not match its checksum")
    try:
        return parse_header(header, len(content))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise damaged(path, f"its header: {str(error)[:_MOST_WORDS]}") from error

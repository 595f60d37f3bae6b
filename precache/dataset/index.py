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

    shard:...         with shard:checksums, uint64 [s, c]: XXH3-64 of its rows of each of the c columns of the
                      samples, by the columns' names

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
int64 [n]: where the values of each sample end. The rows of a shard are one range of each column. Who needs a
few shards reads these ranges alone, and compares them with shard:checksums. The manifest has checksums of the
header and of all other columns.

An update (see `precache.conversion.update`) writes a new index, `dataset-00001.index` and so on, because
others may still read the one before. The file is read, not mapped: if somebody truncates it, that is an
error, not a signal that ends the process.
"""

import csv
import io
import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash

from precache.dataset.bounds import Limits
from precache.dataset.columns import Column, Pieces
from precache.dataset.files import FileEntry, Held
from precache.errors import DatasetError, SampleError, SourceError
from precache.pictures.reading import steadily
from precache.storage import atomic_write, read_regular_part

REMEDY = "run 'precache verify' on its folder, then convert it again with --overwrite"
AGAIN = "remove the dataset and convert it again"
"""Where nobody knows which files are the dataset's, so that it cannot be overwritten."""
VALUE, ENDS, SHARD, SOURCE = "value:", "ends:", "shard:", "source:"
"""Before the names of columns."""
Array: TypeAlias = npt.NDArray[Any]
Ints: TypeAlias = npt.NDArray[np.int64]
Sizes: TypeAlias = npt.NDArray[np.int32]
Checksums: TypeAlias = npt.NDArray[np.uint64]
REJECTED_NAME = "rejected.csv"
_TEXT_ERRORS = "surrogatepass"  # names of files may be no Unicode
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # what the stock reader takes
_FIRST_BYTES = 1 << 16  # hold the header of any usual index
_MOST_WORDS = 200  # characters of an error that quotes what the file says
_CACHED_BYTES = 16 << 20  # of rows, in each process
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
    """The index of a dataset cannot be read, or is not as it was written.

    Attributes:
        file_name: of the index.
    """

    def __init__(self, message: str, file_name: str = "") -> None:
        super().__init__(message)
        self.file_name = file_name


@dataclass(frozen=True, slots=True)
class IndexEntry(FileEntry):
    """The index, as a manifest describes it.

    Attributes:
        header: XXH3-64 of its header, 16 hex digits.
        columns: likewise of each column that is not of the samples, by name.
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
    return IndexFileError(f"{path}: is damaged ({why}); {AGAIN}", path.name)


@dataclass(frozen=True, slots=True, eq=False)
class SampleIndex:
    """What is known of samples, a row each.

    Attributes:
        columns: by their names in the file; in memory, or in pieces.
    """

    columns: Mapping[str, Column]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    @property
    def ids(self) -> Ints:
        """All, as the other columns below, in memory."""
        return self.columns["ids"].values

    @property
    def labels(self) -> Ints:
        """-1 where a sample has not just one class."""
        return self.columns["labels"].values

    @property
    def source_sizes(self) -> Sizes:
        """Width and height."""
        return self.columns["source_sizes"].values

    @property
    def checksums(self) -> Checksums:
        """Of what is stored."""
        return self.columns["checksums"].values

    @property
    def shapes(self) -> Sizes | None:
        """Height and width of what is stored; None: all are of one size."""
        return self.columns["shapes"].values if "shapes" in self.columns else None

    @property
    def mask_checksums(self) -> Checksums | None:
        """None: there are no masks."""
        return self.columns["mask_checksums"].values if "mask_checksums" in self.columns else None

    @property
    def targets(self) -> Column | None:
        """None: the samples are labelled with one class each, or with nothing."""
        return self.columns.get("targets")

    @property
    def fields(self) -> dict[str, Column]:
        """By their names."""
        found = ((name, column) for name, column in self.columns.items() if name.startswith(VALUE))
        return {name.removeprefix(VALUE): column for name, column in found}

    @property
    def served(self) -> npt.NDArray[np.bool_]:
        """bool [n]: those that are not removed."""
        if "removed" not in self.columns:
            return np.ones(len(self), np.bool_)
        served: npt.NDArray[np.bool_] = self.columns["removed"].values == 0
        return served

    def with_columns(self, columns: Mapping[str, Column]) -> "SampleIndex":
        """With these instead of those of their names, or beside the others."""
        return SampleIndex({**self.columns, **columns})

    def without_removed(self) -> "SampleIndex":
        """The same samples, none of which is noted to be removed."""
        return SampleIndex({name: column for name, column in self.columns.items() if name != "removed"})

    def select(self, rows: npt.NDArray[Any]) -> "SampleIndex":
        """The samples of these rows, int64 [m] or bool [n]: in pieces, if they are."""
        rows = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return SampleIndex({name: column.at(rows) for name, column in self.columns.items()})

    def join(self, other: "SampleIndex") -> "SampleIndex":
        """Its samples, then those of `other`, which has the same columns; without what is removed."""
        mine = self.without_removed().columns
        pairs = ((name, (column, other.columns[name])) for name, column in mine.items())
        return SampleIndex({name: Column.concatenate(pair) for name, pair in pairs})

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
        if "mask_checksums" in self.columns and checksum_of(mask) != self["mask_checksums"][row]:
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


def columns_of(names: Mapping[str, Column]) -> dict[str, Array]:
    """The arrays of columns, by their names in a file."""
    arrays = {}
    for name, column in names.items():
        arrays[name] = column.values
        if column.ends is not None:
            arrays[f"{ENDS}{name}"] = column.ends
    return arrays


def write_index(
    folder: Path, index: SampleIndex, shard_samples: Ints, others: Mapping[str, Array], updates: int = 0
) -> IndexEntry:
    """Write the index of a dataset of so many updates into `folder`.

    Args:
        shard_samples: int64 [s], how many of the samples each shard holds.
        others: the columns that are not of the samples, but for shard:checksums.
    """
    arrays = columns_of(index.columns)
    starts = np.concatenate(([0], np.cumsum(shard_samples)))
    sums = np.array([_shard_checksums(name, arrays, starts) for name in sorted(arrays)], np.uint64)
    checksums = sums.T.reshape(len(shard_samples), len(arrays))
    return write_arrays(folder / index_name(updates), arrays, {**others, f"{SHARD}checksums": checksums})


def _shard_checksums(name: str, arrays: Mapping[str, Array], starts: Ints) -> list[int]:
    """XXH3-64 of the rows of each shard in a column; its samples are the rows from `starts` on."""
    if (ends := arrays.get(f"{ENDS}{name}")) is not None:
        starts = np.concatenate((np.zeros(1, np.int64), ends))[starts]
    rows = np.ascontiguousarray(arrays[name])
    row_bytes = rows.itemsize * math.prod(rows.shape[1:])
    return _checksums(rows.reshape(-1).view(np.uint8).data, starts * row_bytes)


def _checksums(content: bytes | memoryview, starts: Ints) -> list[int]:
    view = memoryview(content)
    ranges = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    return [checksum_of(view[start:stop]) for start, stop in ranges]


def write_arrays(path: Path, samples: Mapping[str, Array], others: Mapping[str, Array]) -> IndexEntry:
    """Write an index of these columns: of the samples, and those of which the manifest has checksums."""
    header, place = {}, 0
    columns = {**samples, **others}
    names = sorted(columns, key=lambda name: (-columns[name].itemsize, name))  # so that each is aligned
    for name in names:
        array = columns[name]
        span = [place, place := place + array.nbytes]
        header[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    checksums, crc = {}, 0
    with atomic_write(path) as file:
        for name in ("", *names):
            part = memoryview(start)
            if name:
                part = np.ascontiguousarray(columns[name]).reshape(-1).view(np.uint8).data
            if name in others:
                checksums[name] = f"{checksum_of(part):016x}"
            file.write(part)
            crc = google_crc32c.extend(crc, bytes(part))
    found = f"{checksum_of(start):016x}"
    return IndexEntry(path.name, len(start) + place, f"{crc:08x}", found, dict(sorted(checksums.items())))


class IndexFile:
    """An index, whose header is compared when it is opened, and what else is read when it is read.

    Nothing stays open, so that it may be pickled, forked and used by several threads.

    Args:
        held: of the dataset's files.
        entry: of the manifest.

    Raises:
        IndexFileError: it cannot be read, or is not as it was written.
    """

    def __init__(self, held: Held, entry: IndexEntry) -> None:
        self._held, self._entry = held, entry
        with held(entry) as path:
            self.path = path
            self._places = _read_header(path, entry)

    @property
    def places(self) -> dict[str, Place]:
        """Places of all columns, by name."""
        return self._places

    @property
    def sample_columns(self) -> dict[str, Place]:
        """Those of the samples, with the columns of their ends, by name."""
        return {name: place for name, place in self._places.items() if name not in self._entry.columns}

    def read(self, name: str) -> Array:
        """A column that is not of the samples.

        Raises:
            IndexFileError: it is not as it was written.
        """
        place = self._places[name]
        content = self.read_rows(name, 0, place.shape[0])
        if name not in self._entry.columns:
            raise damaged(self.path, f"column {name} has no checksum")
        if f"{checksum_of(content):016x}" != self._entry.columns[name]:
            raise damaged(self.path, f"column {name} does not match its checksum")
        return np.frombuffer(content, place.dtype).reshape(place.shape)

    def read_text(self, name: str) -> Column:
        """As `read`, of text."""
        values, ends = self.read(name), self.read(f"{ENDS}{name}")
        if (np.diff(ends, prepend=0) < 0).any() or ends.max(initial=0) > len(values):
            raise damaged(self.path, f"the values of column {name} end where there are none")
        return Column(values, ends)

    def read_rows(self, name: str, first: int, last: int) -> bytes:
        """The bytes of the rows from `first` to before `last` of a column, compared with nothing."""
        place = self._places[name]
        at, count = place.start + first * place.row_bytes, (last - first) * place.row_bytes
        with self._held(self._entry) as path:
            content = _read_part(path, at, count)
        if len(content) != count:
            raise damaged(path, f"the file ends before byte {at + count:,}")
        return content


class ShardRows:
    """The rows of shards in the columns of samples: a range of shards at a time, or one, which is cached.

    Args:
        samples: int64 [s], how many each shard of the dataset holds.
        checksums: uint64 [s, c], see the module.
        file_name: gives the name of the shard of a number; can be pickled.
        limits: that the rows keep.
    """

    def __init__(
        self,
        file: IndexFile,
        samples: Ints,
        checksums: Checksums,
        file_name: Callable[[int], str],
        limits: Limits,
    ) -> None:
        self._file, self._checksums, self._file_name, self._limits = file, checksums, file_name, limits
        self._places = file.sample_columns
        self._number_of = {name: number for number, name in enumerate(sorted(self._places))}
        self._starts = np.concatenate(([0], np.cumsum(samples)))
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._cached: OrderedDict[tuple[str, int], Column] = OrderedDict()
        self._cached_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_cached")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def whole(self, names: Collection[str] | None = None) -> SampleIndex:
        """Samples, all in memory; with those columns of `names` that there are, default all."""
        last = len(self._starts) - 1
        chosen = [name for name in self._columns() if names is None or name in names]
        return SampleIndex({name: self.read(name, 0, last) for name in chosen})

    def in_pieces(self, chosen: npt.NDArray[np.bool_]) -> SampleIndex:
        """The samples of the shards that are chosen, each of which is read when a row of it is asked for."""
        shards = np.flatnonzero(chosen)
        samples = np.diff(self._starts)[shards]
        starts = np.concatenate(([0], np.cumsum(samples)))
        found = {}
        for name in self._columns():
            place = self._places[name]
            values = np.empty((0, *place.shape[1:]), place.dtype)
            ends = np.empty(0, np.int64) if f"{ENDS}{name}" in self._places else None
            found[name] = Column(values, ends, Pieces(starts, partial(self._piece, name, shards)))
        return SampleIndex(found)

    def read(self, name: str, first: int, last: int) -> Column:
        """A column of the shards from number `first` to before `last`, compared with checksums and limits.

        Raises:
            IndexFileError: they cannot be read, or are not as they were written.
        """
        bounds = self._starts[first : last + 1]
        if f"{ENDS}{name}" not in self._places:
            values, ends = self._compared(name, bounds, first), None
        else:
            ends = self._compared(f"{ENDS}{name}", bounds, first)
            before = 0
            if bounds[0]:  # of no row of these: what it begins is compared
                row = int(bounds[0])
                before = int.from_bytes(self._file.read_rows(f"{ENDS}{name}", row - 1, row), "little")
            ends = np.concatenate(([before], ends))
            if ends[0] < 0 or (ends[1:] < ends[:-1]).any() or ends[-1] > self._places[name].shape[0]:
                raise damaged(self._file.path, f"the values of column {name} end where there are none")
            values = self._compared(name, ends[bounds - bounds[0]], first)
            ends = ends[1:] - before
        column = Column(values, ends)
        try:
            self._limits.check(name, column, first, bounds[:-1] - bounds[0])
        except ValueError as error:
            raise damaged(self._file.path, str(error)[:_MOST_WORDS]) from error
        return column

    def _columns(self) -> list[str]:
        return [name for name in self._places if not name.startswith(ENDS)]

    def _compared(self, name: str, bounds: Ints, first: int) -> Array:
        """The rows of consecutive shards, each of which begins at one of `bounds`."""
        place = self._places[name]
        content = self._file.read_rows(name, int(bounds[0]), int(bounds[-1]))
        found = np.array(_checksums(content, (bounds - bounds[0]) * place.row_bytes), np.uint64)
        written = self._checksums[first : first + len(found), self._number_of[name]]
        if len(wrong := np.flatnonzero(found != written)):
            shard = first + int(wrong[0])
            of = f"rows of the shard {self._file_name(shard)}"
            raise damaged(self._file.path, f"{of}: their {name} do not match their checksum")
        return np.frombuffer(content, place.dtype).reshape(-1, *place.shape[1:])

    def _piece(self, name: str, shards: Ints, number: int) -> Column:
        shard = int(shards[number])
        with self._lock:
            if (found := self._cached.get((name, shard))) is not None:
                self._cached.move_to_end((name, shard))
                return found
        read = self.read(name, shard, shard + 1)
        with self._lock:
            if (name, shard) not in self._cached:
                self._cached[name, shard] = read
                self._cached_bytes += read.memory_bytes
            while self._cached_bytes > _CACHED_BYTES and len(self._cached) > 1:
                self._cached_bytes -= self._cached.popitem(last=False)[1].memory_bytes
        return read


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
    return columns_of(columns)


def _read_texts(file: IndexFile, section: str) -> tuple[tuple[str, str], ...]:
    if f"{section}:paths" not in file.places:
        return ()
    columns = [file.read_text(f"{section}:{name}") for name in ("paths", "reasons")]
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


def _read_header(path: Path, entry: IndexEntry) -> dict[str, Place]:
    try:
        found_bytes = path.stat().st_size
    except OSError as error:
        raise IndexFileError(f"{path}: cannot be read ({error.strerror}); {AGAIN}", path.name) from error
    if found_bytes != entry.bytes:
        raise damaged(path, f"expected {entry.bytes:,} bytes, got {found_bytes:,}")
    start = _read_part(path, 0, _FIRST_BYTES)
    header_bytes = _LENGTH_BYTES + int.from_bytes(start[:_LENGTH_BYTES], "little")
    if len(start) < _LENGTH_BYTES or header_bytes > _MOST_HEADER_BYTES:
        raise damaged(path, "it has no header")
    header = start[:header_bytes] if header_bytes <= len(start) else _read_part(path, 0, header_bytes)
    if f"{checksum_of(header):016x}" != entry.header:
        raise damaged(path, "its header does not match its checksum")
    try:
        return parse_header(header, found_bytes)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise damaged(path, f"its header: {str(error)[:_MOST_WORDS]}") from error


def _read_part(path: Path, start: int, count: int) -> bytes:
    try:
        return steadily(lambda: read_regular_part(path, start, count), path)
    except SourceError as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise IndexFileError(f"{path}: cannot be read ({reason}); {AGAIN}", path.name) from error

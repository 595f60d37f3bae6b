"""Tables as a source: each row is a sample, and columns are pictures, labels, splits and fields.

    .csv .tsv          with a header; cells are text, quoted as in RFC 4180. If the header has a space behind
                       a comma, spaces in front of cells are no part of them. If it has no comma (a TSV: no
                       tab), semicolons, tabs or bars separate the cells
    .jsonl             one object per line; the columns are the keys of all objects
    .parquet           also a folder of files, whose names say the splits
    .feather .arrow    Arrow's own files
    state.json         in a folder that Hugging Face's `save_to_disk` wrote: it lists Arrow's files

A `RowReader` reads the columns of one file, as Arrow has them or as lists. `precache.sources.targets` says
what they mean, and `RowSource` makes samples of them; also of the rows of datasets in memory, see
`precache.sources.memory`. Ids are numbers of rows from 0, counted over all readers of a source.

One column holds the pictures, or the paths of their files. Paths are relative to the folder of the table, or
to the folder that --root names; they may be absolute, and may contain `..`, since a table is trusted to name
its files. They are stored in their shortest form. A row whose file is missing is rejected when it is
converted.

Pictures are bytes, or structs with `bytes` or, if these are null, the `path` of a file. The path of such a
sample is its row in 8 digits, in a folder of files behind the path of its file:
data/train-00000-of-00002.parquet/00000042. Workers read a picture by its range of bytes, without Arrow.
But Parquet is compressed, in groups of many rows, and pictures are read in shuffled order. So its pictures
are copied first, batch by batch, to a file in the temporary folder of `precache.storage.staging`.

Text is UTF-8, or UTF-16 with a byte order mark, and its lines end as on any system. Lines are counted as in
an editor: from 1, with the header and blank lines, which are no rows.
"""

import codecs
import csv
import hashlib
import io
import json
import os
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from PIL import Image

from precache.dataset.columns import Ints
from precache.errors import (
    ImageError,
    MissingDependencyError,
    SourceError,
    did_you_mean,
    os_errors_as,
    os_reason,
)
from precache.packages import install_command
from precache.pictures.kinds import IMAGE_EXTENSIONS, extension
from precache.pictures.reading import check_bytes, read_part, read_picture, status_of
from precache.reporting import quantity
from precache.sources.base import ANY_SIZE, SampleList, SampleRef, Samples, Scan, picture_checksum
from precache.sources.options import SourceOptions
from precache.sources.targets import (
    ColumnInfo,
    Roles,
    RowValues,
    choose_roles,
    scan_rows,
    split_name,
    unique_names,
)
from precache.sources.text_files import encoding_of, find_delimiter, utf_8_remedy
from precache.storage import open_regular, staging

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES, PARQUET = ".jsonl", ".parquet"
_SAVED_DATASET, _SAVED_SPLITS = "state.json", "dataset_dict.json"
_ARROW_MAGIC = b"ARROW1"  # of a file with an index of its batches

_BATCH_PICTURES, _BATCH_ROWS = 32, 65_536
_BUFFER_BYTES = 1 << 20  # of Parquet read at a time, rather than a whole row group
_CSV_BLOCK_BYTES = 16 << 20  # a row must fit into it
_USUAL_EXTENSIONS = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG", ".webp", ".bmp", ".tif")
_MAX_PATH_BYTES = 4096  # no system takes longer paths
_PROBED_PICTURES = 8  # pictures that are read during the scan, so that the digest tells two datasets apart


# --- the rows of a table or a dataset ---


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Columns of some names in all rows of a table or dataset.

    Attributes:
        count: number of rows.
        values: the columns by their names, as Arrow arrays or as lists; null or None for a missing value.
        lines: int64 [n], first line of each row, from 1, as in a text editor; None if rows are no lines.
        unread: rows that could not be read; they have the values of another row.
    """

    count: int
    values: Mapping[str, Sequence[Any]]
    lines: Ints | None = None
    unread: Collection[int] = ()


class StoredPictures(Protocol):
    """Pictures in a column; the only part of a reader that worker processes need."""

    @property
    def sizes(self) -> Ints | None:
        """Size of each picture in bytes, -1 if the row has none: int64 [n]; None if they are unknown."""

    def read(self, row: int, where: str, max_pixels: int) -> bytes | Image.Image:
        """Return the picture of a row, which messages call `where`; raises as `Source.read` does."""


class RowReader(Protocol):
    """Reader of the rows of one table or dataset."""

    @property
    def name(self) -> str:
        """Name of the table or dataset in messages."""

    @property
    def is_text(self) -> bool:
        """Whether values are unparsed text, as the cells of a CSV are."""

    def columns(self) -> list[ColumnInfo]:
        """Return the columns.

        Raises:
            SourceError: the columns cannot be read, or there are none.
            MissingDependencyError: a library is missing.
        """

    def read_columns(self, names: Sequence[str]) -> RowColumns:
        """Return the columns of these names.

        Raises:
            SourceError: a row is damaged; the error names it.
        """

    def open_pictures(self, column: str) -> StoredPictures:
        """Open the pictures in a column that has some."""


@dataclass(frozen=True, slots=True)
class RowPart:
    """Rows of one reader in a source: all of its rows, one of its splits, or one of its files.

    Attributes:
        reader: reader of the rows.
        folder: folder that paths of pictures are relative to; None if the rows must hold pictures.
        split: split of the rows, unless they have a column of splits.
        prefix: text in front of the samples' paths.
        is_dataset: whether the rows come from a dataset object, not a table; then a file may occur in several
            rows.
    """

    reader: RowReader
    folder: str | None = None
    split: str = ""
    prefix: str = ""
    is_dataset: bool = False

    def choose_roles(self, options: SourceOptions) -> Roles:
        """Choose the columns of pictures, labels, splits and fields, see `choose_roles` of `targets`."""
        return choose_roles(
            self.reader.name,
            self.reader.columns(),
            options,
            may_be_paths=self.folder is not None,
            is_dataset=self.is_dataset,
        )


@dataclass(frozen=True, slots=True)
class ScannedPart:
    """Part of a source after the scan, reduced to what worker processes need.

    Attributes:
        name: name of the table or dataset in messages.
        has_lines: whether `SampleRef.offset` is the first line of a row, not its number; then the part is the
            only one.
        folder: folder of the pictures' files; "" if the rows hold the pictures.
        prefix: see `RowPart`.
        pictures: pictures that the rows hold; None if they are files in `folder`.
        first: id of the part's first row; an offset is `first` plus the number of the row.
    """

    name: str
    has_lines: bool
    folder: str
    prefix: str
    pictures: StoredPictures | None
    first: int

    def row_name(self, offset: int, sample_id: int) -> str:
        """Return the name of a row for messages."""
        if self.has_lines:
            return f"{self.name}, line {offset:,} (id {sample_id})"
        return f"{self.name}: row {offset - self.first}"

    def file_of(self, path: str) -> str:
        """Return the file of the sample with this path."""
        return os.path.join(self.folder, path.removeprefix(self.prefix))


@dataclass(frozen=True, slots=True)
class RowSource:
    """Tables and datasets as a `Source`.

    Attributes:
        root, paths: see `Source`.
        parts: parts before the scan; one whose rows are lines is the only one.
        options: options with the columns that the user has named.
        scanned: parts after the scan.
    """

    root: Path
    paths: tuple[Path, ...]
    parts: tuple[RowPart, ...]
    options: SourceOptions
    scanned: tuple[ScannedPart, ...] = ()

    def scan(self) -> Scan:
        part_roles = [part.choose_roles(self.options) for part in self.parts]
        for part, roles in zip(self.parts, part_roles, strict=True):
            if difference := _difference(roles, part_roles[0]):
                raise SourceError(
                    f"{difference} {self.parts[0].reader.name}",
                    path=part.reader.name,
                    remedy="convert it alone, or write both with the same columns",
                )
        rows = _RowList()
        for part, roles in zip(self.parts, part_roles, strict=True):
            rows.add_part(part, roles)
        if not len(rows.samples):
            raise SourceError("has no rows; expected one for each picture", path=self.root)
        source = replace(self, parts=(), scanned=tuple(rows.parts))
        values = rows.values(part_roles[0], is_text=self.parts[0].reader.is_text)
        scan = scan_rows(source, rows.samples, values, self.options, (), rows.warnings)
        checksums = source._probe_checksums(scan.samples)
        if not checksums:
            return scan
        return replace(scan, digest=hashlib.sha256(f"{scan.digest}{checksums}".encode()).hexdigest())

    def read(self, ref: SampleRef, max_pixels: int) -> bytes | Image.Image:
        part, where = _part_at(self.scanned, ref.offset), self.where(ref)
        if part.pictures is None:
            return _read_file(part, ref, where, max_pixels)
        check_bytes(where, ref.bytes, max_pixels)
        picture = part.pictures.read(ref.offset - part.first, where, max_pixels)
        if ref.bytes < 0:
            raise ImageError(where, "could not be read when the dataset was listed")
        return picture

    def where(self, ref: SampleRef) -> str:
        """Return the name for messages: the row, and the path of the picture's file if it has one."""
        part = _part_at(self.scanned, ref.offset)
        row = part.row_name(ref.offset, ref.id)
        return row if part.pictures is not None else f"{row}: {part.file_of(ref.path)}"

    def _probe_checksums(self, samples: Samples) -> str:
        """Return checksums of a few pictures in rows, since labels alone do not tell two datasets apart.

        Raises:
            SourceError: a picture changes each time that it is read.
        """
        checksums = []
        positions = np.linspace(0, len(samples) - 1, _PROBED_PICTURES)
        for row in sorted({round(position) for position in positions}):
            ref = samples[row]
            if _part_at(self.scanned, ref.offset).pictures is None:
                continue  # the digest has the sizes of files
            try:
                checksum = picture_checksum(self.read(ref, ANY_SIZE))
                second_checksum = picture_checksum(self.read(ref, ANY_SIZE))
            except ImageError:
                continue  # the conversion will reject it, with the reason
            if checksum != second_checksum:
                raise SourceError(
                    "changes each time it is read",
                    path=self.where(ref),
                    remedy="leave out the random transform: loaders augment anew in each epoch",
                )
            checksums.append(f"{row}:{checksum}")
        return " ".join(checksums)


def _part_at(parts: Sequence[ScannedPart], offset: int) -> ScannedPart:
    """Return the part of the sample at `offset`."""
    return parts[bisect_right(parts, offset, key=lambda part: part.first) - 1]


def _difference(roles: Roles, first_roles: Roles) -> str:
    """Return a phrase on how a part's labels differ from the first part's, whose name must follow; or ""."""
    if roles.label != first_roles.label:
        return f"has {roles.label!r} for the label, not {first_roles.label!r} as"
    names, first_names = roles.class_names or (), first_roles.class_names or ()
    for name, first_name in zip(names, first_names, strict=False):
        if name != first_name:
            return f"has the class {name!r} where {first_name!r} is one in"
    if len(names) != len(first_names):
        return f"names {len(names):,} classes, not {len(first_names):,} as"
    return ""


class _RowList:
    """Rows of all parts of a source, as the scan lists them.

    Attributes:
        samples: the rows as samples.
        parts: parts whose rows are among them.
        warnings: lines on columns that the user did not name, and on missing files.
    """

    def __init__(self) -> None:
        self.samples = SampleList()
        self.parts: list[ScannedPart] = []
        self.warnings: list[str] = []
        self._columns: list[Mapping[str, Sequence[Any]]] = []  # of each part, those of labels and fields

    def row_name(self, row: int) -> str:
        """Return the name of a row in messages."""
        offset = self.samples.offsets[row]
        return _part_at(self.parts, offset).row_name(offset, row)

    def values(self, roles: Roles, *, is_text: bool) -> RowValues:
        """Return labels and fields of all rows, which hold them no longer."""
        columns, self._columns = self._columns, []
        return RowValues(
            row_name=self.row_name,
            label=roles.label,
            labels=() if roles.label is None else _join(columns, roles.label),
            class_names=roles.class_names,
            fields={name: _as_list(_join(columns, name)) for name in roles.fields},
            labels_are_text=is_text,
            fields_are_text=is_text,
        )

    def add_part(self, part: RowPart, roles: Roles) -> None:
        """Append the rows of a part.

        Raises:
            SourceError: a row is damaged; two rows of a table name one picture, no file exists, or one cannot
                be examined.
        """
        reader, first = part.reader, len(self.samples)
        names = (
            roles.names if roles.image.has_pictures else list(dict.fromkeys((roles.image.name, *roles.names)))
        )
        columns = reader.read_columns(names)
        pictures = reader.open_pictures(roles.image.name) if roles.image.has_pictures else None
        has_lines = columns.lines is not None
        self.parts.append(
            ScannedPart(reader.name, has_lines, part.folder or "", part.prefix, pictures, first)
        )
        offsets = range(first, first + columns.count) if columns.lines is None else columns.lines.tolist()
        splits = self._splits(part, roles, columns, offsets)
        if pictures is None:
            self._add_files(
                part, roles.image.name, _as_list(columns.values[roles.image.name]), splits, offsets
            )
        else:
            sizes = [0] * columns.count if pictures.sizes is None else pictures.sizes.tolist()
            for row in columns.unread:
                sizes[row] = -1
            for row, (split, size, offset) in enumerate(zip(splits, sizes, offsets, strict=True)):
                path = f"{part.prefix}{row:08d}" if part.prefix else f"{offset:08d}"
                self.samples.add(path, size, 0, offset, split)
        self._columns.append(columns.values)
        self.warnings += [f"{reader.name}: {note}" for note in roles.notes]

    def _splits(self, part: RowPart, roles: Roles, columns: RowColumns, offsets: Sequence[int]) -> list[str]:
        """Return the split of each row."""
        if roles.split is None:
            return [part.split] * columns.count
        splits = []
        for row, value in enumerate(_as_list(columns.values[roles.split])):
            try:
                splits.append(split_name(roles.split, value))
            except ValueError as error:
                where = self.parts[-1].row_name(offsets[row], len(self.samples) + row)
                raise SourceError(f"{roles.split!r}: {error}", path=where) from None
        return splits

    def _add_files(
        self, part: RowPart, column: str, paths: Sequence[Any], splits: Sequence[str], offsets: Sequence[int]
    ) -> None:
        """Append rows whose pictures are files, and a warning of missing files."""
        scanned = self.parts[-1]
        missing_rows, path_hashes = list[int](), array("q")
        folder = os.path.abspath(scanned.folder)
        for path, split, offset in zip(paths, splits, offsets, strict=True):
            row = len(self.samples)
            if reason := _path_problem(path):
                raise SourceError(f"{column!r}: {path!r:.60} {reason}", path=scanned.row_name(offset, row))
            short_path, full_path = _normalize(folder, path)
            status = status_of(os.path.join(scanned.folder, short_path))
            for spelling in () if status is not None else _spellings(path):
                other_path, other_full_path = _normalize(folder, spelling)
                if (status := status_of(os.path.join(scanned.folder, other_path))) is not None:
                    short_path, full_path = other_path, other_full_path
                    break
            path_hashes.append(hash(full_path))
            if status is None:
                missing_rows.append(row)
            size, modified_ns = status or (-1, 0)
            self.samples.add(f"{part.prefix}{short_path}", size, modified_ns, offset, split)
        if not part.is_dataset:
            self._check_unique(column, path_hashes)
        if missing_rows:
            self._warn_of_missing(part, missing_rows, len(paths))

    def _check_unique(self, column: str, path_hashes: Sequence[int]) -> None:
        """Raise SourceError if two rows of the last part name one picture, by hashes of absolute paths."""
        scanned, hashes = self.parts[-1], np.array(path_hashes, np.int64)
        order = np.argsort(hashes, kind="stable")
        repeated = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
        if not len(repeated):
            return
        first, second = (order[repeated[0] : repeated[0] + 2] + scanned.first).tolist()
        first_name = f"row {first - scanned.first}"
        if scanned.has_lines:
            first_name = f"line {self.samples.offsets[first]:,} (id {first})"
        raise SourceError(
            f"{column!r}: {self.samples.path(second)!r} is in {first_name}, too; remove one of them, or "
            f"write all its labels into one cell (--separator)",
            path=self.row_name(second),
        )

    def _warn_of_missing(self, part: RowPart, missing_rows: Sequence[int], count: int) -> None:
        """Warn of rows of the last part without a picture; SourceError if none of its rows has one."""
        scanned, first_missing = self.parts[-1], self.row_name(missing_rows[0])
        missing_file = scanned.file_of(self.samples.path(missing_rows[0]))
        if len(missing_rows) < count:
            number = f"{quantity(len(missing_rows), 'row')} of {count:,} without a picture"
            self.warnings.append(f"{scanned.name}: {number}; the first is {first_missing}: {missing_file!r}")
            return
        remedy = (
            "paths are relative to the table, or to the folder that --root names, and have the same "
            "extension as the files"
        )
        if part.is_dataset:
            remedy = "check the folder of the dataset"
        for column in part.reader.columns():
            if column.has_pictures:
                remedy += f"; or take the bytes in {column.name!r}: --image {column.name}"
        raise SourceError(
            f"there is no picture {missing_file!r}, nor one for any other row",
            path=first_missing,
            remedy=remedy,
        )


def _as_list(column: Sequence[Any]) -> Sequence[Any]:
    """Return the values of an Arrow array as a list, and a list as it is."""
    return column.to_pylist() if hasattr(column, "to_pylist") else column


def _join(columns: Sequence[Mapping[str, Sequence[Any]]], name: str) -> Sequence[Any]:
    """Return one column of all parts."""
    parts = [part_columns[name] for part_columns in columns]
    return parts[0] if len(parts) == 1 else list(chain.from_iterable(map(_as_list, parts)))


# --- files that rows name ---


def _spellings(path: str) -> Iterator[str]:
    """Yield other paths of a file that there is not: a path of Windows, and an id without the extension."""
    slashed = path.replace("\\", "/")
    if slashed != path:
        yield slashed
    if extension(path) not in IMAGE_EXTENSIONS:
        yield from (f"{slashed}{suffix}" for suffix in _USUAL_EXTENSIONS)


def _path_problem(path: Any) -> str | None:
    """Return why a row's value cannot be the path of its picture, with a remedy; None if it can."""
    if not isinstance(path, str) or not path:
        return "is no path of a picture; fill it in"
    if "://" in path:
        return "is a URL; download the pictures first"
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "is not a valid file name; correct it"
    if len(encoded) > _MAX_PATH_BYTES:
        return f"has {len(encoded):,} bytes, so it cannot be a path; correct it"
    if b"\0" in encoded:
        return "has a NUL in it, so it cannot be a path; correct it"
    return None


def _normalize(folder: str, path: str) -> tuple[str, str]:
    """Return a row's path without `.`, `..` and double slashes, and the absolute path of the file.

    A path whose `..` follows a link elsewhere, or a missing folder, is returned as it is written.

    Args:
        folder: absolute path of the folder that `path` is relative to.
    """
    short_path = os.path.normpath(path.replace("//", "/"))  # normpath leaves two slashes at the start
    if ".." in path.split("/"):
        joined_path = os.path.join(folder, path)
        try:
            is_same = os.path.samefile(joined_path, os.path.normpath(joined_path))
        except OSError:
            is_same = False
        if not is_same:
            return path, joined_path
    return short_path, os.path.normpath(os.path.join(folder, short_path))


def _read_file(part: ScannedPart, ref: SampleRef, where: str, max_pixels: int) -> bytes:
    """Return the content of the file that a row names; it must be unchanged since the scan."""
    path = part.file_of(ref.path)
    if ref.bytes < 0:
        reason = "is a folder" if os.path.isdir(path) else "is not a file"
        raise ImageError(where, f"{reason}; named in {part.row_name(ref.offset, ref.id)}")
    return read_picture(path, max_pixels, (ref.bytes, ref.modified_ns))


# --- CSV and JSON lines ---


@dataclass(frozen=True, slots=True)
class CsvReader:
    """Reader of a CSV or TSV, see `RowReader`; Arrow parses it, and all cells stay text.

    Attributes:
        name: path of the table.
    """

    name: str

    is_text = True

    def columns(self) -> list[ColumnInfo]:
        return [ColumnInfo(name) for name in _Csv(self.name).header]

    def read_columns(self, names: Sequence[str]) -> RowColumns:
        pyarrow = import_pyarrow(self.name)
        from pyarrow import csv as arrow_csv

        table = _Csv(self.name)
        content, lines = table.content, table.find_lines()
        keys = {name: f"f{table.header.index(name)}" for name in names}
        if table.has_spaces:
            content = table.without_spaces()
        try:
            rows = arrow_csv.read_csv(
                io.BytesIO(content),
                arrow_csv.ReadOptions(
                    autogenerate_column_names=True, block_size=_CSV_BLOCK_BYTES, use_threads=False
                ),
                arrow_csv.ParseOptions(delimiter=table.delimiter, newlines_in_values=True),
                arrow_csv.ConvertOptions(
                    include_columns=list(keys.values()) or ["f0"],
                    column_types=dict.fromkeys(keys.values(), pyarrow.string()),
                ),
            )
        except pyarrow.ArrowException as error:
            for _ in table.records():  # its error has the line
                pass
            raise SourceError(f"not CSV ({' '.join(str(error).split())[:200]})", path=self.name) from error
        if rows.num_rows != len(lines):
            raise SourceError(
                f"has {len(lines):,} or {rows.num_rows:,} rows, depending on how its quotes are read",
                path=self.name,
                remedy="save it again, or as JSON lines",
            )
        rows = rows.slice(1)  # behind the header
        columns = {name: rows.column(key) for name, key in keys.items()}
        return RowColumns(rows.num_rows, columns, np.array(lines[1:], np.int64))

    def open_pictures(self, column: str) -> StoredPictures:
        raise NotImplementedError("a CSV has the paths of pictures")


class _Csv:
    """Text of a CSV.

    Attributes:
        content: text in UTF-8.
        delimiter: what separates the cells.
        has_spaces: whether spaces in front of cells are no part of them.
        header: names of the columns.
    """

    def __init__(self, name: str) -> None:
        self._name, self.content = name, _read_text(name)
        first_line = next(iter(self.content[:_BUFFER_BYTES].splitlines()), b"").decode(errors="replace")
        self.delimiter = find_delimiter(first_line, DELIMITERS[Path(name).suffix.lower()])
        self.has_spaces = f"{self.delimiter} " in first_line
        self.header: list[str] = []
        _, header = next(self.records(), (0, []))
        if not header:
            raise SourceError("is empty; expected a first line with the names of its columns", path=name)
        self.header = [column.strip() for column in header]

    def records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield header and rows: the line that each begins in, and its cells.

        Raises:
            SourceError: a quote is not closed, or a row has more or fewer cells than the header.
        """
        reader = csv.reader(
            io.StringIO(self.content.decode(), newline=""),
            delimiter=self.delimiter,
            skipinitialspace=self.has_spaces,
            strict=True,
        )
        row = -1  # the header
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise SourceError(
                    f"not CSV ({error})",
                    path=f"{self._name}, line {line:,}",
                    remedy=(
                        f"close every quote, double those within quotes, and write cells of over "
                        f"{csv.field_size_limit():,} characters as JSON lines"
                    ),
                ) from error
            if not cells:
                continue  # a blank line
            if self.header and len(cells) != len(self.header):
                raise SourceError(
                    f"expected {len(self.header)} cells as in the header, got {len(cells)}",
                    path=f"{self._name}, line {line:,} (id {row})",
                    remedy="put quotes around a cell that has the separator or a line break in it",
                )
            row += 1
            yield line, cells

    def find_lines(self) -> list[int]:
        """Return the lines that header and rows begin in, from 1; those in quotes may have several."""
        if b'"' in self.content:
            return [line for line, _ in self.records()]
        return [number for number, line in enumerate(self.content.splitlines(), 1) if line]

    def without_spaces(self) -> bytes:
        """Return the content without the spaces in front of cells."""
        text = io.StringIO(newline="")
        csv.writer(text, delimiter=self.delimiter).writerows(cells for _, cells in self.records())
        return text.getvalue().encode()


@dataclass(frozen=True, slots=True)
class JsonLinesReader:
    """Reader of JSON lines, see `RowReader`; the attribute is that of `CsvReader`.

    Arrow's own reader would refuse a table for two types in a column that nobody asked for, and take text
    that looks like a date for a time.
    """

    name: str

    is_text = False

    def columns(self) -> list[ColumnInfo]:
        # all lines are read, since any may have a key that no line before it has
        names = dict.fromkeys(chain.from_iterable(values for _, values in self._objects()))
        if not names:
            raise SourceError("is empty; expected one JSON object per line", path=self.name)
        return [ColumnInfo(name) for name in names]

    def read_columns(self, names: Sequence[str]) -> RowColumns:
        lines, columns = list[int](), {name: list[Any]() for name in names}
        for line, values in self._objects():
            lines.append(line)
            for name, column in columns.items():
                column.append(values.get(name))
        return RowColumns(len(lines), columns, np.array(lines, np.int64))

    def open_pictures(self, column: str) -> StoredPictures:
        raise NotImplementedError("JSON lines have the paths of pictures")

    def _objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield number and object of each line that is not blank."""
        decode = msgspec.json.Decoder().decode
        for line, text in enumerate(_read_text(self.name).splitlines(), 1):
            if not text or text.isspace():
                continue
            try:
                value = decode(text)
            except msgspec.DecodeError:
                value = self._decode(text, line)
            if not isinstance(value, dict):
                raise SourceError(
                    'is not a JSON object; expected one per line: {"path": "a.jpg"}',
                    path=f"{self.name}, line {line:,}",
                )
            yield line, value

    def _decode(self, text: bytes, line: int) -> Any:
        """Decode a line that msgspec refuses: Python also takes NaN, and its errors say more."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            reason = f"not JSON ({error}); expected one object per line"
            raise SourceError(reason, path=f"{self.name}, line {line:,}") from error


@contextmanager
def _open_table(path: str) -> Iterator[BinaryIO]:
    """Open the file of a table; SourceError if it cannot be opened, or cannot be read in the block."""
    try:
        with io.BufferedReader(open_regular(path)) as file:
            yield file
    except OSError as error:
        hint = did_you_mean(path)
        raise SourceError(
            f"the table cannot be read ({os_reason(error)}){hint}",
            path=path,
            remedy="" if hint else "check its name and permissions",
        ) from error


def _read_text(name: str) -> bytes:
    """Return the text of a table in UTF-8, without a byte order mark; SourceError if it is no text."""
    with _open_table(name) as file:
        content = file.read()
    encoding = encoding_of(content)
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding == "utf-16":
            raise SourceError(
                f"is damaged UTF-16 ({error.reason})", path=name, remedy="save it again, as UTF-8"
            ) from error
        *lines, last_line = (content[: error.start] + b"?").splitlines()
        raise SourceError(
            f"byte {len(last_line.removeprefix(codecs.BOM_UTF8)):,} is not UTF-8",
            path=f"{name}, line {len(lines) + 1:,}",
            remedy=utf_8_remedy(name),
        ) from error
    if "\0" in text:
        line = len(f"{text[: text.index(chr(0))]}?".encode().splitlines())
        raise SourceError(
            "has a NUL byte, expected text in UTF-8",
            path=f"{name}, line {line:,}",
            remedy="save the table again as UTF-8",
        )
    return content.removeprefix(codecs.BOM_UTF8) if encoding != "utf-16" else text.encode()


# --- Parquet and Arrow's own files ---


def import_pyarrow(user: str) -> Any:
    """Import pyarrow for a table, whose name is `user`.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise MissingDependencyError(
            f"a table needs the extra 'table' ({error})",
            path=user,
            remedy=f"run: {install_command('table')}",
        ) from error
    return pyarrow


class _ArrowFile(NamedTuple):
    """A file whose columns Arrow reads.

    Attributes:
        schema: names and types of the columns.
        read: function of names of columns, and of a number of rows at a time, that yields record batches.
        mapped: the mapped file, as a buffer of Arrow; None for Parquet, which has to be decoded.
    """

    schema: Any
    read: Callable[[Sequence[str], int], Iterator[Any]]
    mapped: Any = None


@dataclass(frozen=True, slots=True)
class ArrowReader:
    """Reader of a Parquet file, or of one of Arrow's own, see `RowReader`.

    Attributes:
        name: path of the file.
        folder: folder that the `path` of a picture without bytes is relative to.
    """

    name: str
    folder: str

    is_text = False

    def columns(self) -> list[ColumnInfo]:
        with self.open() as file:
            return [
                ColumnInfo(column.name, _class_names(file.schema, column.name), _has_bytes(column.type))
                for column in file.schema
            ]

    def read_columns(self, names: Sequence[str]) -> RowColumns:
        pyarrow = import_pyarrow(self.name)
        with self.open() as file:
            batches = list(file.read(names, _BATCH_ROWS))
            columns = {name: [batch.column(name) for batch in batches] for name in names}
            values = {
                name: pyarrow.chunked_array(arrays) if arrays else [] for name, arrays in columns.items()
            }
            return RowColumns(sum(batch.num_rows for batch in batches), values)

    def open_pictures(self, column: str) -> StoredPictures:
        status = os.stat(self.name)
        pictures = _find_pictures(self, column, status.st_size, status.st_mtime_ns)
        if not os.path.exists(pictures.path):  # the staging folder was cleaned up meanwhile
            _find_pictures.cache_clear()
            pictures = _find_pictures(self, column, status.st_size, status.st_mtime_ns)
        return pictures

    @contextmanager
    def open(self) -> Iterator[_ArrowFile]:
        """Open the file.

        Raises:
            MissingDependencyError: pyarrow is not installed.
            SourceError: the file is none of these, or damaged; also if it is read in the block.
        """
        pyarrow = import_pyarrow(self.name)
        with _open_table(self.name) as file:
            try:
                yield (_open_parquet if is_parquet(self.name) else _open_arrow)(self.name, file)
            except (pyarrow.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
                reason = " ".join(str(error).split())[:200]
                kind = "Parquet" if is_parquet(self.name) else "an Arrow file"
                raise SourceError(
                    f"not {kind} that can be read ({reason})", path=self.name, remedy="write it again"
                ) from error


def _open_parquet(name: str, file: BinaryIO) -> _ArrowFile:
    from pyarrow import parquet

    opened = parquet.ParquetFile(
        file, pre_buffer=False, page_checksum_verification=True, buffer_size=_BUFFER_BYTES
    )

    def read(names: Sequence[str], row_count: int) -> Iterator[Any]:
        remaining = opened.metadata.num_rows
        for batch in opened.iter_batches(row_count, columns=list(names), use_threads=False):
            remaining -= batch.num_rows
            if remaining < 0:
                break
            yield batch
        if remaining:
            raise ValueError("more or fewer rows than its end says")

    return _ArrowFile(opened.schema_arrow, read)


def _open_arrow(name: str, file: BinaryIO) -> _ArrowFile:
    """Map one of Arrow's own files, with an index of its batches at its end, or a stream of them."""
    import pyarrow

    has_index = file.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
    open_reader = pyarrow.ipc.open_file if has_index else pyarrow.ipc.open_stream
    mapped = pyarrow.memory_map(name).read_buffer()
    schema = open_reader(mapped).schema

    def read(names: Sequence[str], row_count: int) -> Iterator[Any]:
        indices = [schema.get_field_index(column) for column in names]
        options = pyarrow.ipc.IpcReadOptions(included_fields=indices, use_threads=False)
        reader = open_reader(mapped, options=options)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if has_index else reader
        for batch in batches:
            batch.validate(full=True)  # damaged offsets would crash the process when they are used
            yield batch

    return _ArrowFile(schema, read, mapped)


def _class_names(schema: Any, column: str) -> tuple[str, ...] | None:
    """Return the names of a column's classes, as Hugging Face's library stores them; None without these."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        feature = features[column]
        names = feature.get("feature", feature)["names"]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return unique_names(list(map(str, names))) if isinstance(names, list) and names else None


def _has_bytes(column_type: Any) -> bool:
    """Return whether values of this type are bytes, or structs with bytes."""
    from pyarrow import types

    if types.is_struct(column_type):
        return any(field.name == "bytes" and _has_bytes(field.type) for field in column_type)
    return bool(types.is_binary(column_type) or types.is_large_binary(column_type))


@dataclass(frozen=True, slots=True)
class _PicturesInFile:
    """Pictures in a column that lie in a file as they are, see `StoredPictures`.

    Attributes:
        path: the file: an uncompressed table, or a copy of a table's pictures.
        scanned_status: size of the file in bytes, and time of its last write in ns.
        starts: int64 [n], offset of each picture in bytes.
        sizes: int64 [n], size of each picture in bytes; -1 if the row has none.
        files: paths of the rows' pictures that are files of their own.
    """

    path: str
    scanned_status: tuple[int, int]
    starts: Ints
    sizes: Ints
    files: Mapping[int, str]

    def read(self, row: int, where: str, max_pixels: int) -> bytes:
        if row in self.files:
            return read_picture(self.files[row], max_pixels)
        size = int(self.sizes[row])
        if size < 0:
            raise ImageError(where, "has no picture, neither bytes nor a file")
        data = read_part(self.path, where, self.scanned_status, int(self.starts[row]), size)
        if len(data) != size:
            raise SourceError("could not be read as a whole", path=where, remedy="run the same command again")
        return data


@cache
def _find_pictures(reader: ArrowReader, column: str, file_bytes: int, modified_ns: int) -> _PicturesInFile:
    """Find the pictures in a column, once for each size and time of the table; copy them if they are packed.

    Raises:
        SourceError: the disk has no room for the copy.
    """
    if not is_parquet(reader.name):
        pictures = _locate_pictures(reader, column, None)
        if pictures is not None:
            return pictures
    folder = staging.folder()
    with (
        os_errors_as(
            SourceError,
            f"its pictures cannot be copied into {folder.parent}",
            "set TMPDIR to a folder on a larger disk",
            path=reader.name,
        ),
        tempfile.NamedTemporaryFile(dir=folder, delete=False) as copy,
    ):
        try:
            pictures = _locate_pictures(reader, column, copy)
        except BaseException:
            os.unlink(copy.name)
            raise
    assert pictures is not None
    return pictures


def _locate_pictures(reader: ArrowReader, column: str, copy: Any) -> _PicturesInFile | None:
    """Return where the pictures in a column lie: in `copy`, to which they are written, or in the table.

    None if there is no copy, and the table is compressed.
    """
    import pyarrow

    starts, sizes, files = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], dict[int, str]()
    first_row = 0
    with reader.open() as file:
        for batch in file.read([column], _BATCH_PICTURES):
            pictures: Any = batch.column(column)
            paths: Any = None
            if pyarrow.types.is_struct(pictures.type):
                names = [part.name for part in pictures.type]
                parts = dict(zip(names, pictures.flatten(), strict=True))
                pictures, paths = parts["bytes"], parts.get("path")
            pictures = pictures.cast(pyarrow.large_binary())  # its offsets have 64 bits
            has_none = pictures.is_null().to_numpy(zero_copy_only=False)
            _, offset_bytes, content = pictures.buffers()
            offsets = np.frombuffer(offset_bytes, np.int64)[pictures.offset :][: len(pictures) + 1]
            if copy is not None:
                shift = copy.tell() - int(offsets[0])
                copy.write(memoryview(content)[offsets[0] : offsets[-1]])
            else:
                shift = content.address - file.mapped.address
                if not 0 <= shift <= file.mapped.size - content.size:
                    return None
            starts.append(offsets[:-1] + shift)
            sizes.append(np.where(has_none, -1, np.diff(offsets)))
            for row in np.flatnonzero(has_none).tolist() if paths is not None else ():
                path = os.path.join(reader.folder, paths[row].as_py() or "")
                if (file_status := status_of(path)) is not None:
                    files[first_row + row], sizes[-1][row] = path, file_status[0]
            first_row += len(pictures)
    if copy is not None:
        copy.flush()
    status = os.stat(reader.name if copy is None else copy.name)
    return _PicturesInFile(
        path=reader.name if copy is None else copy.name,
        scanned_status=(status.st_size, status.st_mtime_ns),
        starts=np.concatenate(starts),
        sizes=np.concatenate(sizes),
        files=files,
    )


def is_parquet(name: str) -> bool:
    """Return whether a file of this name is Parquet."""
    return name.lower().endswith(PARQUET)


def saved_files(folder: Path) -> dict[str, str]:
    """Return the Arrow files in a folder that `save_to_disk` wrote, and the split of each; "" if it has none.

    The dictionary is empty for any other folder.

    Raises:
        SourceError: the folder is damaged.
    """
    splits = [""] if (folder / _SAVED_DATASET).is_file() else []
    if (folder / _SAVED_SPLITS).is_file():
        splits = _read_json(folder / _SAVED_SPLITS, _SavedSplits).splits
    split_of: dict[str, str] = {}
    for split in splits:
        state = _read_json(folder / split / _SAVED_DATASET, _SavedState)
        split_of |= {os.path.join(split, file.filename): split for file in state.data_files}
    return split_of


class _SavedSplits(msgspec.Struct):
    """Content of `dataset_dict.json`."""

    splits: list[str]


class _SavedFile(msgspec.Struct):
    """Entry of `state.json`."""

    filename: str


class _SavedState(msgspec.Struct):
    """Content of `state.json`, of which only the files count."""

    data_files: list[_SavedFile] = msgspec.field(name="_data_files")


_T = TypeVar("_T")


def _read_json(path: Path, content_type: type[_T]) -> _T:
    """Read a file of Hugging Face's library; SourceError if it is damaged."""
    with _open_table(str(path)) as file:
        try:
            return msgspec.json.decode(file.read(), type=content_type)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SourceError(
                f"not what save_to_disk wrote, or damaged ({error})", path=path, remedy="save it again"
            ) from error

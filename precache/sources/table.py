"""Tables as a source: each row is a sample, and columns are pictures, labels, splits and fields.

    .csv .tsv          with a header; cells are text, quoted as in RFC 4180. If the header has a space behind
                       a comma, spaces in front of cells are no part of them. If it has no comma (a TSV: no
                       tab), semicolons, tabs or bars separate the cells
    .jsonl             one object per line; the columns are the keys of all objects
    .parquet           also a folder of files, whose names say the splits
    .feather .arrow    Arrow's own files
    state.json         in a folder that Hugging Face's `save_to_disk` wrote: it lists Arrow's files

A file is opened as `Rows`, whose columns are read as lists. `precache.sources.targets` says what they mean,
and `RowSource` makes samples of them; also of the rows of datasets in memory, see `precache.sources.memory`.
CSV and JSON lines need no further package, the others pyarrow. Ids are numbers of rows from 0, counted over
all parts of a source.

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
import re
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

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
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Names of the files that a folder of `save_to_disk` has, of one dataset or of several splits."""
_ARROW_MAGIC = b"ARROW1"  # of a file with an index of its batches

_BATCH_PICTURES, _BATCH_ROWS = 32, 16_384
_TEXT_ROWS = 1024  # of a CSV read at a time: their cells stay in the CPU's cache
_BUFFER_BYTES = 1 << 20  # of Parquet read at a time, rather than a whole row group
_MAX_HEADER_BYTES = 1 << 20
_USUAL_EXTENSIONS = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG", ".webp", ".bmp", ".tif")
_EMPTY_OR_DOTS = re.compile(r"(^|/)\.{0,2}(/|$)")  # parts of a path that its shortest form has not
_MAX_PATH_BYTES = 4096  # no system takes longer paths
_PROBED_PICTURES = 8  # pictures that are read during the scan, so that the digest tells two datasets apart


# --- rows as a source ---


class StoredPictures(Protocol):
    """Pictures in a column; the only part of `Rows` that worker processes need."""

    @property
    def sizes(self) -> Ints | None:
        """Size of each picture in bytes, -1 if the row has none: int64 [n]; None if they are unknown."""

    def read(self, row: int, where: str, max_pixels: int) -> bytes | Image.Image:
        """Return the picture of a row, which messages call `where`; raises as `Source.read` does."""


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Successive rows, as `Rows.read` yields them.

    Attributes:
        columns: values of each column by its name, one for each row; None for a missing value.
        count: number of rows.
        lines: first line of each row, from 1, as in a text editor; None if rows are no lines.
        unread: rows of the batch that cannot be read; they have the values of another row.
    """

    columns: Mapping[str, Sequence[Any]]
    count: int
    lines: Sequence[int] | None = None
    unread: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that have been opened: of a table, of one of its files, or of a split of a dataset.

    Attributes:
        name: name of the table or dataset in messages.
        columns: its columns.
        read: function of names of columns that yields these, batch by batch, also where it is given no name;
            raises SourceError for a damaged row.
        open_pictures: function of the name of a column that opens the pictures in it; None if there are none.
        is_text: whether values are unparsed text, as the cells of a CSV are.
        has_lines: whether rows are lines of a text.
        folder: folder that paths of pictures are relative to; None if the rows must hold pictures.
        split: split of the rows, unless they have a column of splits.
        prefix: text in front of the samples' paths.
        is_dataset: whether the rows come from a dataset object, not a table; then a file may occur in several
            rows.
    """

    name: str
    columns: Sequence[ColumnInfo]
    read: Callable[[Sequence[str]], Iterable[RowBatch]]
    open_pictures: Callable[[str], StoredPictures] | None = None
    is_text: bool = False
    has_lines: bool = False
    folder: str | None = None
    split: str = ""
    prefix: str = ""
    is_dataset: bool = False

    def choose_roles(self, options: SourceOptions) -> Roles:
        """Choose the columns of pictures, labels, splits and fields, see `choose_roles` of `targets`."""
        may_be_paths = self.folder is not None
        return choose_roles(
            self.name, self.columns, options, may_be_paths=may_be_paths, is_dataset=self.is_dataset
        )


@dataclass(frozen=True, slots=True)
class ScannedRows:
    """Rows after the scan, reduced to what worker processes need.

    Attributes:
        name: name of the table or dataset in messages.
        has_lines: whether `SampleRef.offset` is the first line of a row, not its number; then these are all
            rows of the source.
        folder: folder of the pictures' files; "" if the rows hold the pictures.
        prefix: see `Rows`.
        pictures: pictures that the rows hold; None if they are files in `folder`.
        first: id of the first row; an offset is `first` plus the number of the row.
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
        parts: functions that open the rows of each part: a table, its files, or splits of a dataset. They
            raise SourceError if rows cannot be read, and MissingDependencyError if a library is missing. A
            part whose rows are lines is the only one. Empty after the scan.
        options: options with the columns that the user has named.
        scanned: rows of each part, after the scan.
    """

    root: Path
    paths: tuple[Path, ...]
    parts: tuple[Callable[[], Rows], ...]
    options: SourceOptions
    scanned: tuple[ScannedRows, ...] = ()

    def scan(self) -> Scan:
        parts = [open_rows() for open_rows in self.parts]
        roles = parts[0].choose_roles(self.options)
        scanned = _RowList(roles, is_text=parts[0].is_text)
        for rows in parts:
            part_roles = rows.choose_roles(self.options)
            if difference := _difference(part_roles, roles):
                raise SourceError(
                    f"{difference} {parts[0].name}",
                    path=rows.name,
                    remedy="convert it alone, or write both with the same columns",
                )
            scanned.add_part(rows, part_roles)
        if not len(scanned.samples):
            raise SourceError("has no rows; expected one for each picture", path=self.root)
        source = replace(self, parts=(), scanned=tuple(scanned.parts))
        scan = scan_rows(source, scanned.samples, scanned.values, self.options, (), scanned.warnings)
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


def _part_at(parts: Sequence[ScannedRows], offset: int) -> ScannedRows:
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
        values: their labels and fields.
        parts: parts whose rows are among them.
        warnings: lines on columns that the user did not name, and on missing files.
    """

    def __init__(self, roles: Roles, *, is_text: bool) -> None:
        self.samples = SampleList()
        self.parts: list[ScannedRows] = []
        self.warnings: list[str] = []
        self.values = RowValues(
            row_name=self.row_name,
            label=roles.label,
            class_names=roles.class_names,
            fields={name: [] for name in roles.fields},
            labels_are_text=is_text,
            fields_are_text=is_text,
        )

    def row_name(self, row: int) -> str:
        """Return the name of a row in messages."""
        offset = self.samples.offsets[row]
        return _part_at(self.parts, offset).row_name(offset, row)

    def add_part(self, rows: Rows, roles: Roles) -> None:
        """Append the rows of a part.

        Raises:
            SourceError: a row is damaged; two rows of a table name one picture, no file exists, or one cannot
                be examined.
        """
        image, first = roles.image.name, len(self.samples)
        pictures = rows.open_pictures(image) if roles.image.has_pictures and rows.open_pictures else None
        self.parts.append(
            ScannedRows(rows.name, rows.has_lines, rows.folder or "", rows.prefix, pictures, first)
        )
        self.warnings += [f"{rows.name}: {note}" for note in roles.notes]
        path_hashes, missing_rows = array("q"), list[int]()
        for batch in rows.read(roles.names if pictures else list(dict.fromkeys((image, *roles.names)))):
            start = len(self.samples)
            offsets = range(start, start + batch.count) if batch.lines is None else batch.lines
            splits: str | list[str] = rows.split
            if roles.split is not None:
                splits = self._splits(roles.split, batch.columns[roles.split], offsets)
            if pictures is not None:
                self._add_pictures(rows, pictures, batch, splits)
            else:
                self._check_paths(image, batch.columns[image], offsets)
                self._add_files(rows, batch.columns[image], splits, offsets, path_hashes, missing_rows)
            if roles.label is not None:
                self.values.label_cells += batch.columns[roles.label]
            for name in roles.fields:
                self.values.fields[name] += batch.columns[name]
        if not rows.is_dataset:
            self._check_unique(image, path_hashes)
        if missing_rows:
            self._warn_of_missing(rows, missing_rows)

    def _splits(self, column: str, values: Sequence[Any], offsets: Sequence[int]) -> list[str]:
        """Return the splits that the values of the last part say."""
        splits = []
        for value, offset in zip(values, offsets, strict=True):
            try:
                splits.append(split_name(column, value))
            except ValueError as error:
                where = self.parts[-1].row_name(offset, len(self.samples) + len(splits))
                raise SourceError(f"{column!r}: {error}", path=where) from None
        return splits

    def _add_pictures(
        self, rows: Rows, pictures: StoredPictures, batch: RowBatch, splits: str | Sequence[str]
    ) -> None:
        """Append rows that hold their pictures."""
        start, first = len(self.samples), self.parts[-1].first
        sizes = [0] * batch.count
        if pictures.sizes is not None:
            sizes = pictures.sizes[start - first :][: batch.count].tolist()
        for row in batch.unread:
            sizes[row] = -1
        first_number = start - first if rows.prefix else start
        paths = [f"{rows.prefix}{first_number + row:08d}" for row in range(batch.count)]
        self.samples.add_files(paths, splits, sizes, (), range(start, start + batch.count))

    def _check_paths(self, column: str, paths: Sequence[Any], offsets: Sequence[int]) -> None:
        """Raise SourceError for a value that cannot be the path of a picture."""
        for row, path in enumerate(paths, len(self.samples)):
            if reason := _path_problem(path):
                where = self.parts[-1].row_name(offsets[row - len(self.samples)], row)
                raise SourceError(f"{column!r}: {path!r:.60} {reason}", path=where)

    def _add_files(
        self,
        rows: Rows,
        paths: Sequence[str],
        splits: str | Sequence[str],
        offsets: Sequence[int],
        path_hashes: "array[int]",
        missing_rows: list[int],
    ) -> None:
        """Append rows whose pictures are files, hashes of their absolute paths, and those without a file."""
        folder = os.path.abspath(self.parts[-1].folder)
        short_paths, sizes, times = list[str](), array("q"), array("q")
        for row, path in enumerate(paths, len(self.samples)):
            short_path, full_path, status = _find_file(folder, path)
            if status is None:
                missing_rows.append(row)
            size, modified_ns = status or (-1, 0)
            sizes.append(size)
            times.append(modified_ns)
            short_paths.append(f"{rows.prefix}{short_path}")
            path_hashes.append(hash(full_path))
        self.samples.add_files(short_paths, splits, sizes, times, offsets)

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

    def _warn_of_missing(self, rows: Rows, missing_rows: Sequence[int]) -> None:
        """Warn of rows of the last part without a picture; SourceError if none of its rows has one."""
        scanned, first_missing = self.parts[-1], self.row_name(missing_rows[0])
        missing_file = scanned.file_of(self.samples.path(missing_rows[0]))
        count = len(self.samples) - scanned.first
        if len(missing_rows) < count:
            number = f"{quantity(len(missing_rows), 'row')} of {count:,} without a picture"
            self.warnings.append(f"{scanned.name}: {number}; the first is {first_missing}: {missing_file!r}")
            return
        remedy = (
            "paths are relative to the table, or to the folder that --root names, and have the same "
            "extension as the files"
        )
        if rows.is_dataset:
            remedy = "check the folder of the dataset"
        for column in rows.columns:
            if column.has_pictures:
                remedy += f"; or take the bytes in {column.name!r}: --image {column.name}"
        raise SourceError(
            f"there is no picture {missing_file!r}, nor one for any other row",
            path=first_missing,
            remedy=remedy,
        )


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


def _find_file(folder: str, path: str) -> tuple[str, str, tuple[int, int] | None]:
    """Return a path in its shortest form, the absolute one, and the status of the file; None without a file.

    Args:
        folder: absolute path of the folder that `path` is relative to.
    """
    short_path, full_path = _normalize(folder, path)
    if (status := status_of(full_path)) is not None:
        return short_path, full_path, status
    for spelling in _spellings(path):
        other_path, other_full_path = _normalize(folder, spelling)
        if (status := status_of(other_full_path)) is not None:
            return other_path, other_full_path, status
    return short_path, full_path, None


def _normalize(folder: str, path: str) -> tuple[str, str]:
    """Return a row's path without `.`, `..` and double slashes, and the absolute path of the file.

    A path whose `..` follows a link to another folder, or a missing folder, is returned as it is written.
    """
    if not _EMPTY_OR_DOTS.search(path):
        return path, f"{folder}/{path}"
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


def _read_file(part: ScannedRows, ref: SampleRef, where: str, max_pixels: int) -> bytes:
    """Return the content of the file that a row names; it must be unchanged since the scan."""
    path = part.file_of(ref.path)
    if ref.bytes < 0:
        reason = "is a folder" if os.path.isdir(path) else "is not a file"
        raise ImageError(where, f"{reason}; named in {part.row_name(ref.offset, ref.id)}")
    return read_picture(path, max_pixels, (ref.bytes, ref.modified_ns))


# --- CSV and JSON lines ---


def open_csv(name: str, folder: str) -> Rows:
    """Open a CSV or TSV, with paths relative to `folder`; all cells stay text.

    Raises:
        SourceError: the file cannot be read, is no text, or has no header; or, when it is read, a row has
            more or fewer cells than the header.
    """
    _, header = next(_records(name), (0, []))
    if not header:
        raise SourceError("is empty; expected a first line with the names of its columns", path=name)
    names = [column.strip() for column in header]

    def read(wanted: Sequence[str]) -> Iterator[RowBatch]:
        records = islice(_records(name), 1, None)
        equal_cells = dict[str, str]()  # one text for all cells that are equal
        while batch := list(islice(records, _TEXT_ROWS)):
            columns = {}
            for column in wanted:
                position = names.index(column)
                columns[column] = [equal_cells.setdefault(row[position], row[position]) for _, row in batch]
            yield RowBatch(columns, len(batch), [line for line, _ in batch])
            if len(equal_cells) > _BATCH_ROWS:
                equal_cells.clear()

    columns = [ColumnInfo(column) for column in names]
    return Rows(name, columns, read, is_text=True, has_lines=True, folder=folder)


def _records(name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield header and rows of a CSV: the first line of each, and its cells.

    Raises:
        SourceError: the file cannot be read or is no text, a quote is not closed, or a row has more or fewer
            cells than the header.
    """
    content = _read_text(name)
    first_line = next(iter(content[:_MAX_HEADER_BYTES].splitlines()), b"").decode(errors="replace")
    delimiter = find_delimiter(first_line, DELIMITERS[Path(name).suffix.lower()])
    reader = csv.reader(
        io.TextIOWrapper(io.BytesIO(content), "utf-8", newline=""),
        delimiter=delimiter,
        skipinitialspace=f"{delimiter} " in first_line,
        strict=True,
    )
    count, row = 0, -1
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise SourceError(
                f"not CSV ({error})",
                path=f"{name}, line {line:,}",
                remedy=(
                    f"close every quote, double those within quotes, and write cells of over "
                    f"{csv.field_size_limit():,} characters as JSON lines"
                ),
            ) from error
        if not cells:
            continue  # a blank line
        count = count or len(cells)
        if len(cells) != count:
            raise SourceError(
                f"expected {count} cells as in the header, got {len(cells)}",
                path=f"{name}, line {line:,} (id {row})",
                remedy="put quotes around a cell that has the separator or a line break in it",
            )
        row += 1
        yield line, cells


def open_json_lines(name: str, folder: str) -> Rows:
    """Open JSON lines, one object per line, with paths relative to `folder`.

    Raises:
        SourceError: the file cannot be read, is no text, or a line is no object.
    """
    decode = msgspec.json.Decoder().decode
    lines, objects = list[int](), list[dict[str, Any]]()
    for line, text in enumerate(_read_text(name).splitlines(), 1):
        if not text or text.isspace():
            continue
        where = f"{name}, line {line:,}"
        try:
            value = decode(text)
        except msgspec.DecodeError:
            try:
                value = json.loads(text)  # takes NaN, too, and its errors say more
            except (ValueError, RecursionError) as error:
                raise SourceError(f"not JSON ({error}); expected one object per line", path=where) from error
        if not isinstance(value, dict):
            raise SourceError('is not a JSON object; expected one per line: {"path": "a.jpg"}', path=where)
        lines.append(line)
        objects.append(value)
    names = dict.fromkeys(chain.from_iterable(objects))
    if not names:
        raise SourceError("is empty; expected one JSON object per line", path=name)

    def read(wanted: Sequence[str]) -> Iterator[RowBatch]:
        columns = {column: [value.get(column) for value in objects] for column in wanted}
        yield RowBatch(columns, len(objects), lines)

    columns = [ColumnInfo(column) for column in names]
    return Rows(name, columns, read, has_lines=True, folder=folder)


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


def open_arrow(
    name: str, folder: str, split: str = "", prefix: str = "", *, may_be_paths: bool = True
) -> Rows:
    """Open a Parquet file, or one of Arrow's own.

    Args:
        name: path of the file.
        folder: folder that paths of pictures, also of those without bytes, are relative to.
        split, prefix: see `Rows`.
        may_be_paths: whether a column may hold the paths of pictures, instead of these.

    Raises:
        MissingDependencyError: pyarrow is not installed.
        SourceError: the file is none of these, or damaged.
    """
    with _open_arrow_file(name) as file:
        columns = [
            ColumnInfo(column.name, _class_names(file.schema, column.name), _has_bytes(column.type))
            for column in file.schema
        ]

    def read(wanted: Sequence[str]) -> Iterator[RowBatch]:
        with _open_arrow_file(name) as file:
            for batch in file.read(wanted, False):
                values = {column: batch.column(column).to_pylist() for column in wanted}
                yield RowBatch(values, batch.num_rows)

    return Rows(
        name,
        columns,
        read,
        partial(_open_pictures, name, folder),
        folder=folder if may_be_paths else None,
        split=split,
        prefix=prefix,
    )


class _ArrowFile(NamedTuple):
    """A file whose columns Arrow reads.

    Attributes:
        schema: names and types of the columns.
        read: function of names of columns, and of whether these are pictures, that yields record batches.
            Pictures of Parquet come a few at a time; others stay in the mapped file.
        mapped: the mapped file, as a buffer of Arrow; None for Parquet, which has to be decoded.
    """

    schema: Any
    read: Callable[[Sequence[str], bool], Iterator[Any]]
    mapped: Any = None


@contextmanager
def _open_arrow_file(name: str) -> Iterator[_ArrowFile]:
    """Open the file; SourceError if it cannot be read, also in the block."""
    try:
        import pyarrow
    except ImportError as error:
        raise MissingDependencyError(
            f"Parquet and Arrow's own files need the extra 'table' ({error})",
            path=name,
            remedy=f"run: {install_command('table')}",
        ) from error
    with _open_table(name) as file:
        try:
            yield _open_parquet(file) if is_parquet(name) else _open_arrow(name, file)
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
            kind = "Parquet" if is_parquet(name) else "an Arrow file"
            reason = " ".join(str(error).split())[:200]
            raise SourceError(
                f"not {kind} that can be read ({reason})", path=name, remedy="write it again"
            ) from error


def _open_parquet(file: BinaryIO) -> _ArrowFile:
    from pyarrow import parquet

    opened = parquet.ParquetFile(
        file, pre_buffer=False, page_checksum_verification=True, buffer_size=_BUFFER_BYTES
    )

    def read(names: Sequence[str], are_pictures: bool) -> Iterator[Any]:
        row_count = _BATCH_PICTURES if are_pictures else _BATCH_ROWS
        remaining = opened.metadata.num_rows
        for batch in opened.iter_batches(row_count, columns=list(names), use_threads=False):
            remaining -= batch.num_rows
            if remaining < 0:
                break
            batch.validate(full=True)  # text that is no UTF-8
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

    def read(names: Sequence[str], are_pictures: bool) -> Iterator[Any]:
        options = pyarrow.ipc.IpcReadOptions(use_threads=False)
        if not are_pictures:  # a choice of columns is copied to memory
            options.included_fields = [schema.get_field_index(column) for column in names or schema.names[:1]]
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


def _open_pictures(name: str, folder: str, column: str) -> _PicturesInFile:
    """Find the pictures in a column of Parquet or of an Arrow file."""
    status = os.stat(name)
    pictures = _find_pictures(name, folder, column, status.st_size, status.st_mtime_ns)
    if not os.path.exists(pictures.path):  # the staging folder was cleaned up meanwhile
        _find_pictures.cache_clear()
        pictures = _find_pictures(name, folder, column, status.st_size, status.st_mtime_ns)
    return pictures


@cache
def _find_pictures(name: str, folder: str, column: str, file_bytes: int, modified_ns: int) -> _PicturesInFile:
    """Find the pictures in a column, once for each size and time of the table; copy them if they are packed.

    Raises:
        SourceError: the disk has no room for the copy.
    """
    pictures = None if is_parquet(name) else _locate_pictures(name, folder, column, None)
    if pictures is not None:
        return pictures
    staging_folder = staging.folder()
    with (
        os_errors_as(
            SourceError,
            f"its pictures cannot be copied into {staging_folder.parent}",
            "set TMPDIR to a folder on a larger disk",
            path=name,
        ),
        tempfile.NamedTemporaryFile(dir=staging_folder, delete=False) as copy,
    ):
        try:
            pictures = _locate_pictures(name, folder, column, copy)
        except BaseException:
            os.unlink(copy.name)
            raise
    assert pictures is not None
    return pictures


def _locate_pictures(name: str, folder: str, column: str, copy: Any) -> _PicturesInFile | None:
    """Return where the pictures in a column lie: in `copy`, to which they are written, or in the table.

    None if there is no copy, and the table is compressed.
    """
    import pyarrow

    starts, sizes, files = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], dict[int, str]()
    first_row = 0
    with _open_arrow_file(name) as file:
        for batch in file.read([column], True):
            if not batch.num_rows:
                continue
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
            shift = 0
            if copy is not None:
                shift = copy.tell() - int(offsets[0])
                copy.write(memoryview(content)[offsets[0] : offsets[-1]])
            elif offsets[-1] > offsets[0]:
                shift = content.address - file.mapped.address
                if not 0 <= shift <= file.mapped.size - content.size:
                    return None
            starts.append(offsets[:-1] + shift)
            sizes.append(np.where(has_none, -1, np.diff(offsets)))
            for row in np.flatnonzero(has_none).tolist() if paths is not None else ():
                path = os.path.join(folder, str(paths[row].as_py() or ""))
                if (file_status := status_of(path)) is not None:
                    files[first_row + row], sizes[-1][row] = path, file_status[0]
            first_row += len(pictures)
    if copy is not None:
        copy.flush()
    status = os.stat(name if copy is None else copy.name)
    return _PicturesInFile(
        path=name if copy is None else copy.name,
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

    Raises:
        SourceError: the folder is damaged.
    """
    path, split_of = folder / SAVED_SPLITS, dict[str, str]()
    has_splits = path.is_file()
    try:
        for split in json.loads(path.read_bytes())["splits"] if has_splits else [""]:
            path = folder / split / SAVED_DATASET
            for file in json.loads(path.read_bytes())["_data_files"]:
                split_of[os.path.join(split, file["filename"])] = split
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise SourceError(
            f"not what save_to_disk wrote, or damaged ({' '.join(str(error).split())[:200]})",
            path=path,
            remedy="save it again",
        ) from error
    return split_of

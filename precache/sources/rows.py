"""Tables and datasets as a source: each row is a sample, and columns are pictures, labels, splits and fields.

One column holds the picture, or the path of its file; others hold its label, its split and its fields. A
`RowReader` reads the rows of one kind of table or dataset, and `RowSource` does everything else. To add a
kind, write a reader, and open it in `precache.sources`.

    precache.sources.table          CSV, TSV and JSON lines, with the paths of pictures
    precache.sources.parquet        Parquet, with paths or with the pictures
    precache.sources.dataset        anything with `__len__` and `__getitem__`, and torchvision's folders
    precache.sources.huggingface    datasets of Hugging Face's library

`precache.sources.labels` turns the labels into classes or numbers. Ids are numbers of rows from 0, counted
over all readers of a source. The path of a sample is that of its file, or else the number of its row.
"""

import hashlib
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
from PIL import Image

from precache.dataset.columns import Ints
from precache.errors import ImageError, SourceError
from precache.pictures.kinds import IMAGE_EXTENSIONS, extension
from precache.pictures.reading import check_bytes, read_picture, status_of
from precache.reporting import quantity
from precache.sources.base import (
    ANY_SIZE,
    SampleRef,
    Samples,
    Scan,
    picture_checksum,
)
from precache.sources.labelled_list import ColumnRoles, LabelledList
from precache.sources.options import SourceOptions
from precache.sources.picture_values import to_picture

IMAGE_NAMES = ("image", "img", "picture", "path", "file", "filename", "file_name")
"""Usual names of the column of pictures, or of their paths."""

_USUAL_EXTENSIONS = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG", ".webp", ".bmp", ".tif")
_MAX_PATH_BYTES = 4096  # no system takes longer paths
_PROBED_PICTURES = 8  # pictures that are read during the scan, so that the digest tells two datasets apart


class Row(NamedTuple):
    """A row that a `RowReader` has read.

    Attributes:
        number: number of the row from 0, or of its first line from 1 if the reader `counts_lines`.
        values: values of the requested columns, in their order.
        unread: whether the row could not be read; then the values are those of another row.
    """

    number: int
    values: Sequence[Any]
    unread: bool = False


@dataclass(frozen=True, slots=True)
class StoredPictures:
    """Pictures in a column; the only part of a reader that worker processes need.

    Attributes:
        read: function of a row's number that returns its picture, as one of the values that
            `precache.sources.picture_values` lists. It raises ImageError if the row has none, and SourceError
            if it cannot be read now.
        sizes: int64 [n], size of each picture in bytes, -1 if the row has none; None if the sizes are
            unknown before the pictures are read.
    """

    read: Callable[[int], Any]
    sizes: Ints | None = None


@dataclass(frozen=True, slots=True)
class TableColumn:
    """Column of a table or dataset.

    Attributes:
        class_names: names of classes that whole numbers in the column are indices of; None without names.
        pictures: function that opens the pictures in the column; None if it has none, but perhaps paths.
    """

    name: str
    class_names: tuple[str, ...] | None = None
    pictures: Callable[[], StoredPictures] | None = None


class RowReader(Protocol):
    """Reader of the rows of one kind of table or dataset."""

    @property
    def name(self) -> str:
        """Name of the table or dataset in messages."""

    @property
    def counts_lines(self) -> bool:
        """Whether messages name a row by its first line, as in a text editor."""

    @property
    def is_text(self) -> bool:
        """Whether values are unparsed text, as the cells of a CSV are."""

    def columns(self) -> list[TableColumn]:
        """Return the columns.

        Raises:
            SourceError: the columns cannot be read, or there are none.
            MissingDependencyError: a library is missing.
        """

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        """Yield the rows with the values of these columns; None for a missing value.

        Args:
            names: names of the columns; may be empty.

        Raises:
            SourceError: a row is damaged; the error names it.
        """


@dataclass(frozen=True, slots=True)
class RowPart:
    """Rows of one reader in a source: all of its rows, one of its splits, or one of its files.

    Attributes:
        reader: reader of the rows.
        folder: folder that paths of pictures are relative to; None if the rows must hold pictures.
        split: split of the rows, unless they have a column of splits.
        prefix: text in front of the samples' paths.
        is_dataset: whether the rows come from a dataset object, not a table. Then a file may occur in several
            rows, and the column `label` is used without a warning.
    """

    reader: RowReader
    folder: str | None = None
    split: str = ""
    prefix: str = ""
    is_dataset: bool = False

    def choose_columns(self, options: SourceOptions) -> tuple[ColumnRoles, TableColumn]:
        """Return the columns of labels, splits and fields, and the column of the pictures.

        Raises:
            SettingError: a column is missing, or several columns fit.
            SourceError: no column has pictures.
        """
        reader, columns = self.reader, self.reader.columns()
        by_name = {column.name: column for column in columns}
        # first choice: a usual name and pictures; second: a usual name and perhaps paths; third: pictures
        usual = [column for column in columns if column.name in IMAGE_NAMES]
        images = [column for column in usual if column.pictures is not None]
        if not images and self.folder is not None:
            images = usual
        if not images:
            images = [column for column in columns if column.pictures is not None]
        if options.image in by_name:
            images = [by_name[options.image]]
        if self.folder is None and all(column.pictures is None for column in images):
            raise SourceError(
                "has no column of pictures, as bytes",
                path=reader.name,
                remedy="where it has their paths, name one file, not the folder, and --image",
            )
        names = [column.name for column in columns]
        image_names = [column.name for column in images]
        roles = ColumnRoles.from_options(reader.name, names, image_names, options)
        image = by_name[roles.image]
        if roles.label is not None:
            roles = replace(roles, class_names=by_name[roles.label].class_names)
        is_dataset = self.is_dataset or image.pictures is not None
        if options.label is None and roles.label == "label" and is_dataset:
            roles = replace(roles, notes=roles.notes[1:])  # datasets name their labels so by convention
        return roles, image


@dataclass(frozen=True, slots=True)
class ScannedPart:
    """Part of a source after the scan, reduced to what worker processes need.

    Attributes:
        name, counts_lines: attributes of the reader.
        folder: folder of the pictures' files; "" if the rows hold the pictures.
        prefix: see `RowPart`.
        pictures: pictures that the rows hold; None if they are files in `folder`.
        first: id of the part's first row; `SampleRef.place` is `first` plus the number of the row.
    """

    name: str
    counts_lines: bool
    folder: str
    prefix: str
    pictures: StoredPictures | None
    first: int

    def row_name(self, place: int, sample_id: int) -> str:
        """Return the name of a row for messages."""
        if self.counts_lines:
            return f"{self.name}, line {place:,} (id {sample_id})"
        return f"{self.name}: row {place - self.first}"

    def file_of(self, path: str) -> str:
        """Return the file of the sample with this path."""
        return os.path.join(self.folder, path.removeprefix(self.prefix))


@dataclass(frozen=True, slots=True)
class RowSource:
    """Tables and datasets as a `Source`.

    Attributes:
        root, paths: see `Source`.
        parts: parts before the scan; a part whose reader `counts_lines` is the only one.
        options: options with the columns that the user has named.
        scanned: parts after the scan.
    """

    root: Path
    paths: tuple[Path, ...]
    parts: tuple[RowPart, ...]
    options: SourceOptions
    scanned: tuple[ScannedPart, ...] = ()

    def scan(self) -> Scan:
        choices = [part.choose_columns(self.options) for part in self.parts]
        first_roles, _ = choices[0]
        for part, (roles, _) in zip(self.parts, choices, strict=True):
            if difference := _difference(roles, first_roles):
                raise SourceError(
                    f"{difference} {self.parts[0].reader.name}",
                    path=part.reader.name,
                    remedy="convert it alone, or write both with the same columns",
                )
        scanned: list[ScannedPart] = []

        def row_name(row: int) -> str:
            return _part_at(scanned, rows.places[row]).row_name(rows.places[row], row)

        rows = LabelledList(row_name, first_roles, is_text=self.parts[0].reader.is_text)
        warnings: list[str] = []
        for part, (roles, image) in zip(self.parts, choices, strict=True):
            reader = part.reader
            pictures = None if image.pictures is None else image.pictures()
            scanned_part = ScannedPart(
                reader.name, reader.counts_lines, part.folder or "", part.prefix, pictures, len(rows)
            )
            scanned.append(scanned_part)
            if pictures is None:
                warnings += _list_files(rows, part, scanned_part, roles)
            else:
                _list_stored_pictures(rows, part, scanned_part, pictures, roles)
            warnings += [f"{reader.name}: {note}" for note in roles.notes]
        if not len(rows):
            raise SourceError("has no rows; expected one for each picture", path=self.root)
        source = replace(self, parts=(), scanned=tuple(scanned))
        scan = rows.scan(source, self.options, (), warnings)
        checksums = source._probe_checksums(scan.samples)
        if not checksums:
            return scan
        return replace(scan, digest=hashlib.sha256(f"{scan.digest}{checksums}".encode()).hexdigest())

    def read(self, ref: SampleRef, max_pixels: int) -> bytes | Image.Image:
        part, where = _part_at(self.scanned, ref.place), self.where(ref)
        if part.pictures is None:
            return _read_file(part, ref, where, max_pixels)
        check_bytes(where, ref.bytes, max_pixels)
        picture = to_picture(part.pictures.read(ref.place - part.first), where, max_pixels)
        if ref.bytes < 0:
            raise ImageError(where, "could not be read when the dataset was listed")
        return picture

    def where(self, ref: SampleRef) -> str:
        """Return the name for messages: the row, and the path of the picture's file if it has one."""
        part = _part_at(self.scanned, ref.place)
        row = part.row_name(ref.place, ref.id)
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
            if _part_at(self.scanned, ref.place).pictures is None:
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


def _part_at(parts: Sequence[ScannedPart], place: int) -> ScannedPart:
    """Return the part of the sample at `place`."""
    return parts[bisect_right(parts, place, key=lambda part: part.first) - 1]


def _difference(roles: ColumnRoles, first_roles: ColumnRoles) -> str:
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


def _list_stored_pictures(
    rows: LabelledList, part: RowPart, scanned: ScannedPart, pictures: StoredPictures, roles: ColumnRoles
) -> None:
    """Append the rows of a part that hold their pictures."""
    names = roles.names
    for row in part.reader.rows(names):
        place, size = scanned.first + row.number, 0
        if pictures.sizes is not None:
            size = int(pictures.sizes[row.number])
        if row.unread:
            size = -1
        path = f"{part.prefix}{row.number:08d}" if part.prefix else f"{place:08d}"
        rows.add_row(dict(zip(names, row.values, strict=True)), part.split, path, size, 0, place)


def _list_files(rows: LabelledList, part: RowPart, scanned: ScannedPart, roles: ColumnRoles) -> list[str]:
    """Append the rows of a part whose pictures are files, and return warnings of missing files.

    Raises:
        SourceError: two rows of a table name one picture, no file exists, or one cannot be examined.
    """
    names = list(dict.fromkeys((roles.image, *roles.names)))
    missing_rows, path_hashes = list[int](), array("Q")
    folder = os.path.abspath(scanned.folder)
    for row in part.reader.rows(names):
        values, place = dict(zip(names, row.values, strict=True)), scanned.first + row.number
        path = values[roles.image]
        if reason := _path_problem(path):
            where = scanned.row_name(place, len(rows))
            raise SourceError(f"{roles.image!r}: {path!r:.60} {reason}", path=where)
        short_path, full_path = _normalize(folder, path)
        status = status_of(os.path.join(scanned.folder, short_path))
        for spelling in () if status is not None else _spellings(path):
            other_path, other_full_path = _normalize(folder, spelling)
            if (status := status_of(os.path.join(scanned.folder, other_path))) is not None:
                short_path, full_path = other_path, other_full_path
                break
        path_hashes.append(xxhash.xxh3_64_intdigest(os.fsencode(full_path)))
        if status is None:
            missing_rows.append(len(rows))
        size, modified_ns = status or (-1, 0)
        rows.add_row(values, part.split, f"{part.prefix}{short_path}", size, modified_ns, place)
    if not part.is_dataset:
        _check_unique(rows, scanned, roles.image, np.frombuffer(path_hashes, np.uint64))
    if not missing_rows:
        return []
    first_missing = rows.row_name(missing_rows[0])
    missing_file = scanned.file_of(rows.path(missing_rows[0]))
    if len(missing_rows) == len(path_hashes):
        remedy = (
            "paths are relative to the table, or to the folder that --root names, and have the same "
            "extension as the files"
        )
        if part.is_dataset:
            remedy = "check the folder of the dataset"
        for column in part.reader.columns():
            if column.pictures is not None:
                remedy += f"; or take the bytes in {column.name!r}: --image {column.name}"
        raise SourceError(
            f"there is no picture {missing_file!r}, nor one for any other row",
            path=first_missing,
            remedy=remedy,
        )
    count = f"{quantity(len(missing_rows), 'row')} of {len(path_hashes):,} without a picture"
    return [f"{scanned.name}: {count}; the first is {first_missing}: {missing_file!r}"]


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

    A path whose `..` follows a link to another place, or a missing folder, is returned as it is written.

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


def _check_unique(
    rows: LabelledList, scanned: ScannedPart, column: str, path_hashes: npt.NDArray[np.uint64]
) -> None:
    """Raise SourceError if two rows name one picture.

    Args:
        path_hashes: uint64 [n], hash of the absolute path in each row of the part.
    """
    order = np.argsort(path_hashes, kind="stable")
    repeated = np.flatnonzero(path_hashes[order][1:] == path_hashes[order][:-1])
    if not len(repeated):
        return
    first, second = order[repeated[0] : repeated[0] + 2].tolist()
    first_name = f"row {first}"
    if scanned.counts_lines:
        first_name = f"line {rows.places[first]:,} (id {first})"
    raise rows.error(
        second,
        column,
        f"{rows.path(second)!r} is in {first_name}, too; remove one of them, or write all its labels into "
        f"one cell (--separator)",
    )


def _read_file(part: ScannedPart, ref: SampleRef, where: str, max_pixels: int) -> bytes:
    """Return the content of the file that a row names; it must be unchanged since the scan."""
    path = part.file_of(ref.path)
    if ref.bytes < 0:
        reason = "is a folder" if os.path.isdir(path) else "is not a file"
        raise ImageError(where, f"{reason}; named in {part.row_name(ref.place, ref.id)}")
    return read_picture(path, max_pixels, (ref.bytes, ref.modified_ns))

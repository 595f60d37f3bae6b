"""Parquet files as rows, with paths of pictures or with the pictures, as Hugging Face publishes datasets.

    data/train-00000-of-00002.parquet    image: struct<bytes, path>, label: int64
    data/train-00001-of-00002.parquet

A column of pictures has bytes, or structs with `bytes` or, if these are empty, the `path` of a file. If the
schema's metadata `huggingface` has names of classes, labels are indices of these. A source is one file, or
all files in a folder and in its folders, sorted by name; their names say the splits. The path of a sample is
its row in 8 digits, in a folder of files behind the path of its file:
data/train-00000-of-00002.parquet/00000042.

Pictures are read in shuffled order, but Parquet can only be read in row groups of hundreds. So the pictures
are copied first to a file, one behind the other, see `precache.storage.staging`.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from precache.dataset.columns import Ints
from precache.errors import ImageError, MissingDependencyError, SourceError, os_errors_as
from precache.packages import install_command
from precache.pictures.reading import read_part, read_picture, status_of
from precache.sources.base import ANY_SIZE
from precache.sources.labels import unique_names
from precache.sources.rows import Row, StoredPictures, TableColumn
from precache.sources.table import open_table
from precache.storage import staging

SUFFIX = ".parquet"
_BUFFER_BYTES = 1 << 20  # read at a time, rather than a whole row group
_BATCH_ROWS = 65_536
_BATCH_PICTURES = 32


def is_parquet(name: str) -> bool:
    """Return whether a file of this name is Parquet."""
    return name.lower().endswith(SUFFIX)


@dataclass(frozen=True, slots=True)
class ParquetReader:
    """Reader of the rows of a Parquet file, see `RowReader`.

    Attributes:
        name: path of the file.
        folder: folder that the `path` of a picture without bytes is relative to.
    """

    name: str
    folder: str

    counts_lines = False
    is_text = False

    def columns(self) -> list[TableColumn]:
        with self._open() as parquet:
            schema = parquet.schema_arrow
        columns = []
        for field in schema:
            open_pictures = partial(self._open_pictures, field.name) if _has_bytes(field.type) else None
            columns.append(TableColumn(field.name, _class_names(schema, field.name), open_pictures))
        return columns

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        if not names:
            with self._open() as parquet:
                count = parquet.metadata.num_rows
            for number in range(count):
                yield Row(number, ())
            return
        number = 0
        for columns in self._batches(names, _BATCH_ROWS):
            for values in zip(*columns, strict=True):
                yield Row(number, values)
                number += 1

    def content(self, picture: Any) -> bytes | None:
        """Return the bytes of a picture, or of the file at its path; None if it has neither."""
        data: bytes | None = picture.get("bytes") if isinstance(picture, dict) else picture
        if data is not None or not isinstance(picture, dict) or not picture.get("path"):
            return data
        path = os.path.join(self.folder, picture["path"])
        return None if status_of(path) is None else read_picture(path, ANY_SIZE)

    def pictures(self, column: str) -> Iterator[Any]:
        """Yield the pictures in a column; a few of them are in memory at a time."""
        for (pictures,) in self._batches([column], _BATCH_PICTURES):
            yield from pictures

    def _open_pictures(self, column: str) -> StoredPictures:
        status = os.stat(self.name)
        copy = _copy_pictures(self, column, status.st_size, status.st_mtime_ns)
        if not os.path.exists(copy.path):  # the staging folder was cleaned up meanwhile
            _copy_pictures.cache_clear()
            copy = _copy_pictures(self, column, status.st_size, status.st_mtime_ns)
        return StoredPictures(copy.read, copy.sizes)

    def _batches(self, names: Sequence[str], count: int) -> Iterator[list[list[Any]]]:
        """Yield the values of the columns, `count` rows at a time; SourceError if the file is damaged."""
        with self._open() as parquet:
            remaining = parquet.metadata.num_rows
            for batch in parquet.iter_batches(count, columns=list(names), use_threads=False):
                batch_names = list(batch.schema.names)
                remaining -= batch.num_rows
                if remaining < 0:
                    break
                yield [batch.column(batch_names.index(name)).to_pylist() for name in names]
        if remaining:
            raise SourceError(
                "has more or fewer rows than its end says", path=self.name, remedy="write it again"
            )

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """Open the `pyarrow.parquet.ParquetFile`; its errors in the block become SourceErrors.

        Raises:
            MissingDependencyError: pyarrow is not installed.
            SourceError: the file is not Parquet, or damaged.
        """
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise MissingDependencyError(
                f"Parquet needs the extra 'table' ({error})",
                path=self.name,
                remedy=f"run: {install_command('table')}",
            ) from error
        with open_table(self.name) as file:
            try:
                yield parquet.ParquetFile(
                    file, pre_buffer=False, page_checksum_verification=True, buffer_size=_BUFFER_BYTES
                )
            except (pyarrow.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
                reason = " ".join(str(error).split())[:200]
                raise SourceError(
                    f"not Parquet that can be read ({reason})", path=self.name, remedy="write it again"
                ) from error


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
class _PictureCopy:
    """File with a copy of the pictures in a column, one behind the other.

    Attributes:
        table: name of the Parquet file in messages.
        path: path of the copy.
        scanned_status: size of the copy in bytes, and time of its last write in ns.
        sizes: int64 [n], size of each picture in bytes; -1 if the row has none.
        ends: int64 [n], offset of the end of each picture.
    """

    table: str
    path: str
    scanned_status: tuple[int, int]
    sizes: Ints
    ends: Ints

    def read(self, row: int) -> bytes:
        """Read the picture of a row; raises as `StoredPictures.read` does."""
        size, where = int(self.sizes[row]), f"{self.table}: row {row}"
        if size < 0:
            raise ImageError(where, "has no picture, neither bytes nor a file")
        data = read_part(self.path, where, self.scanned_status, int(self.ends[row]) - size, size)
        if len(data) != size:
            raise SourceError("could not be read as a whole", path=where, remedy="run the same command again")
        return data


@cache
def _copy_pictures(reader: ParquetReader, column: str, file_bytes: int, modified_ns: int) -> _PictureCopy:
    """Copy the pictures in a column to a file, once for each size and time of the Parquet file.

    Raises:
        SourceError: the disk has no room for the copy.
    """
    folder = staging.folder()
    sizes = []
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
            for picture in reader.pictures(column):
                data = reader.content(picture)
                sizes.append(-1 if data is None else copy.write(data))
        except BaseException:
            os.unlink(copy.name)
            raise
    status = os.stat(copy.name)
    picture_sizes = np.array(sizes, np.int64)
    return _PictureCopy(
        table=reader.name,
        path=copy.name,
        scanned_status=(status.st_size, status.st_mtime_ns),
        sizes=picture_sizes,
        ends=np.cumsum(np.maximum(picture_sizes, 0)),
    )

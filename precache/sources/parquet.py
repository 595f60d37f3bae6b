"""Parquet: tables with paths of pictures, and files with pictures in them, as Hugging Face publishes them.

    data/train-00000-of-00002.parquet    image: struct<bytes, path>, label: int64
    data/train-00001-of-00002.parquet

A column of pictures is of bytes, or of structs with `bytes`, and with `path` of a file where these are empty.
Where the schema has the names of classes, in the metadata called `huggingface`, labels are indices of these.
A source is one file, or all of a folder and of the folders in it, by name, and their names say the splits.
A sample's path is its row in 8 digits, behind the path of its file in a folder:
data/train-00000-of-00002.parquet/00000042.

Pictures are read in shuffled order, and of Parquet only a row group of hundreds can be read at once. So they
are copied out first, one behind the other, see `precache.storage.staging`.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
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
_PAGES_BYTES = 1 << 20  # read at a time, in the place of a row group
_BATCH_ROWS = 65_536
_BATCH_PICTURES = 32


def is_parquet(name: str) -> bool:
    """Whether a file of this name is Parquet."""
    return name.lower().endswith(SUFFIX)


@dataclass(frozen=True, slots=True)
class ParquetReader:
    """The rows of a Parquet file.

    Attributes:
        file: what is read: the file of this name, or what was fetched from there.
        folder: the folder that paths are relative to, of files that are named in the place of bytes.
    """

    name: str
    file: Path
    folder: str

    counts_lines = False
    is_text = False

    def columns(self) -> list[TableColumn]:
        with self._open() as parquet:
            schema = parquet.schema_arrow
        return [
            TableColumn(
                field.name,
                _class_names(schema, field.name),
                partial(self._pictures, field.name) if _holds_bytes(field.type) else None,
            )
            for field in schema
        ]

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
        """The bytes of a picture, or of the file that is named for them; None where there is neither."""
        data: bytes | None = picture.get("bytes") if isinstance(picture, dict) else picture
        if data is not None or not isinstance(picture, dict) or not picture.get("path"):
            return data
        path = os.path.join(self.folder, picture["path"])
        return None if status_of(path) is None else read_picture(path, ANY_SIZE)

    def column(self, name: str) -> Iterator[Any]:
        """The pictures of a column, few at a time."""
        for (pictures,) in self._batches([name], _BATCH_PICTURES):
            yield from pictures

    def _pictures(self, column: str) -> StoredPictures:
        status = os.stat(self.file)
        copy = _copied(self, column, status.st_size, status.st_mtime_ns)
        if not os.path.exists(copy.path):  # somebody has cleaned up
            _copied.cache_clear()
            copy = _copied(self, column, status.st_size, status.st_mtime_ns)
        return StoredPictures(copy.read, copy.sizes)

    def _batches(self, names: Sequence[str], count: int) -> Iterator[list[list[Any]]]:
        """The values of the columns, so many rows at a time; SourceError where the file is damaged."""
        with self._open() as parquet:
            left = parquet.metadata.num_rows
            for batch in parquet.iter_batches(count, columns=list(names), use_threads=False):
                found = list(batch.schema.names)
                left -= batch.num_rows
                if left < 0:
                    break
                yield [batch.column(found.index(name)).to_pylist() for name in names]
        if left:
            raise SourceError(f"{self.name}: has more or fewer rows than its end says; write it again")

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """The `pyarrow.parquet.ParquetFile`; what it raises in the block is told.

        Raises:
            MissingDependencyError: pyarrow is not installed.
            SourceError: it is no Parquet, or damaged.
        """
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise MissingDependencyError(
                f"{self.name}: Parquet needs the extra 'table' ({error}); run: {install_command('table')}"
            ) from error
        with open_table(self.name, self.file) as file:
            try:
                yield parquet.ParquetFile(
                    file, pre_buffer=False, page_checksum_verification=True, buffer_size=_PAGES_BYTES
                )
            except (pyarrow.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
                reason = " ".join(str(error).split())[:200]
                raise SourceError(
                    f"{self.name}: not Parquet that can be read ({reason}); write it again"
                ) from error


def _class_names(schema: Any, column: str) -> tuple[str, ...] | None:
    """The names of classes as Hugging Face's library stores them."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        feature = features[column]
        names = feature.get("feature", feature)["names"]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return unique_names(list(map(str, names))) if isinstance(names, list) and names else None


def _holds_bytes(kind: Any) -> bool:
    from pyarrow import types

    if types.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


@dataclass(frozen=True, slots=True)
class _Copy:
    """The pictures of a column, one behind the other in a file.

    Attributes:
        table: the name of the Parquet file in messages.
        path: the file; `scanned_status`, its size and time.
        sizes: int64 [n], bytes of each picture; -1 where a row has none.
        ends: int64 [n], where each of them ends.
    """

    table: str
    path: str
    scanned_status: tuple[int, int]
    sizes: Ints
    ends: Ints

    def read(self, row: int) -> bytes:
        """The picture of a row; raises as `StoredPictures.read`."""
        size, where = int(self.sizes[row]), f"{self.table}: row {row}"
        if size < 0:
            raise ImageError(where, "has no picture, neither bytes nor a file")
        data = read_part(self.path, where, self.scanned_status, int(self.ends[row]) - size, size)
        if len(data) != size:
            raise SourceError(f"{where}: could not be read as a whole; run the same command again")
        return data


@cache
def _copied(reader: ParquetReader, column: str, file_bytes: int, modified_ns: int) -> _Copy:
    """The copy of a column's pictures, made once for each state of the file.

    Raises:
        SourceError: there is no room for it.
    """
    folder = staging.folder()
    sizes = []
    with (
        os_errors_as(
            SourceError,
            f"{reader.name}: its pictures cannot be copied into {folder.parent}",
            "set TMPDIR to a folder on a larger disk",
        ),
        tempfile.NamedTemporaryFile(dir=folder, delete=False) as copy,
    ):
        try:
            for picture in reader.column(column):
                data = reader.content(picture)
                sizes.append(-1 if data is None else copy.write(data))
        except BaseException:
            os.unlink(copy.name)
            raise
    status = os.stat(copy.name)
    found = np.array(sizes, np.int64)
    return _Copy(
        reader.name, copy.name, (status.st_size, status.st_mtime_ns), found, np.cumsum(np.maximum(found, 0))
    )

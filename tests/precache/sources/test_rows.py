"""A new kind of rows as a source: it needs a function that opens it, and nothing else."""

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from precache import SourceOptions, convert, open_dataset, verify_deep
from precache.sources.table import RowBatch, Rows, RowSource
from precache.sources.targets import ColumnInfo
from tests.conftest import small_recipe
from tests.precache.sources.tars import files_of, read_shards


@dataclass(frozen=True)
class SqlitePictures:
    """Pictures in the table `pictures` of a SQLite database, see `StoredPictures`."""

    file: Path
    sizes = None

    def read(self, part_row: int, where: str, max_pixels: int) -> bytes:
        with sqlite3.connect(self.file) as database:
            query = "SELECT image FROM pictures WHERE rowid = ?"
            (picture,) = database.execute(query, (part_row + 1,)).fetchone()
        return bytes(picture)


def open_sqlite(file: Path) -> Rows:
    """Open the table `pictures` of a SQLite database."""

    def read(names: Sequence[str]) -> Iterator[RowBatch]:
        with sqlite3.connect(file) as database:
            rows = database.execute(f"SELECT {','.join(names)} FROM pictures").fetchall()
        yield RowBatch(dict(zip(names, zip(*rows, strict=True), strict=True)), len(rows))

    columns = [ColumnInfo("image", has_pictures=True), ColumnInfo("label"), ColumnInfo("caption")]
    return Rows(str(file), columns, read, lambda column: SqlitePictures(file))


def test_a_new_kind_of_rows_converts_to_the_shards_of_its_tree(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    files = files_of(raw_tree)
    with sqlite3.connect(tmp_path / "pictures.db") as database:
        database.execute("CREATE TABLE pictures (image BLOB, label TEXT, caption TEXT)")
        rows = [(files[name], name.split("/")[0], f"of {name}") for name in sorted(files)]
        database.executemany("INSERT INTO pictures VALUES (?, ?, ?)", rows)
    options = SourceOptions(fields=("caption",))
    file = tmp_path / "pictures.db"
    source = RowSource(file, (file,), (partial(open_sqlite, file),), options)
    convert(source, tmp_path / "out", small_recipe("shards"), workers=2)
    assert read_shards(tmp_path / "out") == read_shards(converted["shards"]) != []
    index = open_dataset(tmp_path / "out").read_index()
    captions = {index.fields["caption"].row_value(row) for row in range(len(index.ids))}
    assert captions == {f"of {name}" for name in files}
    assert verify_deep(tmp_path / "out", source, workers=0) == []

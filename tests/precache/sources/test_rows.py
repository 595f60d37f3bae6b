"""A new kind of rows as a source: it needs a `RowReader`, and nothing else."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from precache import SourceOptions, convert, open_dataset, verify_deep
from precache.sources.table import RowColumns, RowPart, RowSource, StoredPictures
from precache.sources.targets import ColumnInfo
from tests.conftest import small_recipe
from tests.precache.sources.tars import files_of, read_shards


@dataclass(frozen=True)
class SqliteReader:
    """Reader of the table `pictures` in a SQLite database."""

    file: Path
    is_text = False
    sizes = None

    @property
    def name(self) -> str:
        return str(self.file)

    def columns(self) -> list[ColumnInfo]:
        return [ColumnInfo("image", has_pictures=True), ColumnInfo("label"), ColumnInfo("caption")]

    def read_columns(self, names: Sequence[str]) -> RowColumns:
        with sqlite3.connect(self.file) as database:
            rows = database.execute(f"SELECT {','.join(names)} FROM pictures").fetchall()
        return RowColumns(len(rows), dict(zip(names, zip(*rows, strict=True), strict=True)))

    def open_pictures(self, column: str) -> StoredPictures:
        return self

    def read(self, row: int, where: str, max_pixels: int) -> bytes:
        with sqlite3.connect(self.file) as database:
            query = "SELECT image FROM pictures WHERE rowid = ?"
            (picture,) = database.execute(query, (row + 1,)).fetchone()
        return bytes(picture)


def test_a_row_reader_converts_to_the_shards_of_its_tree(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    files = files_of(raw_tree)
    with sqlite3.connect(tmp_path / "pictures.db") as database:
        database.execute("CREATE TABLE pictures (image BLOB, label TEXT, caption TEXT)")
        rows = [(files[name], name.split("/")[0], f"of {name}") for name in sorted(files)]
        database.executemany("INSERT INTO pictures VALUES (?, ?, ?)", rows)
    options = SourceOptions(fields=("caption",))
    reader = SqliteReader(tmp_path / "pictures.db")
    source = RowSource(reader.file, (reader.file,), (RowPart(reader),), options)
    convert(source, tmp_path / "out", small_recipe("shards"), workers=2)
    assert read_shards(tmp_path / "out") == read_shards(converted["shards"]) != []
    index = open_dataset(tmp_path / "out").read_index()
    captions = {index.fields["caption"].row_value(row) for row in range(len(index.ids))}
    assert captions == {f"of {name}" for name in files}
    assert verify_deep(tmp_path / "out", source, workers=0) == []

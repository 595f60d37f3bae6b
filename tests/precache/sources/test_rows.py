"""A new kind of rows as a source: it needs a `RowReader`, and nothing else."""

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from precache import SourceOptions, convert, open_dataset, verify_deep
from precache.sources.rows import Row, RowPart, RowSource, StoredPictures, TableColumn
from tests.conftest import small_recipe
from tests.precache.sources.tars import files_of, read_shards


@dataclass(frozen=True)
class SqliteReader:
    """Reader of the table `pictures` in a SQLite database."""

    file: Path
    counts_lines = False
    is_text = False

    @property
    def name(self) -> str:
        return str(self.file)

    def columns(self) -> list[TableColumn]:
        return [TableColumn("image", pictures=self.pictures), TableColumn("label"), TableColumn("caption")]

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        with sqlite3.connect(self.file) as database:
            for number, row in enumerate(database.execute(f"SELECT {','.join(names)} FROM pictures")):
                yield Row(number, row)

    def pictures(self) -> StoredPictures:
        return StoredPictures(self.read)

    def read(self, row: int) -> bytes:
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

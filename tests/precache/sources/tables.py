"""Tables of pictures for tests, written as CSV, JSON lines, Parquet and Feather."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from precache.sources.base import Scan
from tests.precache.sources.tars import scan_of


def write_csv(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerow(columns)
        writer.writerows(
            [json.dumps(cell) if isinstance(cell, list) else cell for cell in row]
            for row in zip(*columns.values(), strict=True)
        )


def write_jsonl(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def write_parquet(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    write_pictures(path, columns)


def write_feather(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    feather = pytest.importorskip("pyarrow.feather", reason="the extra 'table' is not installed")
    feather.write_feather(make_table(columns), path)


def make_table(columns: Mapping[str, Sequence[Any]], classes: Sequence[str] = ()) -> Any:
    """Make an Arrow table as Hugging Face's library does, with the names of classes of the column `label`."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'table' is not installed")
    table = pyarrow.table({name: list(values) for name, values in columns.items()})
    if not classes:
        return table
    label = {"names": list(classes), "_type": "ClassLabel"}
    features = {"info": {"features": {"image": {"_type": "Image"}, "label": label}}}
    return table.replace_schema_metadata({"huggingface": json.dumps(features)})


def write_pictures(
    path: Path, columns: Mapping[str, Sequence[Any]], classes: Sequence[str] = (), **options: Any
) -> Path:
    """Write Parquet with pictures, see `make_table`."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra 'table' is not installed")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(make_table(columns, classes), path, **options)
    return path


def save_dataset(
    folder: Path, columns: Mapping[str, Sequence[Any]], classes: Sequence[str] = (), files: int = 2
) -> Path:
    """Write a folder as `save_to_disk` of Hugging Face's library does, with batches of 7 rows."""
    table = make_table(columns, classes)
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        start, end = (table.num_rows * bound // files for bound in (number, number + 1))
        pyarrow = pytest.importorskip("pyarrow")
        with pyarrow.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table.slice(start, end - start), max_chunksize=7)
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


WRITERS: dict[str, Callable[[Path, Mapping[str, Sequence[Any]]], None]] = {
    "csv": write_csv,
    "tsv": write_csv,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "feather": write_feather,
}


def scan_text(folder: Path, text: str | bytes, name: str = "labels.csv", **options: Any) -> Scan:
    """Write a table of this text into the folder, and scan it."""
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return scan_of(folder / name, **options)

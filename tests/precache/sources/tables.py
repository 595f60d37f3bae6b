"""Tables of pictures for tests, written as CSV, JSON lines and Parquet."""

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
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'table' is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), path)


def write_pictures(
    path: Path, columns: Mapping[str, Sequence[Any]], classes: Sequence[str] = (), **options: Any
) -> Path:
    """Write Parquet as Hugging Face's library does, with the names of classes of the column `label`."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'table' is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({name: list(values) for name, values in columns.items()})
    if classes:
        label = {"names": list(classes), "_type": "ClassLabel"}
        features = {"info": {"features": {"image": {"_type": "Image"}, "label": label}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, **options)
    return path


WRITERS: dict[str, Callable[[Path, Mapping[str, Sequence[Any]]], None]] = {
    "csv": write_csv,
    "tsv": write_csv,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
}


def scan_text(folder: Path, text: str | bytes, name: str = "labels.csv", **options: Any) -> Scan:
    """Write a table of this text into the folder, and scan it."""
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return scan_of(folder / name, **options)

"""Tables of a tree's pictures, as their users write them."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from precache.sources import SourceOptions, open_source
from precache.sources.base import Scan
from precache.sources.tree import scan_tree


def rows_of_tree(tree: Path) -> dict[str, list[Any]]:
    """Path and class of each picture, in the order of the scan."""
    scan = scan_tree(tree)
    return {
        "path": [sample.path for sample in scan.samples],
        "species": [scan.classes[sample.label] for sample in scan.samples],
    }


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


WRITERS: dict[str, Callable[[Path, Mapping[str, Sequence[Any]]], None]] = {
    "csv": write_csv,
    "tsv": write_csv,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
}


def has_pyarrow() -> bool:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return False
    return True


def scan_table(table: Path, **options: Any) -> Scan:
    return open_source(table, SourceOptions(**options)).scan()


def scan_text(folder: Path, text: str | bytes, name: str = "labels.csv", **options: Any) -> Scan:
    content = text if isinstance(text, bytes) else text.encode()
    (folder / name).write_bytes(content)
    return scan_table(folder / name, **options)

import csv
import io
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import precache
from precache import PrecacheError, SettingError, SourceError, SourceOptions, convert, open_dataset
from tests.conftest import small_recipe
from tests.faults.mutations import spoil
from tests.precache.sources.tables import WRITERS, has_pyarrow, scan_table, scan_text

ERRORS = {
    "unknown label": ("path,a\n0.jpg,x\n", {"label": "b"}, ["no column 'b'", "--label", "'path', 'a'"]),
    "unknown field": ("path,a\n0.jpg,x\n", {"fields": ("a", "w")}, ["no column 'w'", "--field"]),
    "two columns": ("path,a,a\n0.jpg,x,y\n", {"label": "a"}, ["several columns 'a'"]),
    "no image": ("photo,a\n0.jpg,x\n", {}, ["--image", "'photo', 'a'"]),
    "two images": ("path,file\n0.jpg,x\n", {}, ["several columns", "--image"]),
    "semicolons": ("path;label\n0.jpg;x\n", {}, ["separated by ';'"]),
    "empty": ("", {}, ["labels.csv: is empty"]),
    "header alone": ("path,a\n", {}, ["labels.csv: has no rows"]),
    "empty label": ("path,a\n0.jpg,x\n1.jpg,\n", {"label": "a"}, ["line 3 (id 1): 'a': is empty"]),
    "blank label": ("path,a\n0.jpg,x\n1.jpg, \n", {"label": "a"}, ["line 3 (id 1): 'a': is empty"]),
    "empty number": ("path,a\n0.jpg,1\n1.jpg,\n", {"label": "a"}, ["line 3 (id 1)", "is empty", "'1'"]),
    "empty field": ("path,a\n0.jpg,1\n1.jpg,\n", {"fields": ("a",)}, ["line 3 (id 1): 'a': is empty", "'1'"]),
    "empty path": ("path,a\n0.jpg,1\n,2\n", {}, ["line 3 (id 1)", "is no path of a picture"]),
    "twice": ("path\n0.jpg\n1.jpg\n./0.jpg\n", {}, ["line 4 (id 2)", "'0.jpg' is in line 2 (id 0), too"]),
    "mixed": (
        "path,a\n0.jpg,0.5\n1.jpg,o.7\n",
        {"label": "a"},
        ["line 3", "'o.7' is not a number", "--target class"],
    ),
    "no number": (
        "path,a\n0.jpg,x\n",
        {"label": "a", "target": "number"},
        ["line 2 (id 0)", "'x' is not a number"],
    ),
    "not finite": ("path,a\n0.jpg,1e999\n", {"label": "a", "target": "number"}, ["line 2", "not finite"]),
    "lengths": ('path,a\n0.jpg,"[.5]"\n', {"label": "a", "target": "number"}, ["line 2", "is not a number"]),
    "ragged numbers": (
        'path,a\n0.jpg,"[1,2]"\n1.jpg,[3]\n',
        {"label": "a", "target": "number"},
        ["line 3", "one length"],
    ),
    "no list": ("path,a\n0.jpg,[1]\n1.jpg,[x]\n", {"fields": ("a",)}, ["line 3", "'[x]' is not a JSON list"]),
    "quoted newlines": ('path,a\n"x\ny",1\n0.jpg\n', {}, ["line 4 (id 1)", "expected 2 cells", "got 1"]),
    "ragged": ("path,a\n0.jpg,x,y\n", {}, ["line 2 (id 0)", "expected 2 cells", "got 3"]),
    "open quote": ('path,a\n0.jpg,"x\n1.jpg,y\n', {}, ["line 2", "not CSV", "quote"]),
    "long cell": (f"path,a\n0.jpg,{'x' * 140_000}\n", {}, ["line 2", "131,072"]),
    "not UTF-8": (b"path,a\n0.jpg,x\n1.jpg,caf\xe9\n", {}, ["line 3", "byte 10 is not UTF-8"]),
    "UTF-16": ("path,a\n".encode("utf-16"), {}, ["UTF-16", "UTF-8"]),
    "NUL": (b"path,a\n0.jpg,\0\n", {}, ["line 2", "NUL"]),
    "a long path": (
        f"path\n{'x' * 5_000}\n",
        {},
        ["line 2 (id 0)", "has 5,000 bytes, so it cannot be a path"],
    ),
    "a long split": (
        f"path,s\n0.jpg,{'x' * 65}\n",
        {"split": "s"},
        ["line 2 (id 0)", "not a valid split name"],
    ),
    "a long header": (f"path,{'x' * 5_000}\n", {"label": "y"}, ["no column 'y'"]),
    "a URL": ("path\nhttps://example.org/0.jpg\n", {}, ["line 2", "download the pictures"]),
    "a split": (
        "path,s\n0.jpg,../x\n",
        {"split": "s"},
        ["line 2 (id 0)", "'../x' is not a valid split name"],
    ),
    "no split": ("path,s\n0.jpg,\n", {"split": "s"}, ["line 2 (id 0)", "'' is not a valid split name"]),
    "no target": ("path\n0.jpg\n", {"target": "class"}, ["--target class needs", "--label"]),
    "two labels": ("path,class,label\n0.jpg,x,y\n", {}, ["'class', 'label'", "--label", "--target none"]),
    "no label": ("path,a\n0.jpg,x\n", {"separator": ";"}, ["--separator needs", "--label"]),
    "no root": ("path\n0.jpg\n", {"root": "nowhere"}, ["--root nowhere: no such folder"]),
    "of another source": ("path\n0.jpg\n", {"class_depth": 2}, ["--class-depth is not for a table"]),
    "a separator": (
        "path,a\n0.jpg,x\n",
        {"label": "a", "separator": ";", "target": "class"},
        ["--separator"],
    ),
    "no pictures": (
        "path\na.jpg\nb.jpg\n",
        {},
        ["line 2 (id 0)", "a.jpg", "nor one for any other row", "--root"],
    ),
    "not text": ('{"path": 5}\n', {}, ["line 1 (id 0)", "5 is no path"]),
    "JSON types": (
        '{"path": "0.jpg", "a": 1}\n\n{"path": "1.jpg", "a": "x"}\n',
        {"label": "a"},
        ["line 3 (id 1)", "'x' is text", "a number"],
    ),
    "null": (
        '{"path": "0.jpg", "a": 1}\n{"path": "1.jpg"}\n',
        {"label": "a"},
        ["line 2 (id 1): 'a': is empty"],
    ),
    "null field": (
        '{"path": "0.jpg", "a": 1}\n{"path": "1.jpg"}\n',
        {"fields": ("a",)},
        ["line 2 (id 1)", "is empty"],
    ),
    "a JSON array": ('["0.jpg"]\n', {}, ["line 1", "not a JSON object"]),
    "broken JSON": ('{"path": "0.jpg"}\n{"path": \n', {}, ["line 2", "not JSON"]),
    "deep JSON": ('{"path": ' + "[" * 100_000 + "\n", {}, ["line 1", "not JSON"]),
    "surrogate": ('{"path": "\\ud800.jpg"}\n', {}, ["line 1 (id 0)", "not a valid file name"]),
    "dict": ('{"path": "0.jpg", "a": {}}\n', {"label": "a"}, ["line 1 (id 0)", "{} is dict"]),
    "mixed classes": (
        '{"path": "0.jpg", "a": ["x", 1]}\n',
        {"label": "a"},
        ["line 1 (id 0)", "not a list of classes"],
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_bad_table_is_one_line_that_names_the_row(case: str, photos: Path) -> None:
    text, options, mentions = ERRORS[case]
    name = "labels.jsonl" if text[:1] in ("{", "[") else "labels.csv"
    with pytest.raises((SourceError, SettingError)) as caught:
        scan_text(photos, text, name, **options)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 500
    assert [mention for mention in mentions if mention not in said] == [], said


@pytest.mark.parametrize(
    ("name", "mention"),
    [
        ("labels.csv.gz", "unpack it"),
        ("labels.xlsx", "expected a table as CSV"),
        ("labels.json", "JSON lines"),
        ("labels.txt", "is not a folder"),
    ],
)
def test_a_table_of_another_kind_is_refused_with_what_to_do(name: str, mention: str, photos: Path) -> None:
    with pytest.raises(SourceError, match=mention):
        scan_text(photos, "path\n0.jpg\n", name)


def test_no_table_is_waited_for(photos: Path) -> None:
    os.mkfifo(photos / "pipe.csv")
    for path in (photos / "pipe.csv", photos / "nowhere.csv"):
        with pytest.raises(SourceError, match=path.name):
            scan_table(path)


def test_parquet_that_is_none_is_one_line_and_so_is_a_missing_pyarrow(photos: Path) -> None:
    with pytest.raises(precache.PrecacheError, match=r"t\.parquet") as caught:
        scan_text(photos, b"PAR1" + b"x" * 50 + b"PAR1", "t.parquet")
    assert "\n" not in str(caught.value)
    if not has_pyarrow():
        assert isinstance(caught.value, precache.MissingDependencyError)
        assert "precache[table]" in str(caught.value)


PICTURES = 8
ASKED = SourceOptions(label="species", split="fold", fields=("width", "box", "caption"))


def _columns() -> dict[str, list[Any]]:
    rows = range(PICTURES)
    return {
        "path": [f"{row}.png" for row in rows],
        "species": [["heron", "cat, \u00fc", 'a "b"'][row % 3] for row in rows],
        "fold": [["train", "valid"][row % 2] for row in rows],
        "width": [row * 10 for row in rows],
        "box": [[[row, 1, 2, 3]] * (row % 3) for row in rows],
        "caption": [f"line\n{row}" for row in rows],
    }


def _rows_said(kind: str, content: bytes) -> list[tuple[Any, Any]]:
    """Path and label of each row, as another reader takes them."""
    text = content.decode("utf-8-sig")
    if kind == "jsonl":
        objects = [json.loads(line) for line in text.split("\n") if line.strip()]
        return [(row["path"], row["species"]) for row in objects]
    delimiter = "\t" if kind == "tsv" else ","
    rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))
    return [(row["path"], row["species"]) for row in rows]


@pytest.mark.parametrize("count", [120, pytest.param(2_000, marks=pytest.mark.faults)])
def test_a_damaged_table_ends_in_one_line_or_in_what_it_says(count: int, tmp_path: Path) -> None:
    for row in range(PICTURES):
        Image.new("RGB", (8, 8), (row * 30, 0, 0)).save(tmp_path / f"{row}.png")
    kinds = [kind for kind in WRITERS if kind != "parquet" or has_pyarrow()]
    tables = {}
    for kind in kinds:
        WRITERS[kind](tmp_path / f"t.{kind}", _columns())
        tables[kind] = (tmp_path / f"t.{kind}").read_bytes()
    ended: dict[str, int] = {"error": 0, "right": 0}
    for seed in range(count):
        draw = random.Random(seed)
        kind = kinds[seed % len(kinds)]
        content = spoil(tables[kind], draw, tables[kinds[0]])
        (tmp_path / f"t.{kind}").write_bytes(content)
        out = tmp_path / "out"
        try:
            recipe = small_recipe("shards", size=8)
            convert(tmp_path / f"t.{kind}", out, recipe, workers=0, max_rejects=1.0, options=ASKED)
        except PrecacheError as error:
            ended["error"] += 1
            wrong = "\n" in str(error) or len(str(error)) > 1_000
            wrong |= out.exists() and not isinstance(error, precache.DatasetError)
            if wrong:
                pytest.fail(f"seed {seed}: {error}")
        else:
            ended["right"] += 1
            assert precache.verify(out) == [], seed
            if kind != "parquet":
                _check_right(tmp_path / f"t.{kind}", content, out, seed)
        shutil.rmtree(out, ignore_errors=True)
    assert all(times > count // 20 for times in ended.values()), ended


def _check_right(table: Path, content: bytes, out: Path, seed: int) -> None:
    said = _rows_said(table.suffix[1:], content)
    scan = scan_table(table, **{**ASKED.given(), "fields": ASKED.fields})
    assert [(ref.id, ref.path) for ref in scan.samples] == [
        (row, path.removeprefix("./")) for row, (path, _) in enumerate(said)
    ], seed
    if scan.target == "class":
        labels = [scan.classes[ref.label] for ref in scan.samples]
        assert labels == [str(label) for _, label in said], seed
    manifest = open_dataset(out).manifest
    assert manifest.samples + len(manifest.rejected) == len(said), seed

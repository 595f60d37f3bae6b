"""CSV, TSV and JSON lines as sources: cells as paths, classes, numbers and fields, and bad tables."""

import csv
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precache import SettingError, SourceError, convert, verify_deep
from precache.errors import MissingDependencyError
from precache.sources.base import Scan, check_no_overlap
from tests.conftest import small_recipe
from tests.precache.sources.tables import WRITERS, scan_text
from tests.precache.sources.tars import put, scan_of


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Make files that a scan takes for pictures; they are never decoded."""
    return put(tmp_path, {f"{number}.jpg": b"\xff\xd8\xff" + b"x" * number for number in range(4)})


def scan_labels(folder: Path, cells: list[str], **options: Any) -> Scan:
    rows = "".join(f"{row}.jpg,{cell}\n" for row, cell in enumerate(cells))
    return scan_text(folder, f"path,y\n{rows}", **{"label": "y", **options})


NUMBERS = ["2", "2.0", "1.1", "1.10", "1e5", "100000", "0", "-0", "+1", "007", "1234567890123456789"]
NUMBERS += ["1234567890123456788", "x"]  # the last two numbers are one float64


@pytest.mark.parametrize("target", ["class", "classes", None])
def test_class_names_are_the_cells_as_written(target: str | None, photos: Path) -> None:
    """Try each pair of NUMBERS; only pairs with a fraction may become numbers, if no target is given."""
    for cells in itertools.combinations_with_replacement(NUMBERS, 2):
        with suppress(SourceError) if target is None else nullcontext():
            scan = scan_labels(photos, [*cells], target=target)
            if scan.target == "number":
                assert "1.1" in "".join(cells)
                continue
            labels = scan.samples.labels if scan.samples.targets is None else scan.samples.targets.values
            assert [scan.classes[label] for label in labels] == [*cells]


@pytest.mark.parametrize("target", ["class", "classes", "number", None])
def test_a_number_that_is_none_is_refused_by_line(target: str | None, photos: Path) -> None:
    for cells in itertools.permutations(("nan", "1", "2.5")):
        with pytest.raises(SourceError, match=rf"line {cells.index('nan') + 2} .*is empty"):
            scan_labels(photos, [*cells], target=target)


def test_large_whole_numbers_never_become_one_float(photos: Path) -> None:
    for last in ("", "nan", "1.5", "7"):
        rows = f"0.jpg,1234567890123456789\n1.jpg,1234567890123456788\n2.jpg,{last}\n"
        with suppress(SourceError):
            column = scan_text(photos, f"path,id\n{rows}", fields=("id",)).samples.fields["id"]
            assert [str(column.row_value(row))[-2:] for row in range(2)] == ["89", "88"]


def test_the_digest_covers_the_columns_in_use(photos: Path) -> None:
    options = {"label": "a", "split": "s", "fields": ("f",)}
    text = "path,a,s,f,unused\n0.jpg,x,train,1,1\n1.jpg,y,val,2,2\n2.jpg,x,val,3,3\n"
    digest = scan_text(photos, text, **options).digest
    other_cell_from_excel = text.replace(",2,2", ",2,3").replace("\n", "\r\n").encode("utf-8-sig") + b"\r\n"
    assert scan_text(photos, other_cell_from_excel, **options).digest == digest
    for old, new in (("1.jpg", "3.jpg"), ("2.jpg,x", "2.jpg,y"), ("y,val", "y,train"), (",2,2", ",3,2")):
        assert scan_text(photos, text.replace(old, new), **options).digest != digest, new


SPELLINGS = ["pics/0.jpg", ".//pics/./0.jpg", "../{top}/pics/0.jpg", "/{folder}//pics/0.jpg"]


def test_spellings_of_one_path_are_one_picture(photos: Path) -> None:
    put(photos, {"pics/0.jpg": b"\xff\xd8\xffpics"})
    first, *others = (spelling.format(folder=photos, top=photos.name) for spelling in SPELLINGS)
    for other in others:
        scan = scan_text(photos, f"path\n{other}\n1.jpg\n")
        assert scan.source.read(scan.samples[0], 100) == b"\xff\xd8\xffpics"
        with pytest.raises(SourceError, match=r"line 2 \(id 0\)") as raised:
            scan_text(photos, f"path\n{first}\n{other}\n")
        assert str(raised.value.path).endswith("line 3 (id 1)")


def test_dots_behind_links_and_missing_folders_lead_to_no_picture(photos: Path) -> None:
    put(photos, {"pics/0.jpg": b"\xff\xd8\xffpics", "far/away/1.jpg": b""})
    (photos / "pics/link").symlink_to("../far/away")
    scan = scan_text(photos, "path\npics/gone/../0.jpg\npics/link/../0.jpg\n1.jpg\n")
    assert "2 rows of 3" in scan.warnings[0]


@pytest.mark.parametrize("name", ["label", "labels", "class", "class_name", "target", "category"])
def test_columns_with_usual_label_names_are_used_with_a_warning(name: str, photos: Path) -> None:
    for image in ("image", "path", "file", "filename", "file_name"):
        text = f"{image},{name}\n0.jpg,a\n1.jpg,b\n2.jpg,a\n"
        scan = scan_text(photos, text)
        assert (scan.target, [scan.classes[ref.label] for ref in scan.samples]) == ("class", ["a", "b", "a"])
        assert ["--label names others" in line and repr(name) in line for line in scan.warnings] == [True]
        assert scan_text(photos, text, label=name).warnings == ()
        assert scan_text(photos, text, split=name).target == "none", "a column of splits has no labels"


def test_a_table_without_a_label_column_is_warned_of(photos: Path) -> None:
    (warning,) = scan_text(photos, "path,species\n0.jpg,a\n").warnings
    assert "--label" in warning


@pytest.mark.parametrize("name", ["split", "Split", "subset", "partition"])
def test_a_column_of_splits_that_is_not_used_is_warned_of(name: str, photos: Path) -> None:
    text = f"path,label,{name}\n0.jpg,a,train\n1.jpg,b,val\n"
    (warning,) = scan_text(photos, text, label="label").warnings
    assert f"pass --split {name}" in warning
    assert len(scan_text(photos, text).warnings) == 2
    assert scan_text(photos, text, label="label", split=name).warnings == ()
    assert scan_text(photos, text, label="label", fields=(name,)).warnings == ()


PRINTED: list[Callable[[list[Any]], str]] = [
    json.dumps,
    str,
    lambda values: str(tuple(values)),
    lambda values: str([np.array(values)[place] for place in range(len(values))]),  # [np.int64(1)]
    lambda values: str(np.array(values, object)),
    lambda values: repr(np.array(values, object)),
    lambda values: str(np.array(values)),
    lambda values: f"tensor({values}, device='cuda:0')",
]
"""Functions that print a list as programs do before pandas and csv.writer put it into a cell."""
# without NULs at the end, which NumPy drops
NAMES = (
    st.text(st.characters(exclude_categories=["Cs"])).map(lambda text: text.rstrip("\0")).filter(str.strip)
)
NUMBERS_IN_LISTS = st.integers(-(10**6), 10**6).map(lambda number: number / 8)


@pytest.mark.parametrize("table", ["t.csv", "t.jsonl"])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_lists_are_read_as_json_and_refused_as_python_prints_them(
    table: str, photos: Path, data: st.DataObject
) -> None:
    names = data.draw(st.lists(st.lists(NAMES, max_size=30), min_size=2, max_size=3).filter(any))
    width = data.draw(st.integers(2, 99))
    vectors = [data.draw(st.lists(NUMBERS_IN_LISTS, min_size=width, max_size=width)) for _ in names]
    printed = data.draw(st.sampled_from(PRINTED))
    for column, target in (("y", "classes"), ("v", "number")):
        cells = [printed(values) for values in (names if column == "y" else vectors)]
        rows = [{"path": f"{row}.jpg", column: cell} for row, cell in enumerate(cells)]
        file = io.StringIO()
        if table == "t.csv":
            writer = csv.writer(file)
            writer.writerows([rows[0], *(row.values() for row in rows)])
        else:
            file.write("".join(f"{json.dumps(row)}\n" for row in rows))
        are_json = all(map(is_json, cells))
        with nullcontext() if are_json else pytest.raises(SourceError, match="JSON lines or Parquet"):
            scan = scan_text(photos, file.getvalue(), table, label=column, target=target)
            assert are_json
            labels = [ref.target for ref in scan.samples]
            if target == "number":
                assert labels == vectors
                continue
            classes = sorted({name for row in names for name in row})
            assert scan.classes == tuple(classes)
            assert labels == [sorted({*map(classes.index, row)}) for row in names]


def is_json(text: str) -> bool:
    with suppress(ValueError):
        return isinstance(json.loads(text), list)
    return False


CELLS = st.text(st.sampled_from("ab1 .,;'\"\n\r\t|[\u00e9\\"), max_size=6)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cells=st.lists(st.tuples(CELLS, CELLS), min_size=2, max_size=4),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    quotes_all=st.booleans(),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
)
def test_cells_are_what_a_writer_of_csv_was_given(
    cells: list[tuple[str, str]], line_end: str, quotes_all: bool, encoding: str, photos: Path
) -> None:
    file = io.StringIO(newline="")
    # in an unquoted cell the writer leaves a line break that is not its own
    quoting = csv.QUOTE_MINIMAL if line_end == "\r\n" and not quotes_all else csv.QUOTE_ALL
    writer = csv.writer(file, lineterminator=line_end, quoting=quoting)
    writer.writerows([("path", "a", "b"), *((f"{row}.jpg", *pair) for row, pair in enumerate(cells))])
    options = {"target": "none", "fields": ("a", "b")}
    try:
        scan = scan_text(photos, file.getvalue().encode(encoding), **options)
    except SourceError:  # numbers or lists beside an empty cell
        assert any(cell == "" for pair in cells for cell in pair)
        return
    for name, values in zip("ab", zip(*cells, strict=True), strict=True):
        column = scan.samples.fields[name]
        read = [column.row_value(row) for row in range(len(cells))]
        assert read == (list(map(float, values)) if column.kind in ("int", "float") else [*values])


@pytest.mark.parametrize("kind", WRITERS)
def test_only_parquet_and_arrow_files_need_pyarrow(
    kind: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = photos / f"t.{kind}"
    WRITERS[kind](table, {"path": ["0.jpg", "1.jpg"], "label": ["cat", "dog"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    if kind in ("parquet", "feather"):
        with pytest.raises(MissingDependencyError, match=r"pip install 'precache\[table\]'"):
            scan_of(table)
    else:
        assert scan_of(table).classes == ("cat", "dog")


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_rows_of_long_tables_are_named_by_line(name: str, photos: Path) -> None:
    """The rows come in batches of 1,024; a cell of each has a line break, so that it has two lines."""
    paths = [f"{row}.jpg" for row in range(3_000)]
    columns = {"path": paths, "s": ["train", "val"] * 1_500, "f": [f"a\n{row % 7}" for row in range(3_000)]}
    lines = (lambda row: row + 1) if name == "t.jsonl" else (lambda row: 2 * row + 2)
    WRITERS[name.partition(".")[2]](photos / name, columns)
    scan = scan_of(photos / name, split="s", fields=("f",))
    assert [(ref.id, ref.path, ref.split) for ref in scan.samples] == list(
        zip(range(3_000), paths, columns["s"], strict=True)
    )
    assert [ref.fields["f"] for ref in scan.samples] == columns["f"]
    assert f"line {lines(2_345):,} (id 2345)" in scan.source.where(scan.samples[2_345])
    for column, value, first in (
        ("s", "/", ""),
        ("path", "7.jpg", f"line {lines(7)} (id 7)"),
        ("path", "", ""),
    ):
        changed = {**columns, column: [*columns[column][:2_345], value, *columns[column][2_346:]]}
        WRITERS[name.partition(".")[2]](photos / name, changed)
        with pytest.raises(SourceError, match=re.escape(first or repr(column))) as raised:
            scan_of(photos / name, split="s")
        assert str(raised.value.path).endswith(f", line {lines(2_345):,} (id 2345)")


SPACED = [
    "image, label",
    "image,label ",
    " image,label",
    'image, "label"',
    '"image", "label"',
    "image , label",
]


@pytest.mark.parametrize("header", SPACED)
def test_spaces_around_column_names_are_ignored(header: str, photos: Path) -> None:
    separator = ", " if ", " in header else ","
    scan = scan_text(photos, f'{header}\n0.jpg{separator}cat\n1.jpg{separator}"dog, big"\n')
    assert (scan.target, scan.classes) == ("class", ("cat", "dog, big"))
    tabs = f"{header}\n0.jpg{separator}7\n".replace(",", "\t")
    scan = scan_text(photos, tabs, "t.tsv", fields=("label",), target="none")
    assert scan.samples.fields["label"].tolist() == [7]


@pytest.mark.parametrize("row", range(3))
def test_a_json_line_without_a_key_of_others_is_refused_by_line(row: int, photos: Path) -> None:
    for key, options in (("label", {}), ("label", {"label": "label"}), ("width", {"fields": ("width",)})):
        lines: list[dict[str, Any]] = [{"image": f"{n}.jpg", "label": "a", "width": n} for n in range(3)]
        del lines[row][key]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        with pytest.raises(SourceError, match=f"'{key}'") as raised:
            scan_text(photos, text, "t.jsonl", **options)
        assert raised.value.path == f"{photos / 't.jsonl'}, line {row + 1} (id {row})"


A = {"label": "a"}
NUMBER = {"label": "a", "target": "number"}
BAD: list[tuple[str | bytes, dict[str, Any], str, list[str]]] = [
    ("path,a\n0.jpg,x\n", {"label": "b"}, "", ["'b'", "--label", "'path', 'a'"]),
    ("path,class,label\n0.jpg,x,y\n", {}, "", ["'class', 'label'", "--label", "--target none"]),
    ("path,a\n0.jpg,x\n1.jpg, \n", A, ", line 3 (id 1)", ["'a'"]),
    ("path,a\n0.jpg,0.5\n1.jpg,o.7\n", A, ", line 3 (id 1)", ["'o.7'", "--target class"]),
    ('path,a\n0.jpg,"[1,2]"\n1.jpg,[3]\n', NUMBER, ", line 3 (id 1)", ["[3", "[1, 2]"]),
    ("path,a\n0.jpg,cat\n1.jpg,\"['cat', 'dog']\"\n", A, ", line 3 (id 1)", ["--target class"]),
    ('path,a\n0.jpg,"[cat, dog]"\n', A, ", line 2 (id 0)", ["'[cat, dog]'", "JSON", "--target class"]),
    (
        "path,a\n0.jpg,[1]\n1.jpg,[0 1 ... 8 9]\n",
        {"fields": ("a",)},
        ", line 3 (id 1)",
        ["'[0 1 ... 8 9]'", "JSON"],
    ),
    ("path,a\n0.jpg,[0 1 ... 8 9]\n", {"fields": ("a",)}, ", line 2 (id 0)", ["'[0 1 ... 8 9]'", "JSON"]),
    ("path,a\n0.jpg,[0 0 1]\n1.jpg,[0 1 0]\n", A, ", line 2 (id 0)", ["'[0 0 1]'", "JSON"]),
    ("path,a\n0.jpg,[ True False]\n1.jpg,[False True]\n", A, ", line 2 (id 0)", ["JSON"]),
    ("path,a\n0.jpg,cat\n1.jpg,[0 1]\n", A, ", line 3 (id 1)", ["'[0 1]'", "JSON", "--target class"]),
    ('path,a\n0.jpg,x\n1.jpg,"y\n', A, ", line 3", ["close every quote"]),
    ('path,a\n"x\ny",1\n0.jpg\n', {}, ", line 4 (id 1)", ["expected 2 cells", "got 1"]),
    (b"path,a\n0.jpg,x\n1.jpg,caf\xe9\n", {}, ", line 3", ["byte 10", "iconv -f WINDOWS-1252 -t UTF-8"]),
    (b"Bild;Sch\xe4den\r\n0.jpg;ja\r\n", {}, ", line 1", ["byte 9", "iconv -f WINDOWS-1252 -t UTF-8"]),
    ("path,a\n0.jpg,x\n".encode("utf-16")[:-1], {}, "", ["UTF-16", "UTF-8"]),
    ("path,a\n0.jpg,x\n".encode("utf-16-le"), {}, ", line 1", ["NUL", "UTF-8"]),
    ("path,s\n0.jpg,../x\n", {"split": "s"}, ", line 2 (id 0)", ["'../x'"]),
    ('{"path": "0.jpg", "a": 1}\n{"path": "1.jpg"}\n', A, ", line 2 (id 1)", ["'a'"]),
]
"""Text of a table, options, the line in the error's path, and names, values and flags in its message."""


@pytest.mark.parametrize(("text", "options", "line", "details"), BAD, ids=range(len(BAD)))
def test_a_bad_table_is_refused_in_one_line(
    text: str | bytes, options: dict[str, Any], line: str, details: list[str], photos: Path
) -> None:
    name = "labels.jsonl" if str(text).startswith("{") else "labels.csv"
    with pytest.raises((SourceError, SettingError)) as raised:
        scan_text(photos, text, name, **options)
    assert str(raised.value.path) == f"{photos / name}{line}"
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 500
    assert [detail for detail in details if detail not in message] == []


TABLE = "path,label,note\npics/a.jpg,cat,\u00e9t\u00e9\npics/b.jpg,dog,x\npics/c.jpg,cat,y\n"
PEOPLES_TABLES: dict[str, tuple[str, bytes]] = {
    "CR": ("t.csv", TABLE.replace("\n", "\r").encode()),
    "CR LF": ("t.csv", TABLE.replace("\n", "\r\n").encode()),
    "a byte order mark": ("t.csv", TABLE.encode("utf-8-sig")),
    "UTF-16": ("t.csv", TABLE.replace("\n", "\r\n").encode("utf-16")),
    "UTF-16 of big-endian": ("t.tsv", b"\xfe\xff" + TABLE.replace(",", "\t").encode("utf-16-be")),
    "semicolons": ("t.csv", TABLE.replace(",", ";").encode("utf-8-sig")),
    "tabs": ("t.csv", TABLE.replace(",", "\t").encode()),
    "bars": ("t.csv", TABLE.replace(",", "|").encode()),
    "semicolons and spaces": ("t.csv", TABLE.replace(",", "; ").encode()),
    "commas in a TSV": ("t.tsv", TABLE.encode()),
    "backslashes": ("t.csv", TABLE.replace("/", "\\").encode()),
    "some backslashes": ("t.csv", TABLE.replace("pics/", ".\\pics\\", 1).encode()),
    "no extensions": ("t.csv", TABLE.replace(".jpg", "").encode()),
    "ids of Windows": ("t.csv", TABLE.replace(".jpg", "").replace("/", "\\").encode("utf-16")),
    "quoted cells": ("t.csv", TABLE.replace("cat", '"cat"').replace("\n", "\r").encode()),
    "JSON lines": ("t.jsonl", "".join(
        f'{{"path": "pics/{name}.jpg", "label": "{label}", "note": "{note}"}}\r'
        for name, label, note in (("a", "cat", "\u00e9t\u00e9"), ("b", "dog", "x"), ("c", "cat", "y"))
    ).encode("utf-16")),
}  # fmt: skip
"""Tables as programs save them: name and content; all say the same."""


@pytest.mark.parametrize("kind", PEOPLES_TABLES)
def test_tables_are_read_as_people_have_them(kind: str, photos: Path) -> None:
    files = {f"pics/{name}.jpg": b"\xff\xd8\xff" + name.encode() for name in "abc"}
    put(photos, files)
    name, content = PEOPLES_TABLES[kind]
    scan = scan_text(photos, content, name, label="label", fields=("note",))
    assert scan.warnings == ()
    assert {ref.path: scan.source.read(ref, 100) for ref in scan.samples} == files
    assert [scan.classes[ref.label] for ref in scan.samples] == ["cat", "dog", "cat"]
    notes = [scan.samples.fields["note"].row_value(row) for row in range(3)]
    assert notes == ["\u00e9t\u00e9", "x", "y"]


def test_a_file_is_that_of_its_path_as_written_if_there_is_one(photos: Path) -> None:
    put(photos, {"a": b"\xff\xd8\xff1", "a.jpg": b"\xff\xd8\xff2", "b\\c.jpg": b"\xff\xd8\xff3"})
    put(photos, {"b/c.jpg": b"\xff\xd8\xff4"})
    scan = scan_text(photos, "path\na\nb\\c.jpg\n")
    assert [scan.source.read(ref, 100)[-1:] for ref in scan.samples] == [b"1", b"3"]  # type: ignore[index]
    with pytest.raises(SourceError, check=lambda error: str(error.path).endswith("line 3 (id 1)")):
        scan_text(photos, "path\n0.jpg\n0\n")  # one picture twice


def test_a_pipe_is_refused_without_waiting_for_it(photos: Path) -> None:
    os.mkfifo(photos / "pipe.csv")
    with pytest.raises(SourceError, check=lambda error: str(error.path) == str(photos / "pipe.csv")):
        scan_of(photos / "pipe.csv")


def test_rows_without_a_picture_are_rejected_by_line(raw_tree: Path, tmp_path: Path) -> None:
    paths = [sample.path for sample in scan_of(raw_tree).samples]
    paths[3], paths[40] = "nowhere.jpg", os.path.dirname(paths[40])
    table, options = tmp_path / "labels.csv", {"root": str(raw_tree), "target": "none"}
    WRITERS["csv"](table, {"path": paths})
    assert "2 rows of 70 without a picture" in scan_of(table, **options).warnings[0]
    recipe = small_recipe("shards", size=8)
    done = convert(table, tmp_path / "out", recipe, workers=0, max_rejects=0.05, **options)
    assert {sample.id: sample.reason for sample in done.manifest.rejected} == {
        3: f"is not a file; named in {table}, line 5 (id 3)",
        40: f"is a folder; named in {table}, line 42 (id 40)",
    }
    assert verify_deep(tmp_path / "out", table, workers=0) == []


def test_a_destination_may_lie_beside_the_table_but_not_in_root(photos: Path) -> None:
    check_no_overlap(scan_text(photos, "path\n0.jpg\n").source, photos / "out")
    with pytest.raises(SettingError, check=lambda error: "beside" in error.remedy):
        check_no_overlap(scan_of(photos / "labels.csv", root=str(photos)).source, photos / "out")

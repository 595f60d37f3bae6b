"""What is peculiar to tables: how cells become paths, classes, numbers and fields, and what is refused."""

import csv
import io
import itertools
import json
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precache import SettingError, SourceError, convert, verify_deep
from precache.sources.base import Scan, check_no_overlap
from tests.conftest import small_recipe
from tests.precache.sources.archives import put, scan_of
from tests.precache.sources.tables import WRITERS, scan_text


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Files that a scan takes for pictures, and nobody decodes."""
    return put(tmp_path, {f"{number}.jpg": b"\xff\xd8\xff" + b"x" * number for number in range(4)})


def scan_labels(folder: Path, cells: list[str], **options: Any) -> Scan:
    rows = "".join(f"{row}.jpg,{cell}\n" for row, cell in enumerate(cells))
    return scan_text(folder, f"path,y\n{rows}", **{"label": "y", **options})


NUMBERS = ["2", "2.0", "1.1", "1.10", "1e5", "100000", "0", "-0", "+1", "007", "1234567890123456789"]
NUMBERS += ["1234567890123456788", "x"]  # which are one float


@pytest.mark.parametrize("target", ["class", "classes", None])
def test_a_class_is_called_as_its_cell_is_written(target: str | None, photos: Path) -> None:
    """Every two of them; but numbers among which is a fraction, where nobody says that they are classes."""
    for cells in itertools.combinations_with_replacement(NUMBERS, 2):
        with suppress(SourceError) if target is None else nullcontext():
            scan = scan_labels(photos, [*cells], target=target)
            found = scan.samples.labels if scan.samples.targets is None else scan.samples.targets.values
            if scan.target == "number":
                assert "1.1" in "".join(cells)
            else:
                assert [scan.classes[number] for number in found] == [*cells]


def test_whole_numbers_stay_apart_whatever_stands_beside_them(photos: Path) -> None:
    """They are no floats, in which these two are one."""
    for last in ("", "nan", "1.5", "7"):
        rows = f"0.jpg,1234567890123456789\n1.jpg,1234567890123456788\n2.jpg,{last}\n"
        with suppress(SourceError):
            column = scan_text(photos, f"path,id\n{rows}", fields=("id",)).samples.fields["id"]
            assert [str(column.value(row))[-2:] for row in range(2)] == ["89", "88"]


def test_the_digest_covers_what_is_used_of_the_table(photos: Path) -> None:
    options = {"label": "a", "split": "s", "fields": ("f",)}
    text = "path,a,s,f,unused\n0.jpg,x,train,1,1\n1.jpg,y,val,2,2\n2.jpg,x,val,3,3\n"
    first = scan_text(photos, text, **options).digest
    excel = b"\xef\xbb\xbf" + text.replace(",2,2", ",2,3").replace("\n", "\r\n").encode() + b"\r\n"
    assert scan_text(photos, excel, **options).digest == first
    for old, new in (("1.jpg", "3.jpg"), ("2.jpg,x", "2.jpg,y"), ("y,val", "y,train"), (",2,2", ",3,2")):
        assert scan_text(photos, text.replace(old, new), **options).digest != first, new


SPELLINGS = ["pics/0.jpg", ".//pics/./0.jpg", "../{top}/pics/0.jpg", "/{folder}//pics/0.jpg"]


def test_a_picture_is_found_and_known_however_its_path_is_written(photos: Path) -> None:
    """But where the system finds none: behind a folder that is not there, or a link to somewhere else."""
    put(photos, {"pics/0.jpg": b"\xff\xd8\xffpics", "far/away/1.jpg": b""})
    (photos / "pics/link").symlink_to("../far/away")
    first, *others = (spelling.format(folder=photos, top=photos.name) for spelling in SPELLINGS)
    for other in others:
        scan = scan_text(photos, f"path\n{other}\n1.jpg\n")
        assert scan.source.read(scan.samples[0], 100) == b"\xff\xd8\xffpics"
        with pytest.raises(SourceError, match=r"is in line 2 \(id 0\), too"):
            scan_text(photos, f"path\n{first}\n{other}\n")
    scan = scan_text(photos, "path\npics/gone/../0.jpg\npics/link/../0.jpg\n1.jpg\n")
    assert "2 rows of 3 without a picture" in scan.warnings[0]


@pytest.mark.parametrize("name", ["label", "labels", "class", "class_name", "target", "category"])
def test_columns_with_usual_label_names_are_used_with_a_warning(name: str, photos: Path) -> None:
    for image in ("image", "path", "file", "filename", "file_name"):
        text = f"{image},{name}\n0.jpg,a\n1.jpg,b\n2.jpg,a\n"
        scan = scan_text(photos, text)
        assert (scan.target, [scan.classes[ref.label] for ref in scan.samples]) == ("class", ["a", "b", "a"])
        assert ["--label names others" in line and repr(name) in line for line in scan.warnings] == [True]
        assert scan_text(photos, text, label=name).warnings == ()
        assert scan_text(photos, text, split=name).target == "none", "it is something else"
        (warning,) = scan_text(photos, f"{image},species\n0.jpg,a\n").warnings
        assert "--label" in warning


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
"""How programs print a list, so that pandas and csv.writer write it into a cell."""
# numpy leaves out what is 0 at the end of a text
NAMES = (
    st.text(st.characters(exclude_categories=["Cs"])).map(lambda text: text.rstrip("\0")).filter(str.strip)
)
NUMBERS_IN_LISTS = st.integers(-(10**6), 10**6).map(lambda number: number / 8)


@pytest.mark.parametrize("table", ["t.csv", "t.jsonl"])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_lists_are_read_however_they_are_printed(table: str, photos: Path, data: st.DataObject) -> None:
    """Lists of names, and of as many numbers each."""
    names = data.draw(st.lists(st.lists(NAMES, max_size=30), min_size=2, max_size=3).filter(any))
    width = data.draw(st.integers(2, 99))
    vectors = [data.draw(st.lists(NUMBERS_IN_LISTS, min_size=width, max_size=width)) for _ in names]
    show = data.draw(st.sampled_from(PRINTED))
    rows = [
        {"path": f"{row}.jpg", "y": show(names[row]), "v": show(vectors[row])} for row in range(len(names))
    ]
    file = io.StringIO()
    if table == "t.csv":
        writer = csv.writer(file)
        writer.writerows([rows[0], *(row.values() for row in rows)])
    else:
        file.write("".join(f"{json.dumps(row)}\n" for row in rows))
    scan = scan_text(photos, file.getvalue(), table, label="y", target="classes")
    every = sorted({name for row in names for name in row})
    assert scan.classes == tuple(every)
    assert [ref.target for ref in scan.samples] == [sorted({*map(every.index, row)}) for row in names]
    scan = scan_text(photos, file.getvalue(), table, label="v", target="number")
    assert [ref.target for ref in scan.samples] == vectors


SPACED = [
    "image, label",
    "image,label ",
    " image,label",
    'image, "label"',
    '"image", "label"',
    "image , label",
]


@pytest.mark.parametrize("header", SPACED)
def test_spaces_around_the_names_of_columns_are_no_part_of_them(header: str, photos: Path) -> None:
    between = ", " if ", " in header else ","
    scan = scan_text(photos, f'{header}\n0.jpg{between}cat\n1.jpg{between}"dog, big"\n')
    assert (scan.target, scan.classes) == ("class", ("cat", "dog, big"))
    tabbed = header.replace(",", "\t"), between.replace(",", "\t")
    scan = scan_text(photos, f"{tabbed[0]}\n0.jpg{tabbed[1]}7\n", "t.tsv", fields=("label",), target="none")
    assert scan.samples.fields["label"].tolist() == [7]


@pytest.mark.parametrize("without", range(3))
def test_each_line_of_json_lines_says_which_keys_there_are(without: int, photos: Path) -> None:
    rows: list[dict[str, Any]] = [{"image": f"{row}.jpg", "label": "a", "width": row} for row in range(3)]
    for key, options in (("label", {}), ("label", {"label": "label"}), ("width", {"fields": ("width",)})):
        lines = [dict(row) for row in rows]
        del lines[without][key]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        with pytest.raises(SourceError, match=rf"line {without + 1} \(id {without}\): '{key}': is empty"):
            scan_text(photos, text, "t.jsonl", **options)


A = {"label": "a"}
NUMBER = {"label": "a", "target": "number"}
BAD: list[tuple[str | bytes, dict[str, Any], list[str]]] = [
    ("path,a\n0.jpg,x\n", {"label": "b"}, ["no column 'b'", "--label", "'path', 'a'"]),
    ("path,class,label\n0.jpg,x,y\n", {}, ["'class', 'label'", "--label", "--target none"]),
    ("path,a\n0.jpg,x\n1.jpg, \n", A, ["line 3 (id 1): 'a': is empty"]),
    ("path,a\n0.jpg,0.5\n1.jpg,o.7\n", A, ["line 3", "'o.7' is not a number", "--target class"]),
    ('path,a\n0.jpg,"[1,2]"\n1.jpg,[3]\n', NUMBER, ["line 3", "one length"]),
    ("path,a\n0.jpg,cat\n1.jpg,\"['cat', 'dog']\"\n", A, ["line 3 (id 1)", "is a list", "--target class"]),
    ('path,a\n0.jpg,"[cat, dog]"\n', A, ["line 2 (id 0)", "'[cat, dog]'", "JSON", "--target class"]),
    ("path,a\n0.jpg,[1]\n1.jpg,[0 1 ... 8 9]\n", {"fields": ("a",)}, ["line 3", "cut short"]),
    ("path,a\n0.jpg,[0 1 ... 8 9]\n", {"fields": ("a",)}, ["line 2", "cut short"]),
    ("path,a\n0.jpg,[0 0 1]\n1.jpg,[0 1 0]\n", A, ["line 2", "for each class", "--target number"]),
    ("path,a\n0.jpg,[0 1]\n1.jpg,[1 0]\n", A, ["line 3", "for each class", "--target number"]),
    ("path,a\n0.jpg,[ True False]\n1.jpg,[False True]\n", A, ["line 2", "for each class"]),
    ('path,a\n"x\ny",1\n0.jpg\n', {}, ["line 4 (id 1)", "expected 2 cells", "got 1"]),
    (b"path,a\n0.jpg,x\n1.jpg,caf\xe9\n", {}, ["line 3", "byte 10 is not UTF-8"]),
    ("path,s\n0.jpg,../x\n", {"split": "s"}, ["line 2 (id 0)", "'../x' is not a valid split name"]),
    ('{"path": "0.jpg", "a": 1}\n{"path": "1.jpg"}\n', A, ["line 2 (id 1): 'a': is empty"]),
]


def test_a_bad_table_is_one_line_that_names_the_row(photos: Path) -> None:
    for text, options, mentions in BAD:
        name = "labels.jsonl" if str(text)[:1] in ("{", "[") else "labels.csv"
        with pytest.raises((SourceError, SettingError)) as caught:
            scan_text(photos, text, name, **options)
        said = str(caught.value)
        assert "\n" not in said
        assert len(said) < 500
        assert [mention for mention in mentions if mention not in said] == [], said


def test_a_pipe_is_refused_by_name_and_not_waited_for(photos: Path) -> None:
    os.mkfifo(photos / "pipe.csv")
    with pytest.raises(SourceError, match=r"pipe\.csv: "):
        scan_of(photos / "pipe.csv")


def test_rows_without_a_picture_are_rejects_named_by_row(raw_tree: Path, tmp_path: Path) -> None:
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
    assert verify_deep(tmp_path / "out", table, workers=0).problems == ()


def test_a_dataset_may_lie_beside_its_table_but_not_in_its_root(photos: Path) -> None:
    check_no_overlap(scan_text(photos, "path\n0.jpg\n").source, photos / "out")
    with pytest.raises(SettingError, match="overlap"):
        check_no_overlap(scan_of(photos / "labels.csv", root=str(photos)).source, photos / "out")

"""What is peculiar to tables: how cells become paths, classes, numbers and fields, and what is refused."""

import itertools
import os
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from precache import SettingError, SourceError, convert, verify_deep
from precache.sources.base import Scan, check_apart
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
def test_labels_are_not_left_out_in_silence(name: str, photos: Path) -> None:
    for image in ("image", "path", "file", "filename", "file_name"):
        text = f"{image},{name}\n0.jpg,a\n1.jpg,b\n2.jpg,a\n"
        scan = scan_text(photos, text)
        assert (scan.target, [scan.classes[ref.label] for ref in scan.samples]) == ("class", ["a", "b", "a"])
        assert ["--label names others" in line and repr(name) in line for line in scan.warnings] == [True]
        assert scan_text(photos, text, label=name).warnings == ()
        assert scan_text(photos, text, split=name).target == "none", "it is something else"
        (warning,) = scan_text(photos, f"{image},species\n0.jpg,a\n").warnings
        assert "--label" in warning


A = {"label": "a"}
NUMBER = {"label": "a", "target": "number"}
BAD: list[tuple[str | bytes, dict[str, Any], list[str]]] = [
    ("path,a\n0.jpg,x\n", {"label": "b"}, ["no column 'b'", "--label", "'path', 'a'"]),
    ("path,class,label\n0.jpg,x,y\n", {}, ["'class', 'label'", "--label", "--target none"]),
    ("path,a\n0.jpg,x\n1.jpg, \n", A, ["line 3 (id 1): 'a': is empty"]),
    ("path,a\n0.jpg,0.5\n1.jpg,o.7\n", A, ["line 3", "'o.7' is not a number", "--target class"]),
    ('path,a\n0.jpg,"[1,2]"\n1.jpg,[3]\n', NUMBER, ["line 3", "one length"]),
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
    check_apart(scan_text(photos, "path\n0.jpg\n").source, photos / "out")
    with pytest.raises(SettingError, match="overlap"):
        check_apart(scan_of(photos / "labels.csv", root=str(photos)).source, photos / "out")

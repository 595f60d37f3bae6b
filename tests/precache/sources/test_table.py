"""What is peculiar to tables: how cells become paths, classes, numbers and fields, and what is refused."""

import itertools
import os
import shutil
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from precache import SettingError, SourceError, convert, verify_deep
from precache.errors import MissingDependencyError
from precache.sources.base import Scan, check_apart
from tests.conftest import small_recipe
from tests.precache.sources.archives import put, scan_of
from tests.precache.sources.tables import WRITERS, scan_text


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Files that a scan takes for pictures, and nobody decodes."""
    return put(tmp_path, {f"{number}.jpg": b"\xff\xd8\xff" + b"x" * number for number in range(4)})


def names_of(scan: Scan) -> list[str]:
    return [scan.classes[sample.label] for sample in scan.samples]


def scan_labels(folder: Path, cells: list[str], **options: Any) -> Scan:
    rows = "".join(f"{row}.jpg,{cell}\n" for row, cell in enumerate(cells))
    return scan_text(folder, f"path,y\n{rows}", **{"label": "y", **options})


@pytest.mark.parametrize(
    ("cells", "classes", "labels"),
    [
        (["010", "9", "9", "1"], ("010", "1", "9"), [0, 2, 2, 1]),  # 010 is a name
        (["1.0", "2.0", "10.0"], ("1.0", "2.0", "10.0"), [0, 1, 2]),  # as pandas writes integers
    ],
)
def test_cells_become_classes(
    cells: list[str], classes: tuple[str, ...], labels: list[int], photos: Path
) -> None:
    scan = scan_labels(photos, cells)
    assert (scan.target, scan.classes, scan.samples.labels.tolist()) == ("class", classes, labels)


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


@pytest.mark.parametrize(
    ("cells", "target", "says"),
    [
        ("1 2 1", None, "--target number"),
        ("1 2.5 1", None, "--target class"),
        ("cat Cat cat", None, "spaces or in case"),
        *((f"{one} 2 1 2", "class", "which are one number") for one in ("+1", "01", "1.0")),
        ("a b c", None, "differ in every row"),
        ("1 2 1", "class", ""),
        ("1 2 1", "number", ""),
        ("a b a sNaN nan a b sNaN nan", None, ""),
    ],
)
def test_what_was_chosen_for_the_labels_is_said_where_there_is_a_choice(
    cells: str, target: str | None, says: str, photos: Path
) -> None:
    for number in range(4, 9):
        (photos / f"{number}.jpg").write_bytes(b"\xff\xd8\xff")
    said = " ".join(scan_labels(photos, cells.split(), target=target).warnings)
    assert says in said if says else not said


def test_the_digest_covers_what_is_used_of_the_table(photos: Path) -> None:
    options = {"label": "a", "split": "s", "fields": ("f",)}
    text = "path,a,s,f,unused\n0.jpg,x,train,1,1\n1.jpg,y,val,2,2\n2.jpg,x,val,3,3\n"
    first = scan_text(photos, text, **options).digest
    excel = b"\xef\xbb\xbf" + text.replace(",2,2", ",2,3").replace("\n", "\r\n").encode() + b"\r\n"
    assert scan_text(photos, excel, **options).digest == first
    for old, new in (("1.jpg", "3.jpg"), ("2.jpg,x", "2.jpg,y"), ("y,val", "y,train"), (",2,2", ",3,2")):
        assert scan_text(photos, text.replace(old, new), **options).digest != first, new


SPELLINGS = ["pics/0.jpg", ".//pics/0.jpg", "pics/./0.jpg", "pics/../pics/0.jpg", "../{top}/pics/0.jpg"]
SPELLINGS += ["/{folder}//pics/0.jpg", "pics/gone/../0.jpg", "pics/link/../0.jpg"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_picture_is_found_and_known_however_its_path_is_written(spelling: str, photos: Path) -> None:
    """But where the system finds none: behind a folder that is not there, or a link to somewhere else."""
    put(photos, {"pics/0.jpg": b"\xff\xd8\xffpics", "far/away/1.jpg": b""})
    (photos / "pics/link").symlink_to("../far/away")
    path = spelling.format(folder=photos, top=photos.name)
    scan = scan_text(photos, f"path\n{path}\n1.jpg\n")
    if spelling in SPELLINGS[-2:]:
        assert "1 row of 2 without a picture" in scan.warnings[0]
        return
    assert scan.source.read(scan.samples[0], 100) == b"\xff\xd8\xffpics"
    for other in SPELLINGS[:-2]:
        with pytest.raises(SourceError, match=r"is in line 2 \(id 0\), too"):
            scan_text(photos, f"path\n{path}\n{other.format(folder=photos, top=photos.name)}\n")


@pytest.mark.parametrize("name", ["label", "labels", "class", "class_name", "target", "category"])
@pytest.mark.parametrize("image", ["image", "path", "file", "filename", "file_name"])
def test_labels_are_not_left_out_in_silence(image: str, name: str, photos: Path) -> None:
    text = f"{image},{name}\n0.jpg,a\n1.jpg,b\n2.jpg,a\n"
    scan = scan_text(photos, text)
    assert (scan.target, names_of(scan)) == ("class", ["a", "b", "a"])
    assert ["--label names others" in line and repr(name) in line for line in scan.warnings] == [True]
    for options in ({"label": name}, {"target": "none"}):
        assert scan_text(photos, text, **options).warnings == ()
    for other in ({"fields": (name,)}, {"split": name}):
        assert scan_text(photos, text, **other).target == "none", "it is something else"
    (warning,) = scan_text(photos, f"{image},species\n0.jpg,a\n").warnings
    assert "--label" in warning
    assert scan_text(photos, f"{image}\n0.jpg\n").warnings == ()


A = {"label": "a"}
NUMBER = {"label": "a", "target": "number"}
BAD: list[tuple[str | bytes, dict[str, Any], list[str]]] = [
    ("path,a\n0.jpg,x\n", {"label": "b"}, ["no column 'b'", "--label", "'path', 'a'"]),
    ("photo,a\n0.jpg,x\n", {}, ["--image", "'photo', 'a'"]),
    ("path,file\n0.jpg,x\n", {}, ["several columns", "--image"]),
    ("path,class,label\n0.jpg,x,y\n", {}, ["'class', 'label'", "--label", "--target none"]),
    ("path;label\n0.jpg;x\n", {}, ["separated by ';'"]),
    ("path,a\n", {}, ["labels.csv: has no rows"]),
    ("path,a\n0.jpg,x\n1.jpg, \n", A, ["line 3 (id 1): 'a': is empty"]),
    ("path,a\n0.jpg,1\n1.jpg,\n", {"fields": ("a",)}, ["line 3 (id 1): 'a': is empty", "'1'"]),
    ("path,a\n0.jpg,1\n,2\n", {}, ["line 3 (id 1)", "is no path of a picture"]),
    ("path,a\n0.jpg,0.5\n1.jpg,o.7\n", A, ["line 3", "'o.7' is not a number", "--target class"]),
    ('path,a\n0.jpg,"[1,2]"\n1.jpg,[3]\n', NUMBER, ["line 3", "one length"]),
    ('path,a\n"x\ny",1\n0.jpg\n', {}, ["line 4 (id 1)", "expected 2 cells", "got 1"]),
    ('path,a\n0.jpg,"x\n1.jpg,y\n', {}, ["line 2", "not CSV", "quote"]),
    (f"path,a\n0.jpg,{'x' * 140_000}\n", {}, ["line 2", "131,072"]),
    (b"path,a\n0.jpg,x\n1.jpg,caf\xe9\n", {}, ["line 3", "byte 10 is not UTF-8"]),
    ("path,a\n".encode("utf-16"), {}, ["UTF-16", "UTF-8"]),
    ("path\nhttps://example.org/0.jpg\n", {}, ["line 2", "download the pictures"]),
    ("path,s\n0.jpg,../x\n", {"split": "s"}, ["line 2 (id 0)", "'../x' is not a valid split name"]),
    ("path\n0.jpg\n", {"root": "nowhere"}, ["--root nowhere: no such folder"]),
    ('{"path": "0.jpg", "a": 1}\n\n{"path": "1.jpg", "a": "x"}\n', A, ["line 3 (id 1)", "'x' is text"]),
    ('{"path": "0.jpg", "a": 1}\n{"path": "1.jpg"}\n', A, ["line 2 (id 1): 'a': is empty"]),
    ('["0.jpg"]\n', {}, ["line 1", "not a JSON object"]),
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


NO_TABLES = {"labels.csv.gz": "unpack it", "labels.xlsx": "as CSV", "labels.json": "JSON lines"}


@pytest.mark.parametrize("name", [*NO_TABLES, "pipe.csv", "nowhere.csv"])
def test_what_is_no_table_is_refused_by_name_and_not_waited_for(name: str, photos: Path) -> None:
    os.mkfifo(photos / "pipe.csv")
    if name in NO_TABLES:
        (photos / name).write_text("path\n0.jpg\n")
    with pytest.raises(SourceError, match=f"{name}: .*{NO_TABLES.get(name, '')}"):
        scan_of(photos / name)


def test_a_missing_pyarrow_is_named_with_its_extra(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match=r"t\.parquet: .*precache\[table\]"):
        scan_text(photos, b"PAR1", "t.parquet")


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


def test_a_dataset_may_lie_beside_its_table_and_its_pictures_may_move(raw_tree: Path, tmp_path: Path) -> None:
    names = [shutil.copy(raw_tree / s.path, tmp_path) for s in list(scan_of(raw_tree).samples)[:3]]
    WRITERS["csv"](tmp_path / "t.csv", {"path": [Path(name).name for name in names]})
    convert(tmp_path / "t.csv", tmp_path / "out", small_recipe("shards"), workers=0)
    with pytest.raises(SettingError, match="overlap"):  # with a folder of pictures that is named
        check_apart(scan_of(tmp_path / "t.csv", root=str(tmp_path)).source, tmp_path / "other")
    (tmp_path / "moved").mkdir()
    for name in names:
        shutil.move(name, tmp_path / "moved")
    report = verify_deep(tmp_path / "out", tmp_path / "t.csv", root=str(tmp_path / "moved"), workers=0)
    assert report.problems == ()

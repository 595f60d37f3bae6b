import itertools
import tracemalloc
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precache.errors import SourceError
from precache.sources.base import Scan
from tests.precache.sources.tables import WRITERS, scan_table, scan_text

KINDS = list(WRITERS)


def names_of(scan: Scan) -> list[str]:
    return [scan.classes[sample.label] for sample in scan.samples]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_table_says_the_same(kind: str, photos: Path) -> None:
    columns = {
        "path": ["0.jpg", "1.jpg", "2.jpg", "3.jpg"],
        "unused": ["", "", "", "x"],
        "species": ["heron", 'a "quoted", one', "two\nlines", "heron"],
        "fold": ["train", "valid", "train", "test"],
        "width": [640, -1, 0, 3],
        "score": [0.5, 1, 2e-3, -4],
        "caption": ["\u00fc \U0001f426", "b", "c, d", ""],
        "box": [[[1, 2, 3, 4], [5, 6, 7, 8]], [], [[0, 0, 1, 1]], []],
        "vector": [[0.5, 1.0], [1.0, 1.0], [2.0, 2.0], [3.0, 4.0]],
    }
    WRITERS[kind](photos / f"t.{kind}", columns)
    fields = ("width", "score", "caption", "box", "vector")
    scan = scan_table(photos / f"t.{kind}", label="species", split="fold", fields=fields)
    assert names_of(scan) == columns["species"]
    assert list(scan.classes) == sorted(set(columns["species"]))
    assert [sample.split for sample in scan.samples] == columns["fold"]
    assert scan.samples.split_names == ("test", "train", "valid")
    assert [sample.id for sample in scan.samples] == [0, 1, 2, 3]
    assert [sample.bytes for sample in scan.samples] == [3, 4, 5, 6]
    found = {name: [column.value(row) for row in range(4)] for name, column in scan.samples.fields.items()}
    assert found == {name: columns[name] for name in fields}
    kinds = {name: column.kind for name, column in scan.samples.fields.items()}
    assert kinds == {"width": "int", "score": "float", "caption": "text", "box": "ragged", "vector": "vector"}


@pytest.mark.parametrize("name", ["image", "path", "file", "filename", "file_name"])
def test_the_usual_names_of_a_column_of_pictures_are_known(name: str, photos: Path) -> None:
    scan = scan_text(photos, f"id,{name}\n7,3.jpg\n8,./1.jpg\n")
    assert [(sample.id, sample.path) for sample in scan.samples] == [(0, "3.jpg"), (1, "1.jpg")]
    assert (scan.target, scan.classes) == ("none", ())
    assert scan.samples.labels.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("cells", "classes", "labels"),
    [
        (["b", "a", "b", "c"], ("a", "b", "c"), [1, 0, 1, 2]),
        (["10", "9", "9", "-1"], ("-1", "9", "10"), [2, 1, 1, 0]),
        (["010", "9", "9", "1"], ("010", "1", "9"), [0, 2, 2, 1]),  # 010 is a name
        (["1.0", "2.0", "10.0", "1.0"], ("1.0", "2.0", "10.0"), [0, 1, 2, 0]),  # as pandas writes integers
    ],
)
def test_classes_are_sorted_as_text_and_whole_numbers_by_their_size(
    cells: list[str], classes: tuple[str, ...], labels: list[int], photos: Path
) -> None:
    rows = "".join(f"{row}.jpg,{cell}\n" for row, cell in enumerate(cells))
    scan = scan_text(photos, f"path,label\n{rows}", label="label")
    assert (scan.target, scan.classes, scan.samples.labels.tolist()) == ("class", classes, labels)


NUMBERS = [
    "2",
    "2.0",
    "1.1",
    "1.10",
    "1e5",
    "100000",
    "0",
    "-0",
    "+1",
    "007",
    "123456789012345678",
    "x",
    "10",
]


@pytest.mark.parametrize("target", ["class", "classes", None])
def test_a_class_is_called_as_its_cell_is_written(target: str | None, photos: Path) -> None:
    """Every two of them; but numbers among which is a fraction, where nobody says that they are classes."""
    for one, other in itertools.product(NUMBERS, repeat=2):
        with suppress(SourceError) if target is None else nullcontext():
            scan = scan_text(photos, f"path,y\n0.jpg,{one}\n1.jpg,{other}\n", label="y", target=target)
            if scan.target == "class":
                assert names_of(scan) == [one, other]
            elif scan.target == "classes":
                assert scan.samples.targets is not None
                assert [scan.classes[number] for number in scan.samples.targets.values] == [one, other]
            else:
                assert "1.1" in one + other


IDS = ["1234567890123456789", "1234567890123456788", "123456789012345678", "123456789012345679"]


@pytest.mark.parametrize("last", ["", "nan", "1.5", "7"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_stay_apart_whatever_stands_beside_them(kind: str, last: str, photos: Path) -> None:
    """Each pair in a column with a last cell that is empty, no number, or a number of another kind."""
    for pair in (IDS[:2], IDS[2:]):
        cells: list[Any] = [*pair, last]
        if kind not in ("csv", "tsv"):
            cells = [int(pair[0]), int(pair[1]), float(last) if last else None]
        if kind == "parquet":
            pytest.importorskip("pyarrow", reason="the extra 'table' is not installed")
            if last:
                continue  # its column is of floats already
        WRITERS[kind](photos / f"t.{kind}", {"path": ["0.jpg", "1.jpg", "2.jpg"], "id": cells})
        with suppress(SourceError):
            column = scan_table(photos / f"t.{kind}", fields=("id",)).samples.fields["id"]
            assert [str(column.value(row)) for row in range(2)] == pair


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("0.jpg,a|b\n1.jpg,\n2.jpg,b | a|b\n", {"separator": "|"}),
        ('0.jpg,"[""a"", ""b""]"\n1.jpg,[]\n2.jpg,"[""b"", ""a""]"\n', {}),
    ],
)
def test_several_classes_come_from_a_list_or_a_separator(
    text: str, options: dict[str, Any], photos: Path
) -> None:
    scan = scan_text(photos, f"path,label\n{text}", label="label", **options)
    assert (scan.target, scan.classes) == ("classes", ("a", "b"))
    targets = scan.samples.targets
    assert targets is not None
    assert [targets.value(row) for row in range(3)] == [[0, 1], [], [0, 1]]
    assert scan.samples.labels.tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    ("cells", "target", "expected"),
    [
        (["0.5", "1", "-2e-3"], None, [0.5, 1, -0.002]),
        (["3", "1", "2"], "number", [3, 1, 2]),
        (['"[0.5, 1]"', '"[1, 2]"', '"[3, 4]"'], None, [[0.5, 1], [1, 2], [3, 4]]),
    ],
)
def test_numbers_are_targets_where_they_are_fractions_or_asked_for(
    cells: list[str], target: str | None, expected: list[Any], photos: Path
) -> None:
    rows = "".join(f"{row}.jpg,{cell}\n" for row, cell in enumerate(cells))
    scan = scan_text(photos, f"path,label\n{rows}", label="label", target=target)
    targets = scan.samples.targets
    assert targets is not None
    assert targets.values.dtype == np.float64
    assert (scan.target, scan.classes, targets.values.tolist()) == ("number", (), expected)


def test_what_was_chosen_for_the_labels_is_said_where_there_is_a_choice(photos: Path) -> None:
    def said(cells: str | list[str], **options: Any) -> str:
        cells = cells.split() if isinstance(cells, str) else cells
        rows = "".join(f"{row}.jpg,{cell}\n" for row, cell in enumerate(cells))
        return " ".join(scan_text(photos, f"path,y\n{rows}", label="y", **options).warnings)

    assert (
        "the labels in 'y' are read as 2 classes; to predict them as numbers, pass --target number"
        in said("1 2 1")
    )
    assert "read as numbers to predict; to make each a class, pass --target class" in said("1 2.5 1")
    assert "differ only in spaces or in case" in said("cat Cat cat")
    for one in (" 1", "+1", "01", "1.0"):
        assert "which are one number" in said([one, "2", "1", "2"], target="class")
    assert "one number" not in said("1 x 2 x sNaN nan")
    assert "differ in every row" in said("a b c")
    assert said("1 2 1", target="class") == said("1 2 1", target="number") == said("a b a") == ""


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(photos: Path) -> None:
    plain = scan_text(photos, "path,a\n0.jpg,x\n1.jpg,y\n", label="a")
    excel = scan_text(photos, b"\xef\xbb\xbfpath,a\r\n0.jpg,x\r\n1.jpg,y\r\n\r\n", label="a")
    assert excel.digest == plain.digest


def test_the_digest_covers_what_is_used_of_the_table(photos: Path) -> None:
    options = {"label": "a", "split": "s", "fields": ("f",)}
    text = "path,a,s,f,unused\n0.jpg,x,train,1,1\n1.jpg,y,val,2,2\n"
    first = scan_text(photos, text, **options).digest
    assert scan_text(photos, text.replace(",2,2", ",2,3"), **options).digest == first
    for old, new in (("1.jpg", "2.jpg"), (",y,", ",z,"), ("val", "train"), (",2,2", ",3,2")):
        assert scan_text(photos, text.replace(old, new), **options).digest != first, new


def test_paths_may_be_absolute_and_leave_the_folder(photos: Path) -> None:
    (photos / "tables").mkdir()
    (photos / "tables/labels.csv").write_text(f"path\n{photos}/0.jpg\n../1.jpg\n")
    scan = scan_table(photos / "tables/labels.csv")
    assert [scan.source.read(ref, 100) for ref in scan.samples] == [b"\xff\xd8\xff", b"\xff\xd8\xffx"]


SPELLINGS = [
    "pics/0.jpg",
    "./pics/0.jpg",
    ".//pics/0.jpg",
    "pics//0.jpg",
    "pics/./0.jpg",
    "pics/../pics/0.jpg",
]
SPELLINGS += ["../{top}/pics/0.jpg", "{folder}/pics/0.jpg", "/{folder}//pics/0.jpg", "pics/gone/../0.jpg"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_picture_is_found_and_known_however_its_path_is_written(spelling: str, photos: Path) -> None:
    """But where the system finds none: behind a folder that is not there."""
    (photos / "pics").mkdir()
    (photos / "pics/0.jpg").write_bytes(b"\xff\xd8\xffpics")
    path = spelling.format(folder=photos, top=photos.name)
    scan = scan_text(photos, f"path\n{path}\n1.jpg\n")
    if "gone" in spelling:
        assert "1 row of 2 without a picture" in scan.warnings[0]
        return
    assert scan.source.read(scan.samples[0], 100) == b"\xff\xd8\xffpics"
    assert scan.samples[0].path in ("pics/0.jpg", f"../{photos.name}/pics/0.jpg", f"{photos}/pics/0.jpg")
    for other in SPELLINGS[:-1]:
        with pytest.raises(SourceError, match=r"is in line 2 \(id 0\), too"):
            scan_text(photos, f"path\n{path}\n{other.format(folder=photos, top=photos.name)}\n")


def test_a_path_behind_a_link_leads_where_the_system_leads(photos: Path) -> None:
    (photos / "far/away").mkdir(parents=True)
    (photos / "far/0.jpg").write_bytes(b"\xff\xd8\xfffar")
    (photos / "link").symlink_to("far/away")
    scan = scan_text(photos, "path\nlink/../0.jpg\n0.jpg\n")
    assert [scan.source.read(ref, 100) for ref in scan.samples] == [b"\xff\xd8\xfffar", b"\xff\xd8\xff"]


@pytest.mark.parametrize("name", ["label", "labels", "class", "class_name", "target", "category"])
def test_labels_that_nobody_named_are_guessed_and_that_is_said(name: str, photos: Path) -> None:
    text = f"filename,{name}\n0.jpg,a\n1.jpg,b\n2.jpg,a\n"
    scan = scan_text(photos, text)
    assert (scan.target, names_of(scan)) == ("class", ["a", "b", "a"])
    (warning,) = scan.warnings
    assert f"labels are taken from {name!r}; --label names others, --target none takes none" in warning
    assert (
        scan_text(photos, text, label=name).warnings == scan_text(photos, text, target="none").warnings == ()
    )
    for options in ({"fields": (name,)}, {"split": name}):
        assert scan_text(photos, text, **options).target == "none", "it is something else"


def test_labels_are_not_left_out_in_silence(photos: Path) -> None:
    (warning,) = scan_text(photos, "filename,species\n0.jpg,a\n").warnings
    assert "pictures get no labels, as no column is named label" in warning
    assert "name theirs with --label" in warning
    for text, options in (("path\n0.jpg\n", {}), ("path,a\n0.jpg,1\n", {"fields": ("a",)})):
        assert scan_text(photos, text, **options).warnings == ()


def test_numbers_of_folds_become_names_of_splits(photos: Path) -> None:
    scan = scan_text(photos, "path,fold\n0.jpg,1\n1.jpg,0\n2.jpg,1\n", split="fold")
    assert [sample.split for sample in scan.samples] == ["fold1", "fold0", "fold1"]


def test_a_long_table_takes_columns_not_objects(tmp_path: Path) -> None:
    """Rows, of which a picture that is there many times over under other names is the first."""
    rows = 20_000
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff")
    lines = [f"d{row}/../a.jpg,{row % 1000}\n" for row in range(rows - 1)]
    (tmp_path / "t.csv").write_text("".join(["path,label\n", *lines, "a.jpg,1\n"]))
    tracemalloc.start()
    try:
        scan = scan_table(tmp_path / "t.csv", label="label")
        assert tracemalloc.get_traced_memory()[1] / rows < 400
    finally:
        tracemalloc.stop()
    assert (len(scan.samples), len(scan.classes)) == (rows, 1000)

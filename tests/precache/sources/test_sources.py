"""Contract of sources, checked for every kind."""

import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from precache import SettingError, SourceError, SourceOptions, convert, open_dataset, open_source, verify_deep
from precache.errors import ImageError, PrecacheError
from precache.pictures.reading import MAX_PIXELS
from precache.sources.base import Scan, Source, check_no_overlap
from precache.sources.options import OptionNotTakenError
from tests.conftest import small_recipe
from tests.faults.mutations import spoil
from tests.precache.pictures.drawing import encode_image
from tests.precache.sources.objects import Items, load_image, picture
from tests.precache.sources.tables import WRITERS, save_dataset, write_feather, write_pictures
from tests.precache.sources.tars import (
    JPEG,
    Files,
    files_of,
    make_tar,
    make_webdataset,
    put,
    read_shards,
    scan_of,
    spoil_tar,
)

_ADDED = 11
"""Pictures that a source gets after it was converted."""


@dataclass(frozen=True)
class SourceKind:
    """A kind of source, made of the files of a tree.

    Attributes:
        make: function of the files, with paths CLASS/NAME, and of an empty folder; it writes the source
            there, and returns what `open_source` takes.
        takes: names of the `SourceOptions` that the source takes.
        change: function of what `make` returned and the path of a picture; it changes that picture.
        keeps_files: whether reading a picture returns its file, not another encoding of it.
        is_sent_whole: whether worker processes get all of the data.
        is_converted: whether to convert it, too; False for one of two kinds with the same code.
        options: options with which the source has the labels of the tree.
        damage: function that damages a file of the source's own; None if it has no file but pictures.
        has_checksums: whether damage is always noticed.
    """

    make: Callable[[Files, Any], Any]
    takes: tuple[str, ...] = ("class_depth",)
    change: Callable[[Any, str], None] | None = None
    keeps_files: bool = True
    is_sent_whole: bool = False
    is_converted: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    damage: Callable[[bytes, random.Random], bytes] | None = None
    has_checksums: bool = False

    def open(self, made: Any, **options: Any) -> Source:
        """Open what `make` returned."""
        return open_source(made, SourceOptions(**{**self.options, **options}))


def touch(made: Path, name: str) -> None:
    """Change the times of all files in a folder."""
    for path in made.iterdir():
        os.utime(path, (1, 1))


def make_table(kind: str) -> Callable[[Files, Path], Path]:
    """Return a function that makes a table beside its pictures, whose column `species` has their classes."""

    def make(files: Files, place: Path) -> Path:
        put(place, {f"pictures/{name}": content for name, content in files.items()})
        names = sorted(files)
        columns = {
            "path": [f"pictures/{name}" for name in names],
            "species": [name.split("/")[0] for name in names],
        }
        WRITERS[kind](place / f"labels.{kind}", columns)
        return place / f"labels.{kind}"

    return make


def make_dataset(files: Files, place: Path, load: Callable[[Path], Any] = Path) -> Items:
    """Make a dataset of pairs: what `load` returns for a file, and the index of its class."""
    tree = put(place / "tree", files)
    classes = sorted({name.split("/")[0] for name in files})
    pairs = [(load(tree / name), classes.index(name.split("/")[0])) for name in sorted(files)]
    return Items(pairs, classes=classes)


def make_image_folder(files: Files, place: Path) -> Any:
    """Make torchvision's dataset of a tree."""
    torchvision = pytest.importorskip("torchvision", reason="the extra 'loaders' is not installed")
    return torchvision.datasets.ImageFolder(put(place / "tree", files))


def load_encoded(path: Path) -> Any:
    """Return the bytes of a picture, in one of the two forms that datasets have."""
    return {"bytes": path.read_bytes(), "path": None} if path.stat().st_size % 2 else path.read_bytes()


def make_saved_dataset(files: Files, place: Path) -> Path:
    """Write a folder as `save_to_disk` of Hugging Face's library does."""
    names, classes = sorted(files), sorted({name.split("/")[0] for name in files})
    columns = {
        "image": [{"bytes": files[name], "path": None} for name in names],
        "label": [classes.index(name.split("/")[0]) for name in names],
    }
    return save_dataset(place / "saved", columns, classes)


def make_feather(files: Files, place: Path) -> Path:
    """Write a compressed Feather file with the pictures in it."""
    names = sorted(files)
    columns = {"image": [files[name] for name in names], "label": [name.split("/")[0] for name in names]}
    write_feather(place / "pictures.feather", columns)
    return place / "pictures.feather"


def make_published(files: Files, place: Path) -> Path:
    """Write a folder of Parquet files as Hugging Face publishes them, without splits."""
    names, classes = sorted(files), sorted({name.split("/")[0] for name in files})
    for number, start in enumerate(range(0, len(names), 30)):
        part = names[start : start + 30]
        pictures = [{"bytes": files[name], "path": name.split("/")[1]} for name in part]
        labels = [classes.index(name.split("/")[0]) for name in part]
        path = place / "published/data" / f"{number:04d}.parquet"
        write_pictures(path, {"image": pictures, "label": labels}, classes, row_group_size=7)
    return place / "published"


def make_tars(files: Files, place: Path) -> Path:
    """Write WebDataset tars."""
    return make_webdataset(place / "tars", put(place / "tree", files))


def make_converted(name: str) -> Callable[[Files, Path], Path]:
    """Return a function that converts the files to the format `name`."""

    def make(files: Files, place: Path) -> Path:
        convert(put(place / "tree", files), place / "converted", small_recipe(name), workers=0)
        return place / "converted"

    return make


TABLE: dict[str, Any] = {
    "takes": ("root", "image", "label", "split", "fields", "target", "separator"),
    "options": {"label": "species"},
}
DATASET: dict[str, Any] = {"takes": ("image", "label", "split", "fields", "target", "separator")}
TARS: dict[str, Any] = {**DATASET, "options": {"label": "caption"}}
CONVERTED: dict[str, Any] = {"takes": ("classes", "ids"), "keeps_files": False, "is_sent_whole": True}
KINDS = {
    "tree": SourceKind(
        lambda files, place: put(place / "tree", files),
        change=lambda tree, name: (tree / name).write_bytes(b"another picture"),
    ),
    **{
        kind: SourceKind(
            make_table(kind),
            change=lambda made, name: (made.parent / name).write_bytes(b"another picture"),
            is_converted=kind in ("csv", "parquet"),
            damage=spoil,
            **TABLE,
        )
        for kind in WRITERS
    },
    "Parquet with pictures": SourceKind(make_published, damage=spoil, **{**TABLE, "options": {}}),
    "dataset of paths": SourceKind(make_dataset, **DATASET),
    "ImageFolder": SourceKind(make_image_folder, **DATASET),
    "dataset of bytes": SourceKind(
        lambda files, place: make_dataset(files, place, load_encoded), is_sent_whole=True, **DATASET
    ),
    "dataset of pictures": SourceKind(
        lambda files, place: make_dataset(files, place, load_image),
        keeps_files=False,
        is_sent_whole=True,
        **DATASET,
    ),
    "Feather with pictures": SourceKind(make_feather, damage=spoil, **{**TABLE, "options": {}}),
    "what save_to_disk wrote": SourceKind(make_saved_dataset, damage=spoil, **{**TABLE, "options": {}}),
    "WebDataset": SourceKind(make_tars, change=touch, damage=spoil_tar, **TARS),
    "converted": SourceKind(make_converted("shards"), damage=spoil, has_checksums=True, **CONVERTED),
    "converted to tars": SourceKind(
        make_converted("webdataset"), is_converted=False, damage=spoil, has_checksums=True, **CONVERTED
    ),
}
"""Kinds of sources, all of which have the pictures and labels of a tree."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> SourceKind:
    return KINDS[request.param]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def check_pictures(kind: SourceKind, scan: Scan, files: Files) -> None:
    """Check that all files are samples, in their order, with their classes and contents."""
    assert scan.samples.ids.tolist() == list(range(len(files)))
    assert scan.classes == tuple(sorted({name.split("/")[0] for name in files}))
    for ref, name in zip(scan.samples, sorted(files), strict=True):
        assert scan.classes[ref.label] == name.split("/")[0]
        if kind.keeps_files:
            assert scan.source.read(ref, MAX_PIXELS) == files[name]
            assert ref.bytes in (0, len(files[name]))  # 0: not known before it is read


def check_counts_and_names(scan: Scan) -> None:
    """Check that all files are samples or ignored, and that each sample has its own name in messages."""
    assert scan.scanned == len(scan.samples) + len(scan.ignored)
    assert all(ignored.reason for ignored in scan.ignored)
    names = [scan.source.where(ref) for ref in scan.samples]
    assert len(set(names)) == len(names)
    assert all(str(scan.root) in name or Path(name).is_file() for name in names)


def check_pickled_copy(kind: SourceKind, scan: Scan) -> None:
    """Check that a pickled copy reads the same pictures, and that it is small without the samples."""
    pickled = pickle.dumps(scan.source)
    copy = pickle.loads(pickled)
    for ref in scan.samples:
        assert copy.where(ref) == scan.source.where(ref)
        picture, copied_picture = scan.source.read(ref, MAX_PIXELS), copy.read(ref, MAX_PIXELS)
        if isinstance(picture, bytes):
            assert picture == copied_picture
        else:
            assert np.array_equal(picture, copied_picture)
    if not kind.is_sent_whole:
        assert len(pickled) < 2000 + 30 * len(scan.samples)


def check_is_never_written_to(source: Source) -> None:
    """Check that reading changes no file of the source, and that no destination may overlap with it."""
    before = {path: _state(path) for path in source.paths}
    scan = source.scan()
    scan.source.read(scan.samples[0], MAX_PIXELS)
    assert {path: _state(path) for path in source.paths} == before
    for path in source.paths:
        for destination in (path, path.parent if path is source.paths[0] else path, path / "out"):
            with pytest.raises(SettingError):
                check_no_overlap(source, destination)


def check_conversion(kind: SourceKind, made: Any, converted: Path, out: Path) -> None:
    """Check that the source converts to the shards in `converted`, those of its tree."""
    done = convert(made, out, small_recipe("shards"), workers=1, **kind.options)  # unpickled by a process
    assert done.manifest.classes == open_dataset(converted).manifest.classes
    assert read_shards(out) == read_shards(converted) != []
    assert verify_deep(out, made, workers=0) == []


def check_growth(kind: SourceKind, place: Path, files: Files, folder: Path) -> None:
    """Check that what a source got since a conversion is converted `without` that, and nothing else is."""
    names = sorted(files)
    place.mkdir()
    made = kind.make({name: files[name] for name in names[:-_ADDED]}, place)
    recipe = small_recipe("shards", splits="train=0.7,val=0.3")
    convert(made, folder / "first", recipe, workers=0, **kind.options)
    shutil.rmtree(place)
    place.mkdir()
    made = kind.make(files, place)
    scan = kind.open(made).scan()
    options = {**kind.options, "without": [folder / "first"]}
    done = convert(made, folder / "more", recipe, workers=0, **options)
    assert done.published
    assert not convert(made, folder / "more", recipe, workers=0, **options).published
    assert done.manifest.classes == scan.classes
    assert done.manifest.scanned == _ADDED
    first, more = (open_dataset(folder / name).read_index() for name in ("first", "more"))
    label_of = {more.path(row): int(more.labels[row]) for row in range(len(more))}
    assert label_of == {ref.path: ref.label for ref in [*scan.samples][-_ADDED:]}
    assert sorted([*label_of, *(first.path(row) for row in range(len(first)))]) == [
        *scan.samples.list_paths()
    ]
    assert sorted(more.ids.tolist()) == [*range(_ADDED)]
    assert [more.path(row) for row in np.argsort(more.ids)] == [ref.path for ref in scan.samples][-_ADDED:]
    assert verify_deep(folder / "more", made, workers=0) == []


def _state(place: Path) -> Any:
    """Return what would change if something were written to this place."""
    paths = [place, *sorted(place.rglob("*"))]
    return [(path, path.lstat().st_mtime_ns) for path in paths]


OPTIONS: dict[str, Any] = {"root": "x", "label": "x", "split": "x", "fields": ("x",), "class_depth": 1}


def test_every_source_keeps_the_contract(
    kind: SourceKind, place: Path, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    files = files_of(raw_tree)
    made = kind.make(files, place)
    scan = kind.open(made).scan()
    check_pictures(kind, scan, files)
    check_counts_and_names(scan)
    check_pickled_copy(kind, scan)
    again = kind.open(made).scan()
    assert (again.digest, again.classes, again.ignored) == (scan.digest, scan.classes, scan.ignored)
    assert list(again.samples) == list(scan.samples)
    check_is_never_written_to(kind.open(made))
    for name, value in OPTIONS.items():
        if name not in kind.takes:
            with pytest.raises(OptionNotTakenError, check=lambda error, name=name: error.option == name):
                kind.open(made, **{name: value}).scan()
    if kind.is_converted:
        check_conversion(kind, made, converted["shards"], tmp_path / "out")
        check_growth(kind, place / "growing", files, tmp_path / "datasets")
    if kind.change is not None:
        kind.change(made, scan.samples[1].path)
        with pytest.raises(SourceError, match="changed") as raised:
            scan.source.read(scan.samples[1], MAX_PIXELS)
        assert not isinstance(raised.value, ImageError)


@pytest.mark.parametrize("kind", [name for name in KINDS if KINDS[name].damage], indirect=True)
@pytest.mark.parametrize("times", [15, pytest.param(500, marks=pytest.mark.faults)])
def test_damage_is_an_error_in_one_line_or_harmless(kind: SourceKind, place: Path, times: int) -> None:
    """Damage a file of the source at random; with checksums, a picture is read unchanged or not at all."""
    assert kind.damage is not None
    made = kind.make(
        {
            f"{'abc'[number % 3]}/{number}{name}.png": encode_image(
                Image.new("RGB", (9, 7), (number * 40, 99, 0))
            )
            for number, name in enumerate(("", "", "", "", "long" * 20))
        },
        place,
    )
    pictures = {place / "tree", place / "pictures"}
    files = sorted(path for path in place.rglob("*") if path.is_file() and not pictures & {*path.parents})
    scan = kind.open(made).scan()
    contents = {ref.path: _content(scan, row) for row, ref in enumerate(scan.samples)}
    for seed in range(times):
        draw = random.Random(seed)
        victim = draw.choice(files)
        whole = victim.read_bytes()
        victim.write_bytes(kind.damage(whole, draw))
        try:
            scan = kind.open(made).scan()
            check_counts_and_names(scan)
            for row, ref in enumerate(scan.samples):
                content = _content(scan, row)
                if kind.has_checksums:
                    assert content in (None, contents.get(ref.path, content)), seed
        except PrecacheError as error:
            check_message(error, place)
        victim.write_bytes(whole)


def _content(scan: Scan, row: int) -> bytes | None:
    """Read the bytes of a picture; None if it is rejected."""
    try:
        picture = scan.source.read(scan.samples[row], MAX_PIXELS)
    except ImageError as error:
        check_message(error, scan.root)
        return None
    return picture if isinstance(picture, bytes) else picture.tobytes()


def check_message(error: Exception, place: Path) -> None:
    """Check that the error is one line of moderate length that names the place."""
    assert "\n" not in str(error)
    assert len(str(error)) < 1000
    assert str(place) in str(error)


Columns = dict[str, list[Any]]
"""Values of each picture, by the names of columns."""


def rows_of_table(kind: str) -> Callable[[Columns, Path], Any]:
    """Return a function that writes a table of columns."""

    def make(columns: Columns, place: Path) -> Path:
        names = [f"{row}.jpg" for row in range(len(columns["label"]))]
        put(place, dict.fromkeys(names, JPEG))
        WRITERS[kind](place / f"table.{kind}", {"path": names, **columns})
        return place / f"table.{kind}"

    return make


def _rows(columns: Columns) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def rows_of_dataset(columns: Columns, place: Path) -> Items:
    """Make a dataset of mappings."""
    return Items([{"image": picture(number), **row} for number, row in enumerate(_rows(columns))])


def rows_of_pictures(columns: Columns, place: Path) -> Path:
    """Write Parquet with the pictures in it."""
    pictures = [JPEG] * len(columns["label"])
    return write_pictures(place / "pictures.parquet", {"image": pictures, **columns})


def rows_of_tar(columns: Columns, place: Path) -> Path:
    """Write a WebDataset tar with the columns in its .json."""
    files = {}
    for number, row in enumerate(_rows(columns)):
        files |= {f"{number}.jpg": JPEG, f"{number}.json": json.dumps(row).encode()}
    return make_tar(place / "x.tar", files)


def rows_of_saved_dataset(columns: Columns, place: Path) -> Path:
    """Write a folder as Hugging Face's library does, in an empty place."""
    shutil.rmtree(place / "saved", ignore_errors=True)
    return save_dataset(place / "saved", {"image": [JPEG] * len(columns["label"]), **columns})


ROWS: dict[str, Callable[[Columns, Path], Any]] = {
    **{kind: rows_of_table(kind) for kind in WRITERS},
    "Parquet with pictures": rows_of_pictures,
    "dataset": rows_of_dataset,
    "WebDataset": rows_of_tar,
    "what save_to_disk wrote": rows_of_saved_dataset,
}
"""Functions that make a source whose pictures have these columns."""
LABELS: list[tuple[list[Any], dict[str, Any], str, tuple[str, ...], list[Any]]] = [
    (["b", "a", "b", "c"], {}, "class", ("a", "b", "c"), [1, 0, 1, 2]),
    ([10, 9, 9, -1], {}, "class", ("-1", "9", "10"), [2, 1, 1, 0]),  # classes sorted by size
    (["a|b", "", "b | a|b"], {"separator": "|"}, "classes", ("a", "b"), [[0, 1], [], [0, 1]]),
    ([["a", "b"], [], ["b"]], {}, "classes", ("a", "b"), [[0, 1], [], [1]]),
    ([0.5, 1.0, -2e-3], {}, "number", (), [0.5, 1, -0.002]),
    ([3, 1, 2], {"target": "number"}, "number", (), [3, 1, 2]),
    ([[0.5, 1.0], [1.0, 2.0], [3.0, 4.0]], {}, "number", (), [[0.5, 1], [1, 2], [3, 4]]),
    ([3, 1, 2], {"target": "none"}, "none", (), [-1, -1, -1]),
]
"""Values of the column, options, and the target, classes and labels that follow."""
FIELDS: Columns = {
    "width": [640, -1, 0, 3],
    "score": [0.5, 1.0, 2e-3, -4.0],
    "caption": ["\u00fc \U0001f426", "b", "c, d", 'a "quoted", one'],
    "box": [[[1, 2, 3, 4], [5, 6, 7, 8]], [], [[0, 0, 1, 1]], []],
    "vector": [[0.5, 1.0], [1.0, 1.0], [2.0, 2.0], [3.0, 4.0]],
}


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_a_column_of_labels_gives_target_and_classes(make: Any, tmp_path: Path) -> None:
    for values, options, target, classes, expected in LABELS:
        label = {} if options.get("target") == "none" else {"label": "label"}
        scan = scan_of(make({"label": values}, tmp_path), **label, **options)
        assert (scan.target, scan.classes) == (target, classes)
        labels = [ref.label if target in ("class", "none") else ref.target for ref in scan.samples]
        assert labels == expected


NUMBER_OR_CLASSES = "--target number to predict the vector (--target classes"
DOUBTFUL: list[tuple[list[Any], str, str]] = [
    ([[-1, 1, 1], [1, -1, -1], [1, 1, 1]], NUMBER_OR_CLASSES, ""),  # CelebA
    ([[-1, 1], [1, -1]], NUMBER_OR_CLASSES, ""),
    ([[-1, 0, 1], [0, 0, 0], [1, 0, -1]], NUMBER_OR_CLASSES, ""),  # CheXpert
    ([[31, 40, 52, 40], [30, 41, 50, 41]], NUMBER_OR_CLASSES, ""),  # landmarks
    ([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]], NUMBER_OR_CLASSES, ""),
    ([[0, 1], [1, 0]], NUMBER_OR_CLASSES, ""),  # a one-hot vector
    ([[18, 18, 44], [3]], NUMBER_OR_CLASSES, ""),  # the class of each object in a picture
    ([[31, 40], [30, 41], [29, 42]], "", "the vectors of numbers, pass --target number"),
    (["Mass|Edema", "Mass", "Mass"], "", "--separator '|'"),  # chest X-rays
    (["a;b", "c", "d"], "", "--separator ';'"),
    (["scab", "rust", "scab rust"], "", "--separator ' '"),  # Plant Pathology
    (["16 0", "16", "0"], "", "--separator ' '"),
    (["dog, cat", "cat", "dog"], "", "--separator ','"),
    (["cat/dog", "dog", "cat"], "", "--separator '/'"),
    (["a b c", "a b", "b c", "a c"], "", "--separator ' '"),
    (["-1 1 1", "1 -1 1"], "", "several numbers in one cell"),
    (["0,5", "1,25", "0,05"], "", "several numbers in one cell"),  # decimals of a German Excel
    ([[1, 2], [3], []], "", ""),
    ([["cat", "cat"], ["dog"]], "", ""),
    (["black bear", "brown bear", "Great Dane", "hot dog"], "", ""),
    (["tench, Tinca tinca", "crane, bird", "crane"], "", ""),
    (["birds/heron", "birds/owl", "pets/dog"], "", ""),
]
"""Values of a column, what the error that they raise without a target names, and what a note names."""


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_labels_that_may_be_no_classes_are_refused_or_noted(make: Any, tmp_path: Path) -> None:
    for values, refusal, advice in DOUBTFUL:
        made = make({"label": values}, tmp_path)
        if refusal:
            with pytest.raises(SourceError, match=re.escape(refusal)):
                scan_of(made, label="label")
            assert scan_of(made, label="label", target="classes").target == "classes"
        else:
            notes = " ".join(scan_of(made, label="label").warnings)
            if advice:
                assert advice in notes
            else:
                assert "--separator" not in notes
                assert "--target number" not in notes


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_columns_are_splits_and_fields(make: Any, tmp_path: Path) -> None:
    folds = [1, 0, 1, 2]
    options: dict[str, Any] = {"fields": tuple(FIELDS), "label": "label"}
    splits = [f"fold{number}" for number in folds]
    if make is rows_of_tar:  # the name of a tar says the split
        splits = [""] * 4
    else:
        options["split"] = "fold"
    scan = scan_of(make({"label": [*"abca"], "fold": folds, **FIELDS}, tmp_path), **options)
    assert [ref.split for ref in scan.samples] == splits
    columns = scan.samples.fields
    assert {name: [column.row_value(row) for row in range(4)] for name, column in columns.items()} == FIELDS
    assert [column.kind for column in columns.values()] == ["int", "float", "text", "ragged", "vector"]

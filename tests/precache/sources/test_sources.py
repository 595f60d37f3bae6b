"""What every kind of source keeps: a contract, over all of them; those of trees give what the tree gives."""

import json
import os
import pickle
import random
import tempfile
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
from precache.sources.tree import scan_tree
from precache.storage.objects import ObjectStore
from precache.storage.urls import Location, Url, locate
from tests.conftest import small_recipe
from tests.faults.mutations import spoil
from tests.precache.pictures.drawing import encode_image
from tests.precache.sources.archives import (
    JPEG,
    Files,
    files_of,
    make_tar,
    make_webdataset,
    make_zip,
    put,
    scan_of,
    spoil_archive,
)
from tests.precache.sources.objects import Items, opened, picture
from tests.precache.sources.tables import WRITERS, write_pictures
from tests.precache.sources.archives import read_shards


@dataclass(frozen=True)
class Kind:
    """A kind of source.

    Attributes:
        make: `(files, place) -> what open_source takes`; files are the content of each, by its path
            CLASS/NAME, and place is an empty folder, or a bucket.
        takes: names of `SourceOptions` that it takes.
        at_url: whether it lies in a bucket.
        is_tree: whether its samples are those of the tree of the same files: paths, ignored files and digest.
        holds_any_name: also one that is not UTF-8.
        change: `(what make gave, path of a picture)`: changes what is read, after the scan.
        holds_files: whether what is read of a picture is its file; or else what was made of it.
        is_sent_whole: whether workers get all of it.
        is_converted: whether it is converted, too: not each way to pack or to write the same.
        options: of `SourceOptions`, with which it says the same as the tree.
        damage: of a file of its own, by a draw; None where it has none but pictures.
        is_checked: whether no change of what it holds is ever read.
    """

    make: Callable[[Files, Any], Any]
    takes: tuple[str, ...] = ("class_depth",)
    at_url: bool = False
    is_tree: bool = False
    holds_any_name: bool = False
    change: Callable[[Any, str], None] | None = None
    holds_files: bool = True
    is_sent_whole: bool = False
    is_converted: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    damage: Callable[[bytes, random.Random], bytes] | None = None
    is_checked: bool = False

    def open(self, made: Any, **options: Any) -> Source:
        """What `make` gave, as a source."""
        return open_source(made, SourceOptions(**{**self.options, **options}))


def touch(made: Path, name: str) -> None:
    """Write an archive, or those of a folder, at another time."""
    for path in made.iterdir() if made.is_dir() else [made]:
        os.utime(path, (1, 1))


def rewrite_object(made: str, name: str) -> None:
    """Within the same second, at the same size."""
    url = locate(made)
    assert isinstance(url, Url)
    store = ObjectStore(url)
    store.put(name, bytes(len(store.get(name))))


def packed(make: Callable[..., Path], name: str, **how: Any) -> Callable[[Files, Path], Path]:
    """An archive called so."""
    return lambda files, place: make(place / name, files, **how)


def make_table(kind: str) -> Callable[[Files, Path], Path]:
    """A table beside the pictures that it names; by the column `species` are they in their classes."""

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


def at_url(make: Callable[[Files, Path], Any]) -> Callable[[Files, Url], str]:
    """The same, as objects in a bucket."""

    def put_there(files: Files, bucket: Url) -> str:
        with tempfile.TemporaryDirectory() as folder:
            made = make(files, Path(folder))
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file() and not path.is_relative_to(Path(folder, "tree")):
                    ObjectStore(bucket).upload(path, str(path.relative_to(folder)))
        return str(bucket / made.name)

    return put_there


def make_dataset(files: Files, place: Path, value: Callable[[Path], Any] = Path) -> Items:
    """A dataset as people write them, of pairs of `value` of each file and a label."""
    tree = put(place / "tree", files)
    classes = sorted({name.split("/")[0] for name in files})
    pairs = [(value(tree / name), classes.index(name.split("/")[0])) for name in sorted(files)]
    return Items(pairs, classes=classes)


def make_image_folder(files: Files, place: Path) -> Any:
    """The dataset of torchvision's."""
    torchvision = pytest.importorskip("torchvision", reason="the extra 'loaders' is not installed")
    return torchvision.datasets.ImageFolder(put(place / "tree", files))


def undecoded(path: Path) -> Any:
    """The bytes of a picture, in either form in which datasets have them."""
    return {"bytes": path.read_bytes(), "path": None} if path.stat().st_size % 2 else path.read_bytes()


def make_saved_dataset(files: Files, place: Path) -> str:
    """A dataset of Hugging Face's library, saved."""
    library = pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
    names, classes = sorted(files), sorted({name.split("/")[0] for name in files})
    features = {"image": library.Image(), "label": library.ClassLabel(names=classes)}
    columns = {
        "image": [{"bytes": files[name], "path": None} for name in names],
        "label": [classes.index(name.split("/")[0]) for name in names],
    }
    dataset = library.Dataset.from_dict(columns, features=library.Features(features))
    dataset.save_to_disk(place / "saved")
    return f"hf:{place}/saved"


def make_published(files: Files, place: Path) -> Path:
    """A folder of Parquet files as Hugging Face publishes them, without splits."""
    names, classes = sorted(files), sorted({name.split("/")[0] for name in files})
    for number, start in enumerate(range(0, len(names), 30)):
        part = names[start : start + 30]
        pictures = [{"bytes": files[name], "path": name.split("/")[1]} for name in part]
        labels = [classes.index(name.split("/")[0]) for name in part]
        path = place / "published/data" / f"{number:04d}.parquet"
        write_pictures(path, {"image": pictures, "label": labels}, classes, row_group_size=7)
    return place / "published"


def make_tars(files: Files, place: Path) -> Path:
    """Tars of WebDataset."""
    return make_webdataset(place / "tars", put(place / "tree", files))


def converted_to(name: str) -> Callable[[Files, Path], Path]:
    """A converted dataset."""

    def make(files: Files, place: Path) -> Path:
        convert(put(place / "tree", files), place / "converted", small_recipe(name), workers=0)
        return place / "converted"

    return make


AN_ARCHIVE: dict[str, Any] = {"is_tree": True, "damage": spoil_archive}
A_TABLE: dict[str, Any] = {
    "takes": ("root", "image", "label", "split", "fields", "target", "separator", "mask", "boxes"),
    "options": {"label": "species"},
}
A_DATASET: dict[str, Any] = {"takes": ("image", "label", "split", "fields", "target", "separator")}
TARS: dict[str, Any] = {**A_DATASET, "options": {"label": "caption"}}
CONVERTED: dict[str, Any] = {"takes": ("classes", "ids"), "holds_files": False, "is_sent_whole": True}
KINDS = {
    "tree": Kind(
        lambda files, place: put(place / "tree", files),
        is_tree=True,
        holds_any_name=True,
        change=lambda tree, name: (tree / name).write_bytes(b"another picture"),
    ),
    "tar": Kind(packed(make_tar, "x.tar"), holds_any_name=True, change=touch, **AN_ARCHIVE),
    "TBZ2": Kind(packed(make_tar, "x.TBZ2", mode="w:bz2"), is_converted=False, is_tree=True),
    "tar.xz": Kind(packed(make_tar, "x.tar.xz", mode="w:xz"), holds_any_name=True, **AN_ARCHIVE),
    "zip": Kind(packed(make_zip, "x.zip"), change=touch, **AN_ARCHIVE),
    "objects": Kind(
        at_url(lambda files, place: put(place / "photos", files)),
        at_url=True,
        is_tree=True,
        change=rewrite_object,
    ),
    "tar at a URL": Kind(at_url(packed(make_tar, "x.tar")), at_url=True, is_tree=True, holds_any_name=True),
    "zip at a URL": Kind(at_url(packed(make_zip, "x.zip")), at_url=True, is_tree=True),
    **{
        kind: Kind(
            make_table(kind),
            change=lambda made, name: (made.parent / name).write_bytes(b"another picture"),
            is_converted=kind in ("csv", "parquet"),
            damage=spoil,
            **A_TABLE,
        )
        for kind in WRITERS
    },
    "table at a URL": Kind(
        at_url(make_table("csv")),
        at_url=True,
        change=lambda made, name: rewrite_object(str(locate(made).parent), name),
        **A_TABLE,
    ),
    "Parquet with pictures": Kind(make_published, damage=spoil, **{**A_TABLE, "options": {}}),
    "Parquet with pictures at a URL": Kind(at_url(make_published), at_url=True, **{**A_TABLE, "options": {}}),
    "dataset of paths": Kind(make_dataset, **A_DATASET),
    "ImageFolder": Kind(make_image_folder, **A_DATASET),
    "dataset of bytes": Kind(lambda *given: make_dataset(*given, undecoded), is_sent_whole=True, **A_DATASET),
    "dataset of pictures": Kind(
        lambda *given: make_dataset(*given, opened), holds_files=False, is_sent_whole=True, **A_DATASET
    ),
    "Hugging Face's datasets": Kind(make_saved_dataset, damage=spoil, **A_DATASET),
    "WebDataset": Kind(make_tars, change=touch, damage=spoil_archive, **TARS),
    "WebDataset at a URL": Kind(at_url(make_tars), at_url=True, **TARS),
    "converted": Kind(converted_to("shards"), damage=spoil, is_checked=True, **CONVERTED),
    "converted to tars": Kind(
        converted_to("webdataset"), is_converted=False, damage=spoil, is_checked=True, **CONVERTED
    ),
    "converted at a URL": Kind(at_url(converted_to("shards")), at_url=True, **CONVERTED),
}
"""Each is made by its function of the files of a tree, and says the same as that."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def place(kind: Kind, request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if kind.at_url:
        return request.getfixturevalue("bucket")
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def check_holds_the_pictures(kind: Kind, scan: Scan, files: Files) -> None:
    """Those of `files`, all of which are pictures: ids are ranks, each in its class, with its content."""
    expected = sorted(files)
    assert scan.samples.ids.tolist() == list(range(len(files)))
    assert scan.classes == tuple(sorted({name.split("/")[0] for name in files}))
    for ref, name in zip(scan.samples, expected, strict=True):
        assert scan.classes[ref.label] == name.split("/")[0]
        if kind.holds_files:
            assert scan.source.read(ref, MAX_PIXELS) == files[name]
            assert ref.bytes in (0, len(files[name]))  # 0: not known before it is read


def check_accounts_for_all(scan: Scan) -> None:
    """What was looked at is a sample or ignored; messages name each sample in one line."""
    assert scan.scanned == len(scan.samples) + len(scan.ignored)
    assert all(ignored.reason for ignored in scan.ignored)
    named = [scan.source.where(ref) for ref in scan.samples]
    assert len(set(named)) == len(named)
    assert all(str(scan.root) in where or Path(where).is_file() for where in named)


def check_is_read_elsewhere(kind: Kind, scan: Scan) -> None:
    """A worker process gets the source pickled, without the list of its samples."""
    sent = pickle.dumps(scan.source)
    copy = pickle.loads(sent)
    for ref in scan.samples:
        assert copy.where(ref) == scan.source.where(ref)
        ours, theirs = copy.read(ref, MAX_PIXELS), scan.source.read(ref, MAX_PIXELS)
        assert np.array_equal(ours, theirs) if not isinstance(ours, bytes) else ours == theirs
    if not kind.is_sent_whole:
        assert len(sent) < 2000 + 30 * len(scan.samples)


def check_is_never_written_to(source: Source) -> None:
    """No conversion goes into one of its places; and reading it changes nothing there."""
    before = {path: _state(path) for path in source.paths}
    scan = source.scan()
    scan.source.read(scan.samples[0], MAX_PIXELS)
    assert {path: _state(path) for path in source.paths} == before
    for path in source.paths:
        for destination in (path, path.parent if path is source.paths[0] else path, path / "out"):
            with pytest.raises(SettingError):
                check_no_overlap(source, destination)


def check_converts_as_its_tree(kind: Kind, made: Any, converted: Path, out: Path) -> None:
    """`converted` are the shards of the tree of the same pictures."""
    done = convert(made, out, small_recipe("shards"), workers=2, **kind.options)
    assert done.manifest.classes == open_dataset(converted).manifest.classes
    assert read_shards(out) == read_shards(converted) != []
    report = verify_deep(out, made, workers=0)
    assert (report.problems, report.samples) == ((), done.manifest.samples)


def _state(place: Location) -> Any:
    """What would change if something were written there."""
    if isinstance(place, Url):
        return sorted((info.name, info.etag) for info in ObjectStore(place.parent).list())
    paths = [place, *sorted(place.rglob("*"))]
    return [(path, path.lstat().st_mtime_ns) for path in paths]


OPTIONS: dict[str, Any] = {"root": "x", "label": "x", "split": "x", "fields": ("x",), "class_depth": 1}


def test_a_source_holds_its_pictures(
    kind: Kind, place: Any, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    files = files_of(raw_tree)
    made = kind.make(files, place)
    scan = kind.open(made).scan()
    check_holds_the_pictures(kind, scan, files)
    check_accounts_for_all(scan)
    check_is_read_elsewhere(kind, scan)
    again = kind.open(made).scan()
    assert (again.digest, again.classes, again.ignored) == (scan.digest, scan.classes, scan.ignored)
    assert list(again.samples) == list(scan.samples)
    check_is_never_written_to(kind.open(made))
    for name, value in OPTIONS.items():
        if name not in kind.takes:  # it would not heed it
            with pytest.raises(SettingError, match=name.replace("_", "-").removesuffix("s")):
                kind.open(made, **{name: value}).scan()
    if kind.is_converted:
        check_converts_as_its_tree(kind, made, converted["shards"], tmp_path / "out")
    if kind.change is not None:  # what is not as it was scanned is not taken for it
        kind.change(made, scan.samples[1].path)
        with pytest.raises(SourceError, match="changed while it was converted"):
            scan.source.read(scan.samples[1], MAX_PIXELS)


@pytest.mark.parametrize("kind", [name for name in KINDS if KINDS[name].damage], indirect=True)
@pytest.mark.parametrize("times", [15, pytest.param(500, marks=pytest.mark.faults)])
def test_damage_ends_in_one_line_or_in_what_is_stored(kind: Kind, place: Path, times: int) -> None:
    """Of a file of its own, by a draw; what has a checksum is never read as anything else."""
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
    stored = (
        {ref.path: _content(scan, row) for row, ref in enumerate(scan.samples)} if kind.is_checked else {}
    )
    for seed in range(times):
        draw = random.Random(seed)
        victim = draw.choice(files)
        whole = victim.read_bytes()
        victim.write_bytes(kind.damage(whole, draw))
        try:
            scan = kind.open(made).scan()
            check_accounts_for_all(scan)
            for row, ref in enumerate(scan.samples):
                found = _content(scan, row)
                assert found in (None, stored.get(ref.path, found)), seed
        except PrecacheError as error:
            check_line(error, place)
        victim.write_bytes(whole)


def _content(scan: Scan, row: int) -> bytes | None:
    """Of a picture; None where it is rejected."""
    try:
        picture = scan.source.read(scan.samples[row], MAX_PIXELS)
    except ImageError as error:
        check_line(error, scan.root)
        return None
    return picture if isinstance(picture, bytes) else picture.tobytes()


def check_line(error: Exception, place: Location) -> None:
    """It is one line that a terminal can show, and names the place."""
    assert "\n" not in str(error)
    assert len(str(error)) < 1000
    assert str(place) in str(error)


PARTS = (
    "a",
    "a-b",
    "A",
    "@eaDir",
    "b c",
    "\u00fc \u540d",
    "latin\udcef",
    "n" * 120,
    "tab\t'\"",
    ".hidden",
    "astral\U0001f600",
)
SAFE_PARTS = ("a", "a-b", "A", "@eaDir", "b c", "\u00fc \u540d", "n" * 120, ".hidden", "astral\U0001f600")
ENDINGS = (".jpg", ".JPG", ".jpeg", ".png", ".txt", ".psd", ".svg", "", ".b.gif", ".sgi")
STARTS = (JPEG, b"\x89PNG\r\n\x1a\n", b"", b"text", b"\x01\xda\x00\x01", b"8BPS")


def any_files(rng: np.random.Generator, parts: tuple[str, ...]) -> Files:
    """Files with strange names and contents, in class folders, in folders inside these, and beside them."""
    files = {"class/1.jpg": JPEG, "other/2.jpg": JPEG}
    for number in range(60):
        folders = [str(rng.choice(parts)) for _ in range(int(rng.choice([0, 1, 1, 1, 2, 2, 3])))]
        name = f"{rng.choice(parts)}{number}{rng.choice(ENDINGS)}"
        files["/".join([*folders, name])] = STARTS[rng.integers(len(STARTS))] * int(rng.integers(1, 4))
    return files


@pytest.mark.parametrize("kind", [name for name in KINDS if KINDS[name].is_tree], indirect=True)
@pytest.mark.parametrize(("seed", "prefix"), [(0, ""), (1, "train/")])
def test_what_a_tree_holds_any_other_place_of_its_files_holds(
    kind: Kind, place: Any, seed: int, prefix: str, tmp_path: Path
) -> None:
    """The same files give the same samples, and the same is ignored for the same reasons."""
    rng = np.random.default_rng((seed, 26))
    files = {f"{prefix}{name}": content for name, content in any_files(rng, SAFE_PARTS).items()}
    if kind.holds_any_name:
        files |= {f"{prefix}{name}": content for name, content in any_files(rng, PARTS).items()}
    if prefix:
        files["val/class/9.jpg"] = JPEG
    tree, scan = scan_tree(put(tmp_path / "files", files)), scan_of(kind.make(files, place))
    assert (scan.digest, scan.classes, scan.scanned) == (tree.digest, tree.classes, tree.scanned)
    assert set(scan.ignored) == set(tree.ignored)
    assert scan.samples.paths == tree.samples.paths
    assert scan.samples.split_names == tree.samples.split_names
    for name in ("ids", "labels", "splits", "file_bytes", "path_ends"):
        ours, theirs = getattr(scan.samples, name), getattr(tree.samples, name)
        assert ours.dtype == theirs.dtype == np.int64, name
        assert np.array_equal(ours, theirs), name


Columns = dict[str, list[Any]]
"""What is known of pictures, by name: a value of each."""


def rows_of_table(kind: str) -> Callable[[Columns, Path], Any]:
    """A table of the columns."""

    def make(columns: Columns, place: Path) -> Path:
        names = [f"{row}.jpg" for row in range(len(columns["label"]))]
        put(place, dict.fromkeys(names, JPEG))
        WRITERS[kind](place / f"table.{kind}", {"path": names, **columns})
        return place / f"table.{kind}"

    return make


def _rows(columns: Columns) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def rows_of_dataset(columns: Columns, place: Path) -> Items:
    """A dataset of mappings."""
    return Items([{"image": picture(number), **row} for number, row in enumerate(_rows(columns))])


def rows_of_pictures(columns: Columns, place: Path) -> Path:
    """Parquet with the pictures in it."""
    pictures = [JPEG] * len(columns["label"])
    return write_pictures(place / "pictures.parquet", {"image": pictures, **columns})


def rows_of_tar(columns: Columns, place: Path) -> Path:
    """A tar of WebDataset, the columns in its .json."""
    files = {}
    for number, row in enumerate(_rows(columns)):
        files |= {f"{number}.jpg": JPEG, f"{number}.json": json.dumps(row).encode()}
    return make_tar(place / "x.tar", files)


def rows_of_saved_dataset(columns: Columns, place: Path) -> Any:
    """A dataset of Hugging Face's library."""
    library = pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
    pictures = [picture(number) for number in range(len(columns["label"]))]
    dataset = library.Dataset.from_dict({"image": pictures, **columns})
    return dataset.cast_column("image", library.Image())


ROWS: dict[str, Callable[[Columns, Path], Any]] = {
    **{kind: rows_of_table(kind) for kind in WRITERS},
    "Parquet with pictures": rows_of_pictures,
    "dataset": rows_of_dataset,
    "WebDataset": rows_of_tar,
    "Hugging Face's datasets": rows_of_saved_dataset,
}
"""Each makes a source whose pictures have these columns."""
LABELS: list[tuple[list[Any], dict[str, Any], str, tuple[str, ...], list[Any]]] = [
    (["b", "a", "b", "c"], {}, "class", ("a", "b", "c"), [1, 0, 1, 2]),
    ([10, 9, 9, -1], {}, "class", ("-1", "9", "10"), [2, 1, 1, 0]),  # by their size
    (["a|b", "", "b | a|b"], {"separator": "|"}, "classes", ("a", "b"), [[0, 1], [], [0, 1]]),
    ([["a", "b"], [], ["b"]], {}, "classes", ("a", "b"), [[0, 1], [], [1]]),
    ([0.5, 1.0, -2e-3], {}, "number", (), [0.5, 1, -0.002]),
    ([3, 1, 2], {"target": "number"}, "number", (), [3, 1, 2]),
    ([[0.5, 1.0], [1.0, 2.0], [3.0, 4.0]], {}, "number", (), [[0.5, 1], [1, 2], [3, 4]]),
    ([3, 1, 2], {"target": "none"}, "none", (), [-1, -1, -1]),
]
"""Values, options, and the target, the classes and the labels that they give."""
FIELDS: Columns = {
    "width": [640, -1, 0, 3],
    "score": [0.5, 1.0, 2e-3, -4.0],
    "caption": ["\u00fc \U0001f426", "b", "c, d", 'a "quoted", one'],
    "box": [[[1, 2, 3, 4], [5, 6, 7, 8]], [], [[0, 0, 1, 1]], []],
    "vector": [[0.5, 1.0], [1.0, 1.0], [2.0, 2.0], [3.0, 4.0]],
}


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_columns_are_labels_splits_and_fields(make: Any, tmp_path: Path) -> None:
    for values, options, target, classes, labels in LABELS:
        named = {} if options.get("target") == "none" else {"label": "label"}
        scan = scan_of(make({"label": values}, tmp_path), **named, **options)
        assert (scan.target, scan.classes) == (target, classes)
        found = [ref.label if target in ("class", "none") else ref.target for ref in scan.samples]
        assert found == labels
    folds, of_tar = [1, 0, 1, 2], make is rows_of_tar  # whose name says the split
    source = make({"label": [*"abca"], "fold": folds, **FIELDS}, tmp_path)
    scan = scan_of(source, fields=tuple(FIELDS), label="label", split=None if of_tar else "fold")
    assert [ref.split for ref in scan.samples] == ["" if of_tar else f"fold{number}" for number in folds]
    columns = scan.samples.fields
    assert {name: [column.value(row) for row in range(4)] for name, column in columns.items()} == FIELDS
    assert [column.kind for column in columns.values()] == ["int", "float", "text", "ragged", "vector"]

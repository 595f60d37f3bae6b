"""Updates serve each picture as a new conversion of the edited source serves it.

Every kind of source is edited at random: pictures are added, removed, changed at the same size, damaged and
repaired; labels change; rows and members change their order.
"""

import io
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from precache import (
    Recipe,
    SourceOptions,
    convert,
    open_dataset,
    verify,
    verify_deep,
)
from precache.conversion.journal import unfinished_update_names
from precache.errors import DatasetError, PrecacheError
from precache.formats import FORMATS
from precache.recipe import DEFAULT_SPLITS
from tests.command import ROOT
from tests.conftest import IMAGES
from tests.format_contract import check_hold_the_same_samples
from tests.precache.destinations import contents
from tests.precache.sources.examples import FIELDS, TARGETS
from tests.precache.sources.objects import Items
from tests.precache.sources.objects import picture as grey
from tests.precache.sources.tables import write_csv, write_jsonl
from tests.precache.sources.tars import Files, make_tar, put
from tests.stopping import KilledError, Stop, stopping

SHAPE = (18, 20)
ROUNDS = 3
"""Rounds of edits, each followed by an update."""


@dataclass(frozen=True)
class Picture:
    """A picture of the source.

    Attributes:
        seed: seed of its pixels.
        broken: whether its file, of the same size, is no picture.
        written_s: modification time of its file.
    """

    seed: int
    label: str
    broken: bool = False
    written_s: int = 1

    @property
    def pixels(self) -> np.ndarray[Any, Any]:
        return np.random.default_rng(self.seed).integers(0, 256, (*SHAPE, 3), np.uint8)

    @property
    def content(self) -> bytes:
        file = io.BytesIO()
        Image.fromarray(self.pixels).save(file, "BMP")  # which has the same size for all pixels
        return bytes(file.tell()) if self.broken else file.getvalue()


@dataclass
class EditedSource:
    """Pictures of a source by name, in the order in which rows or members are written."""

    seed: int
    pictures: dict[str, Picture] = field(default_factory=dict)
    round: int = 1

    def __post_init__(self) -> None:
        self.rng, self.numbers = np.random.default_rng(self.seed), itertools.count(1)
        for _ in range(8):
            self.add()
        self.edit(times=3)

    def add(self) -> None:
        number = next(self.numbers)
        name = f"{int(self.rng.integers(100)):02}-{number}"
        self.pictures[name] = Picture(number, "ab"[number % 2], written_s=self.round)

    def change(self, name: str, **edit: Any) -> None:
        self.pictures[name] = replace(self.pictures[name], **edit)

    def edit(self, times: int) -> None:
        self.round += 1
        for _ in range(times):
            first, *others = sorted(self.pictures)  # the first stays, because a dataset needs a picture
            name, number = str(self.rng.choice(others)), next(self.numbers)
            edits: list[dict[str, Any]] = [
                {"seed": number, "broken": False, "written_s": self.round},
                {"broken": not self.pictures[name].broken, "written_s": self.round},
                {"written_s": self.round},
                {"label": "abc"[number % 3]},
            ]
            choice = int(self.rng.integers(len(edits) + 3))
            if choice < len(edits):
                self.change(name, **edits[choice])
            elif choice == len(edits) and len(others) > 3:
                del self.pictures[name]
            elif choice == len(edits) + 1:
                self.add()
            else:
                self.pictures = {name: self.pictures[name] for name in (*self.rng.permutation(others), first)}


def files(edited: EditedSource) -> Files:
    return {f"{picture.label}/{name}.bmp": picture.content for name, picture in edited.pictures.items()}


def plain_tree(edited: EditedSource, folder: Path) -> tuple[Any, SourceOptions]:
    """Write the pictures as files."""
    shutil.rmtree(folder / "tree", ignore_errors=True)
    put(folder / "tree", files(edited))
    for name, picture in edited.pictures.items():
        path = Path(picture.label, f"{name}.bmp")
        os.utime(folder / "tree" / path, (picture.written_s, picture.written_s))
    return folder / "tree", SourceOptions()


def table(edited: EditedSource, folder: Path) -> tuple[Any, SourceOptions]:
    """Write a table of pictures with several classes each, with splits and fields of every kind."""
    plain_tree(edited, folder)
    names, pictures = [*files(edited)], edited.pictures.values()
    columns: dict[str, list[Any]] = {
        "path": [f"tree/{name}" for name in names],
        "label": [f"{picture.label};odd{picture.seed % 3}" for picture in pictures],
        "fold": [["val", "train"][(picture.seed + picture.written_s) % 2] for picture in pictures],
        "width": [picture.seed for picture in pictures],
        "note": [*edited.pictures],
        "box": [[[1.5, 2, 3, picture.seed]] * (picture.seed % 3) for picture in pictures],
    }
    write_csv(folder / "t.csv", columns)
    options: dict[str, Any] = {"label": "label", "separator": ";", "target": "classes"}
    return folder / "t.csv", SourceOptions(**options, split="fold", fields=("width", "note", "box"))


def tarred(edited: EditedSource, folder: Path) -> tuple[Any, SourceOptions]:
    """Write a WebDataset tar with a single split, which shares divide."""
    members: Files = {}
    for name, picture in edited.pictures.items():
        members |= {f"{name}.bmp": picture.content, f"{name}.cls": picture.label.encode()}
    path = make_tar(folder / "train.tar", members)
    os.utime(path, (edited.round, edited.round))
    return path, SourceOptions()


def converted_tree(edited: EditedSource, folder: Path) -> tuple[Any, SourceOptions]:
    """Convert the tree, and update that dataset each time."""
    source, options = plain_tree(edited, folder)
    update_or_convert(source, folder / "first", "webdataset", options, size=min(SHAPE), fit="keep")
    return folder / "first", SourceOptions()


def remade_tree(edited: EditedSource, folder: Path) -> tuple[Any, SourceOptions]:
    """Convert the tree anew each time, so that its ids belong to other pictures."""
    update_or_convert(
        plain_tree(edited, folder)[0], folder / "first", "shards", anew=True, size=min(SHAPE), fit="keep"
    )
    return folder / "first", SourceOptions()


def in_memory(edited: EditedSource, folder: Path) -> tuple[Any, SourceOptions]:
    rows = [(Image.fromarray(picture.pixels), ord(picture.label) / 2) for picture in edited.pictures.values()]
    return Items(rows), SourceOptions(target="number")


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out fsync, which takes time, and which only a crash of the machine would need."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def update_or_convert(
    source: Any,
    out: Path,
    format_name: str,
    options: SourceOptions | None = None,
    anew: bool = False,
    workers: int = 0,
    **settings: Any,
) -> bool:
    """Update `out`, or convert it if it is missing or `anew`; return whether there was anything to do."""
    options = options or SourceOptions()
    splits = {} if options.split else {"splits": "train=0.7,val=0.3"}
    recipe = Recipe(format=format_name, **{"size": 16, "shard_bytes": 3 * 16 * 16 * 3, **splits, **settings})
    conversion = convert(
        source,
        out,
        recipe,
        workers=workers,
        max_rejects=1,
        update=not anew,
        overwrite=anew,
        options=options,
    )
    return conversion.published


class Row(NamedTuple):
    """A stored sample.

    Attributes:
        content: its bytes, its target and its fields.
        place: its shard, and its row there.
    """

    content: tuple[Any, ...]
    place: tuple[str, int]
    id: int
    split: str


def served_rows(out: Path) -> dict[str, Row]:
    """Return the samples that a dataset serves, by path."""
    dataset = open_dataset(out)
    manifest, index = dataset.manifest, dataset.read_index(removed=True)
    read = FORMATS[manifest.recipe.format].read_shard
    samples = (
        (shard, row, sample)
        for shard in manifest.shards
        for row, sample in enumerate(read(dataset.shard_path(shard)))
    )
    rows: dict[str, Row] = {}
    for number, (shard, row, sample) in enumerate(samples):
        if index.served[number]:
            fields = [column.row_value(number) for column in index.fields.values()]
            target: Any = None if index.targets is None else index.targets.row_value(number)
            if manifest.target == "classes":
                target = {manifest.classes[label] for label in target}
            elif manifest.target == "class":
                target = manifest.classes[sample.label]
            content = bytes(sample.data), target, *fields
            rows[str(index.path(number))] = Row(content, (shard.name, row), sample.id, shard.split)
            assert sample.id == index.ids[number]
    assert len(rows) == manifest.samples
    return rows


def sample_contents(out: Path) -> dict[str, tuple[Any, ...]]:
    return {path: row.content for path, row in served_rows(out).items()}


def rejected_paths(out: Path) -> list[str]:
    return sorted(picture.path for picture in open_dataset(out).manifest.rejected)


@pytest.mark.parametrize(
    ("write_source", "seed", "format_name", "fit"),
    [
        pytest.param(plain_tree, 0, "dali", "keep", id="plain_tree"),
        pytest.param(table, 1, "shards", "keep", id="table"),
        pytest.param(table, 1, "shards", "crop", id="table_in_squares"),
        pytest.param(tarred, 2, "webdataset", "keep", id="tarred"),
        pytest.param(converted_tree, 0, "dali", "keep", id="converted_tree"),
        pytest.param(remade_tree, 1, "shards", "keep", id="remade_tree"),
        pytest.param(in_memory, 2, "webdataset", "crop", id="in_memory"),
    ],
)
def test_an_update_serves_the_same_as_a_new_conversion(
    write_source: Callable[[EditedSource, Path], tuple[Any, SourceOptions]],
    seed: int,
    format_name: str,
    fit: str,
    tmp_path: Path,
) -> None:
    """Samples that stay keep their place; new ones get an id that was never used."""
    edited, out = EditedSource(seed), tmp_path / "out"
    source, options = write_source(edited, tmp_path)
    update_or_convert(source, out, format_name, options, fit=fit)
    last_id = -1
    for number in range(ROUNDS):
        before, classes = served_rows(out), open_dataset(out).manifest.classes
        last_id = max(last_id, *(row.id for row in before.values()))
        edited.edit(times=1 + number * 3)
        source, options = write_source(edited, tmp_path)
        update_or_convert(source, out, format_name, options, fit=fit)
        fresh = tmp_path / f"fresh-{number}"
        update_or_convert(source, fresh, format_name, options, fit=fit)
        now, expected = served_rows(out), served_rows(fresh)
        assert sample_contents(out) == sample_contents(fresh)
        assert rejected_paths(out) == rejected_paths(fresh)
        if write_source is converted_tree:
            assert {row.id for row in now.values()} == {row.id for row in served_rows(source).values()}
        for path, row in now.items():
            if write_source is remade_tree:  # the ids of its source change
                continue
            old = before.get(path)
            changes_split = options.split and old and old.split != expected[path].split
            if old and old.content == row.content and not changes_split:
                assert row == old
            else:
                assert row.id > last_id
            assert not options.split or row.split == expected[path].split
        assert open_dataset(out).manifest.classes[: len(classes)] == classes
        assert verify(out) == []
        assert verify_deep(out, source, workers=0).problems == ()
        assert not update_or_convert(source, out, format_name, options, fit=fit)


def test_the_same_updates_write_the_same_shards(tmp_path: Path) -> None:
    """The second dataset is made of a copy of the source, by workers, with another hash seed.

    The files `dataset*` may differ, because they hold the times of the source's files.
    """
    edited, first, copy = EditedSource(0), tmp_path / "first", tmp_path / "copy"
    script = "import sys, pathlib; from tests.precache.conversion.test_update import update_or_convert; "
    script += "update_or_convert(*map(pathlib.Path, sys.argv[1:]), 'shards', workers=2)"
    command = [sys.executable, "-c", script, copy / "tree", tmp_path / "two"]
    environment = {**os.environ, "PYTHONHASHSEED": "2"}  # so that sets have another order
    for _ in range(2):
        for folder in (first, copy):
            plain_tree(edited, folder)
        update_or_convert(first / "tree", tmp_path / "one", "shards")
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        edited.edit(times=6)
    files, other_files = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert files.keys() == other_files.keys()
    different = [name for name in files if files[name] != other_files[name]]
    assert all(name.startswith("dataset") for name in different)
    check_hold_the_same_samples([open_dataset(tmp_path / name) for name in ("one", "two")])


def test_an_id_is_never_used_again(tree: Path, tmp_path: Path) -> None:
    """The highest id, of a picture that an update of its own removed, is not used again, either."""
    out, extra, used = tmp_path / "out", min(tree.iterdir()) / "zzz.jpg", []
    update_or_convert(tree, out, "shards")
    for _ in range(2):
        shutil.copy(next(tree.rglob("*.jpg")), extra)
        update_or_convert(tree, out, "shards")
        used.append(served_rows(out)[str(extra.relative_to(tree))].id)
        extra.unlink()
        update_or_convert(tree, out, "shards")
    assert used == [IMAGES, IMAGES + 1]


def test_an_update_adds_to_the_statistics(tree: Path, tmp_path: Path) -> None:
    update_or_convert(tree, tmp_path / "out", "shards", splits=DEFAULT_SPLITS)
    shutil.copytree(min(tree.iterdir()), tree / "new")
    for name in ("out", "whole"):
        update_or_convert(tree, tmp_path / name, "shards", splits=DEFAULT_SPLITS)
    grown, whole = (open_dataset(tmp_path / name).manifest.statistics["train"] for name in ("out", "whole"))
    assert grown.pixels == whole.pixels
    assert (*grown.mean, *grown.std) == pytest.approx((*whole.mean, *whole.std), abs=1e-9)


def test_an_update_to_an_empty_source_leaves_the_dataset_as_it_is(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    update_or_convert(tree, out, "shards")
    before = contents(out)
    for path in tree.rglob("*.*"):
        if path.is_file():
            path.unlink()
    for culprit in (rf"^{tree}: ", r"broken\.jpg"):  # without a picture, then with a damaged one
        with pytest.raises(PrecacheError, match=culprit):
            update_or_convert(tree, out, "shards")
        assert before.items() <= contents(out).items()
        assert verify(out) == []
        (next(tree.iterdir()) / "broken.jpg").write_bytes(b"\xff\xd8\xff no JPEG")


@pytest.mark.parametrize("target", TARGETS)
def test_an_update_may_keep_no_picture_or_one(target: str, tmp_path: Path) -> None:
    """Samples here have every kind of target, and a field of each kind."""
    out, fresh, table = tmp_path / "out", tmp_path / "fresh", tmp_path / "table.jsonl"
    labels = {} if TARGETS[target] is None else {"label": TARGETS[target]}
    options = SourceOptions(
        image="image",
        label=next(iter(labels), None),
        target="number" if target == "vector" else target,
        fields=tuple(FIELDS),
    )
    for prefixes, anew in (("a" * 24, True), ("b" * 24, False), ("b" + "c" * 23, False)):
        names = [f"{prefix}{row}.bmp" for row, prefix in enumerate(prefixes)]
        for row, name in enumerate(names):
            grey(row).save(tmp_path / name)
        write_jsonl(table, {"image": names, **labels, **FIELDS})
        assert update_or_convert(table, out, "shards", options, anew=anew)
        update_or_convert(table, fresh, "shards", options, anew=True)
        assert sample_contents(out) == sample_contents(fresh)


def test_an_update_never_overwrites_a_file_of_the_user(tree: Path, tmp_path: Path) -> None:
    """The file has a name that an update needs, while another update is unfinished."""
    out, folder = tmp_path / "out", min(tree.iterdir())
    update_or_convert(tree, out, "shards")
    shutil.copytree(folder, tree / "new-1")
    rehearsal = Path(shutil.copytree(out, tmp_path / "rehearsal"))
    with stopping(tmp_path, Stop()) as whole_update:
        update_or_convert(tree, rehearsal, "shards")
    half = Stop(whole_update.count // 2)
    with stopping(tmp_path, half), pytest.raises((KilledError, DatasetError)):  # by the handler that it stops
        update_or_convert(tree, out, "shards")
    assert unfinished_update_names(out)
    shutil.copytree(folder, tree / "new-2")
    update_or_convert(tree, Path(shutil.copytree(out, tmp_path / "copy")), "shards")
    mine = out / max(contents(tmp_path / "copy").keys() - contents(out).keys() - unfinished_update_names(out))
    mine.write_text("mine")
    with pytest.raises(DatasetError, match=mine.name) as raised:
        update_or_convert(tree, out, "shards")
    assert raised.value.path == out
    assert mine.read_text() == "mine"
    mine.unlink()
    update_or_convert(tree, out, "shards")
    assert verify_deep(out, tree, workers=0).problems == ()

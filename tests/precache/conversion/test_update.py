"""Whatever happened to a source: after an update, each picture is served as converting afresh serves it.

Every kind of source is edited at random: pictures come, go, change at the same size, break and are repaired,
get other labels, other masks, none, or one that was missing; rows and members change their order.
"""

import io
import itertools
import os
import shutil
import subprocess
import sys
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
    verify_across,
    verify_deep,
)
from precache.conversion.journal import unfinished_update_names
from precache.errors import DatasetError, PrecacheError
from precache.formats import FORMATS
from precache.recipe import DEFAULT_SPLITS
from tests.command import ROOT
from tests.conftest import IMAGES
from tests.precache.destinations import contents
from tests.precache.sources.archives import Files, make_zip, put
from tests.precache.sources.examples import FIELDS, TARGETS
from tests.precache.sources.objects import Items
from tests.precache.sources.objects import picture as grey
from tests.precache.sources.tables import write_csv, write_jsonl
from tests.stopping import KilledError, Stop, stopping

SHAPE = (18, 20)
ROUNDS = 3
"""Of edits, each followed by an update."""


@dataclass(frozen=True)
class Picture:
    """What `seed` draws; `mask` likewise, 0: it has none. One that is broken has as many bytes."""

    seed: int
    label: str
    mask: int
    broken: bool = False
    written_s: int = 1

    @property
    def pixels(self) -> np.ndarray[Any, Any]:
        return np.random.default_rng(self.seed).integers(0, 256, (*SHAPE, 3), np.uint8)

    @property
    def content(self) -> bytes:
        file = io.BytesIO()
        Image.fromarray(self.pixels).save(file, "BMP")  # any picture takes as many bytes
        return bytes(file.tell()) if self.broken else file.getvalue()


@dataclass
class World:
    """Pictures by their names, in the order in which rows or members are written."""

    seed: int
    pictures: dict[str, Picture] = field(default_factory=dict)
    round: int = 1

    def __post_init__(self) -> None:
        self.rng, self.numbers = np.random.default_rng(self.seed), itertools.count(1)
        for _ in range(8):
            self.add()
        self.edit(times=3)
        self.change(sorted(self.pictures)[1], mask=0)

    def add(self) -> None:
        number = next(self.numbers)
        name = f"{int(self.rng.integers(100)):02}-{number}"
        self.pictures[name] = Picture(number, "ab"[number % 2], number, written_s=self.round)

    def change(self, name: str, **edit: Any) -> None:
        self.pictures[name] = replace(self.pictures[name], **edit)

    def edit(self, times: int) -> None:
        self.round += 1
        if self.round == 3:  # masks that were missing come
            for name, picture in self.pictures.items():
                self.change(name, mask=picture.mask or next(self.numbers))
        for _ in range(times):
            first, *others = sorted(self.pictures)  # one stays: a dataset has pictures
            name, number = str(self.rng.choice(others)), next(self.numbers)
            edits: list[dict[str, Any]] = [
                {"seed": number, "broken": False, "written_s": self.round},
                {"broken": not self.pictures[name].broken, "written_s": self.round},
                {"written_s": self.round},
                {"label": "abc"[number % 3]},
                {"mask": 0},
                {"mask": number},
            ]
            which = int(self.rng.integers(len(edits) + 3))
            if which < len(edits):
                self.change(name, **edits[which])
            elif which == len(edits) and len(others) > 3:
                del self.pictures[name]
            elif which == len(edits) + 1:
                self.add()
            else:
                self.pictures = {name: self.pictures[name] for name in (*self.rng.permutation(others), first)}


def files(world: World) -> Files:
    return {f"{picture.label}/{name}.bmp": picture.content for name, picture in world.pictures.items()}


def plain_tree(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    """The pictures as files, and their masks in a folder beside."""
    shutil.rmtree(folder / "tree", ignore_errors=True)
    shutil.rmtree(folder / "masks", ignore_errors=True)
    put(folder / "tree", files(world))
    for name, picture in world.pictures.items():
        path = Path(picture.label, f"{name}.bmp")
        os.utime(folder / "tree" / path, (picture.written_s, picture.written_s))
        if picture.mask:
            labels = np.random.default_rng(picture.mask).integers(0, 256, SHAPE, np.uint8)
            (folder / "masks" / path).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(labels).save(folder / "masks" / path)
    return folder / "tree", SourceOptions()


def masked_tree(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    return plain_tree(world, folder)[0], SourceOptions(mask=str(folder / "masks"))


def masked_table(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    """Of several classes each, with splits of its own and fields of every kind."""
    plain_tree(world, folder)
    names, pictures = [*files(world)], world.pictures.values()
    columns: dict[str, list[Any]] = {
        "path": [f"tree/{name}" for name in names],
        "mask": [f"masks/{name}" for name in names],
        "label": [f"{picture.label};odd{picture.mask % 3}" for picture in pictures],
        "fold": [["val", "train"][(picture.seed + picture.written_s) % 2] for picture in pictures],
        "width": [picture.mask for picture in pictures],
        "note": [*world.pictures],
        "box": [[[1.5, 2, 3, picture.seed]] * (picture.mask % 3) for picture in pictures],
    }
    write_csv(folder / "t.csv", columns)
    how: dict[str, Any] = {"label": "label", "separator": ";", "target": "classes", "mask": "mask"}
    return folder / "t.csv", SourceOptions(**how, split="fold", fields=("width", "note", "box"))


def zipped(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    """All in one split, which shares divide."""
    path = make_zip(folder / "x.zip", {f"train/{name}": content for name, content in files(world).items()})
    os.utime(path, (world.round, world.round))
    return path, SourceOptions()


def converted_tree(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    """With masks."""
    source, options = masked_tree(world, folder)
    follow(source, folder / "first", "webdataset", options, size=min(SHAPE), fit="keep")
    return folder / "first", SourceOptions()


def remade_tree(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    """Converted anew each time: its ids are of other pictures."""
    follow(plain_tree(world, folder)[0], folder / "first", "shards", anew=True, size=min(SHAPE), fit="keep")
    return folder / "first", SourceOptions()


def in_memory(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    rows = [(Image.fromarray(one.pixels), ord(one.label) / 2) for one in world.pictures.values()]
    return Items(rows), SourceOptions(target="number")


KINDS = {
    made.__name__: made
    for made in (masked_tree, masked_table, zipped, converted_tree, remade_tree, in_memory)
}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the disk: nothing here ends before its time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def follow(
    source: Any,
    out: Path,
    name: str,
    options: SourceOptions | None = None,
    anew: bool = False,
    workers: int = 0,
    **settings: Any,
) -> bool:
    """Update `out`, or make it `anew`; whether there was anything to do."""
    options = options or SourceOptions()
    splits = {} if options.split else {"splits": "train=0.7,val=0.3"}
    recipe = Recipe(format=name, **{"size": 16, "shard_bytes": 3 * 16 * 16 * 3, **splits, **settings})
    how: dict[str, Any] = {"update": not anew, "overwrite": anew, "options": options}
    return convert(source, out, recipe, workers=workers, max_rejects=1, **how).published


class Row(NamedTuple):
    """What is stored of a picture and its mask, its class and its fields; its shard and row there."""

    content: tuple[Any, ...]
    place: tuple[str, int]
    id: int
    split: str


def served(out: Path) -> dict[str, Row]:
    """By path."""
    dataset = open_dataset(out)
    manifest, index = dataset.manifest, dataset.read_index(removed=True)
    read = FORMATS[manifest.recipe.format].read_shard
    samples = (
        (shard, row, sample)
        for shard in manifest.shards
        for row, sample in enumerate(read(dataset.shard_path(shard)))
    )
    found: dict[str, Row] = {}
    for number, (shard, row, sample) in enumerate(samples):
        if index.served[number]:
            fields = [column.value(number) for column in index.fields.values()]
            target: Any = None if index.targets is None else index.targets.value(number)
            if manifest.target == "classes":
                target = {manifest.classes[one] for one in target}
            elif manifest.target == "class":
                target = manifest.classes[sample.label]
            mask = None if sample.mask is None else bytes(sample.mask)
            content = bytes(sample.data), mask, target, *fields
            found[str(index.path(number))] = Row(content, (shard.name, row), sample.id, shard.split)
            assert sample.id == index.ids[number]
    assert len(found) == manifest.samples
    return found


def contents_of(out: Path) -> dict[str, tuple[Any, ...]]:
    return {path: row.content for path, row in served(out).items()}


def rejected(out: Path) -> list[str]:
    return sorted(picture.path for picture in open_dataset(out).manifest.rejected)


@pytest.mark.parametrize(("kind", "seed"), [(kind, number % 3) for number, kind in enumerate(KINDS)])
def test_an_update_serves_the_same_as_a_new_conversion(kind: str, seed: int, tmp_path: Path) -> None:
    """What stays is where it was; what comes has an id that was never used."""
    world, out = World(seed), tmp_path / "out"
    name = sorted(FORMATS)[seed % len(FORMATS)]
    how: dict[str, Any] = {"fit": "keep"} if seed == 1 else {}
    source, options = KINDS[kind](world, tmp_path)
    follow(source, out, name, options, **how)
    last_id = -1
    for number in range(ROUNDS):
        before, classes = served(out), open_dataset(out).manifest.classes
        last_id = max(last_id, *(row.id for row in before.values()))
        world.edit(times=1 + number * 3)
        source, options = KINDS[kind](world, tmp_path)
        follow(source, out, name, options, **how)
        follow(source, afresh := tmp_path / f"afresh-{number}", name, options, **how)
        now, expected = served(out), served(afresh)
        assert contents_of(out) == contents_of(afresh)
        assert rejected(out) == rejected(afresh)
        if kind == "converted_tree":
            assert {row.id for row in now.values()} == {row.id for row in served(source).values()}
        for path, row in now.items() if kind != "remade_tree" else ():
            was = before.get(path)
            moves = options.split and was and was.split != expected[path].split
            if was and was.content == row.content and not moves:
                assert row == was
            else:
                assert row.id > last_id
            assert not options.split or row.split == expected[path].split
        assert open_dataset(out).manifest.classes[: len(classes)] == classes
        assert verify(out) == []
        assert verify_deep(out, source, workers=0).problems == ()
        assert not follow(source, out, name, options, **how)


def test_a_picture_whose_stored_mask_is_damaged_is_rejected(tmp_path: Path) -> None:
    source, options = masked_tree(World(1), tmp_path)
    follow(source, tmp_path / "first", "shards", options)
    victim, stored = next((path, of[1]) for path, of in contents_of(tmp_path / "first").items() if of[1])
    for path in (tmp_path / "first").glob("*.safetensors"):
        damaged = stored[:-20] + bytes([stored[-20] ^ 1]) + stored[-19:]
        path.write_bytes(path.read_bytes().replace(stored, damaged))
    follow(tmp_path / "first", tmp_path / "second", "shards")
    assert rejected(tmp_path / "second") == [victim]


def test_the_same_updates_give_the_same_bytes(tmp_path: Path) -> None:
    world, first, copy = World(0), tmp_path / "first", tmp_path / "copy"
    script = "import sys, pathlib; from tests.precache.conversion.test_update import follow; "
    script += "follow(*map(pathlib.Path, sys.argv[1:]), 'shards', workers=2)"
    command = [sys.executable, "-c", script, copy / "tree", tmp_path / "two"]
    environment = {**os.environ, "PYTHONHASHSEED": "2"}  # sets of our splits have another order
    for _ in range(2):
        for folder in (first, copy):
            plain_tree(world, folder)
        follow(first / "tree", tmp_path / "one", "shards")
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        world.edit(times=6)
    one, two = (contents(tmp_path / out) for out in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(name.startswith("dataset") for name in one if one[name] != two[name])  # times differ
    assert verify_across([tmp_path / "one", tmp_path / "two"]) == []


def test_an_id_is_never_used_again(tree: Path, tmp_path: Path) -> None:
    """Not even the highest one, of a picture that was removed by an update of its own."""
    out, extra, used = tmp_path / "out", min(tree.iterdir()) / "zzz.jpg", []
    follow(tree, out, "shards")
    for _ in range(2):
        shutil.copy(next(tree.rglob("*.jpg")), extra)
        follow(tree, out, "shards")
        used.append(served(out)[str(extra.relative_to(tree))].id)
        extra.unlink()
        follow(tree, out, "shards")
    assert used == [IMAGES, IMAGES + 1]


def test_an_update_adds_to_the_statistics(tree: Path, tmp_path: Path) -> None:
    follow(tree, tmp_path / "out", "shards", splits=DEFAULT_SPLITS)
    shutil.copytree(min(tree.iterdir()), tree / "new")
    for name in ("out", "whole"):
        follow(tree, tmp_path / name, "shards", splits=DEFAULT_SPLITS)
    grown, whole = (open_dataset(tmp_path / name).manifest.statistics["train"] for name in ("out", "whole"))
    assert grown.pixels == whole.pixels
    assert (*grown.mean, *grown.std) == pytest.approx((*whole.mean, *whole.std), abs=1e-9)


def test_an_update_to_an_empty_source_leaves_the_dataset_as_it_is(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    follow(tree, out, "shards")
    before = contents(out)
    for picture in tree.rglob("*.*"):
        picture.is_dir() or picture.unlink()
    for says in ("no class folder with pictures", r"broken\.jpg"):
        with pytest.raises(PrecacheError, match=says):
            follow(tree, out, "shards")
        assert before.items() <= contents(out).items()
        assert verify(out) == []
        (next(tree.iterdir()) / "broken.jpg").write_bytes(b"\xff\xd8\xff no JPEG")


@pytest.mark.parametrize("target", TARGETS)
def test_an_update_may_keep_no_picture_or_one(target: str, tmp_path: Path) -> None:
    """Whatever they are labelled with, and with a field of each kind."""
    out, afresh, table = tmp_path / "out", tmp_path / "afresh", tmp_path / "table.jsonl"
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
        assert follow(table, out, "shards", options, anew=anew)
        follow(table, afresh, "shards", options, anew=True)
        assert contents_of(out) == contents_of(afresh)


def test_an_update_never_overwrites_a_file_of_the_user(tree: Path, tmp_path: Path) -> None:
    """Also where another update is unfinished."""
    out, folder = tmp_path / "out", min(tree.iterdir())
    follow(tree, out, "shards")
    shutil.copytree(folder, tree / "new-1")
    with stopping(tmp_path, Stop(25)), pytest.raises(KilledError):
        follow(tree, out, "shards")
    shutil.copytree(folder, tree / "new-2")
    follow(tree, Path(shutil.copytree(out, tmp_path / "copy")), "shards")
    mine = out / max(contents(tmp_path / "copy").keys() - contents(out).keys() - unfinished_update_names(out))
    mine.write_text("mine")
    with pytest.raises(DatasetError, match=f"not part of the dataset.*{mine.name}"):
        follow(tree, out, "shards")
    assert mine.read_text() == "mine"
    mine.unlink()
    follow(tree, out, "shards")
    assert verify_deep(out, tree, workers=0).problems == ()

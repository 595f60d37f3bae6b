"""Whatever happened to a source: after an update, each picture is served as converting afresh serves it.

Every kind of source is edited at random: pictures come, go, change at the same size, break and are repaired,
get other labels, other masks, none, or one that was missing; rows and members change their order.
"""

import io
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from precache import Recipe, SourceOptions, convert, open_dataset, verify, verify_deep
from precache.errors import DatasetError
from precache.formats import FORMATS
from precache.recipe import DEFAULT_SPLITS
from tests.precache.sources.objects import Items
from tests.precache.sources.tables import WRITERS

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
    rng: np.random.Generator = field(init=False)
    pictures: dict[str, Picture] = field(default_factory=dict)
    drawn: int = 0
    round: int = 1

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        for _ in range(8):
            self.add()
        self.edit(times=3)
        victim = sorted(self.pictures)[1]
        self.pictures[victim] = replace(self.pictures[victim], mask=0)

    def next(self) -> int:
        self.drawn += 1
        return self.drawn

    def add(self) -> None:
        number = self.next()
        name = f"{int(self.rng.integers(100)):02}-{number}"
        self.pictures[name] = Picture(number, "ab"[number % 2], number, written_s=self.round)

    def edit(self, times: int) -> None:
        self.round += 1
        if self.round == 3:  # masks that were missing come
            self.pictures = {
                name: replace(picture, mask=picture.mask or self.next())
                for name, picture in self.pictures.items()
            }
        for _ in range(times):
            first, *others = sorted(self.pictures)  # one stays: a dataset has pictures
            name = str(self.rng.choice(others))
            was = self.pictures[name]
            number = self.next()
            edits: list[dict[str, Any]] = [
                {"seed": number, "broken": False, "written_s": self.round},
                {"broken": not was.broken, "written_s": self.round},
                {"written_s": self.round},
                {"label": "abc"[number % 3]},
                {"mask": 0},
                {"mask": number},
            ]
            which = int(self.rng.integers(len(edits) + 3))
            if which < len(edits):
                self.pictures[name] = replace(was, **edits[which])
            elif which == len(edits) and len(others) > 3:
                del self.pictures[name]
            elif which == len(edits) + 1:
                self.add()
            else:
                self.pictures = {name: self.pictures[name] for name in (*self.rng.permutation(others), first)}


def write_files(world: World, folder: Path, name_of: Callable[[str, Picture], str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, picture in world.pictures.items():
        path = folder / name_of(name, picture)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture.content)
        os.utime(path, (picture.written_s, picture.written_s))


def write_masks(world: World, folder: Path, name_of: Callable[[str, Picture], str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, picture in world.pictures.items():
        if picture.mask:
            path = (folder / name_of(name, picture)).with_suffix(".bmp")
            path.parent.mkdir(parents=True, exist_ok=True)
            labels = np.random.default_rng(picture.mask).integers(0, 256, SHAPE, np.uint8)
            Image.fromarray(labels).save(path)


def in_class(name: str, picture: Picture) -> str:
    return f"{picture.label}/{name}.bmp"


def alone(name: str, picture: Picture) -> str:
    return f"{name}.bmp"


def tree(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    write_files(world, folder / "tree", in_class)
    return folder / "tree", SourceOptions()


def masked_tree(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    write_masks(world, folder / "masks", in_class)
    return tree(world, folder)[0], SourceOptions(mask=str(folder / "masks"))


def table(world: World, folder: Path, suffix: str = "csv") -> tuple[Any, SourceOptions]:
    write_files(world, folder / "pictures", alone)
    pictures = world.pictures
    columns = {
        "path": [f"{name}.bmp" for name in pictures],
        "label": [picture.label for picture in pictures.values()],
        "note": [f"{name} {picture.label}" for name, picture in pictures.items()],
        "mask": [f"../masks/{name}.bmp" for name in pictures],
    }
    WRITERS[suffix](folder / f"t.{suffix}", columns)
    named = SourceOptions(root=str(folder / "pictures"), label="label", fields=("note",))
    return folder / f"t.{suffix}", named


def masked_table(world: World, folder: Path, suffix: str = "csv") -> tuple[Any, SourceOptions]:
    write_masks(world, folder / "masks", alone)
    source, options = table(world, folder, suffix)
    return source, replace(options, mask="mask")


def folded_table(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    """With splits of its own, and fields of every kind."""
    source, options = table(world, folder)
    pictures = list(world.pictures.values())
    columns = {
        "path": [f"{name}.bmp" for name in world.pictures],
        "label": [picture.label for picture in pictures],
        "fold": [["val", "train"][picture.seed % 2] for picture in pictures],
        "width": [picture.mask for picture in pictures],
        "box": [[[1.5, 2, 3, picture.seed]] * (picture.mask % 3) for picture in pictures],
    }
    WRITERS["csv"](source, columns)
    return source, replace(options, split="fold", fields=("width", "box"))


def table_of_several(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    """Of several classes each."""
    source, options = table(world, folder)
    columns = {
        "path": [f"{name}.bmp" for name in world.pictures],
        "label": [f"{picture.label};odd{picture.mask % 3}" for picture in world.pictures.values()],
    }
    WRITERS["csv"](source, columns)
    return source, replace(options, separator=";", target="classes", fields=())


def table_of_numbers(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    """To be predicted."""
    source, options = table(world, folder)
    columns = {
        "path": [f"{name}.bmp" for name in world.pictures],
        "label": [(picture.mask + ord(picture.label)) / 4 for picture in world.pictures.values()],
    }
    WRITERS["csv"](source, columns)
    return source, replace(options, target="number", fields=())


def masked_parquet(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    return masked_table(world, folder, "parquet")


def tar(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    with tarfile.open(folder / "pictures.tar", "w") as file:
        for name, picture in world.pictures.items():
            _put(file, in_class(name, picture), picture.content)
    os.utime(folder / "pictures.tar", (world.round, world.round))
    return folder / "pictures.tar", SourceOptions()


def _put(file: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    file.addfile(member, io.BytesIO(content))


def zipped(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    """What is broken has a wrong CRC: it cannot even be read."""
    path = folder / "pictures.zip"
    with zipfile.ZipFile(path, "w") as file:
        for name, picture in world.pictures.items():
            file.writestr(in_class(name, picture), replace(picture, broken=False).content)
    content = path.read_bytes()
    for picture in world.pictures.values():
        if picture.broken:
            whole = replace(picture, broken=False).content
            content = content.replace(whole, whole[:-1] + bytes([whole[-1] ^ 1]))
    path.write_bytes(content)
    os.utime(path, (world.round, world.round))
    return path, SourceOptions()


def webdataset(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    tars = folder / "tars"
    tars.mkdir(exist_ok=True)
    names = list(world.pictures)
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        with tarfile.open(tars / f"{number}.tar", "w") as file:
            for name in part:
                _put(file, f"{name}.bmp", world.pictures[name].content)
                _put(file, f"{name}.cls", world.pictures[name].label.encode())
        os.utime(tars / f"{number}.tar", (world.round, world.round))
    return tars, SourceOptions()


def in_memory(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    pictures = world.pictures.values()
    rows = [(Image.fromarray(picture.pixels), ord(picture.label)) for picture in pictures]
    return Items(rows), SourceOptions()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the disk: nothing here ends before its time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


SOURCES = (
    tree, masked_tree, table, masked_table, masked_parquet, folded_table, table_of_several, table_of_numbers,
    tar, zipped, webdataset, in_memory,
)  # fmt: skip
KINDS = {made.__name__: made for made in SOURCES}


def change(source: Any, out: Path, options: SourceOptions, name: str, **settings: Any) -> bool:
    """Follow `source`; whether there was anything to do."""
    splits = {} if options.split else {"splits": "train=0.7,val=0.3"}
    recipe = Recipe(format=name, **{"size": 16, "shard_bytes": 3 * 16 * 16 * 3, **splits, **settings})
    return convert(source, out, recipe, workers=0, update=True, max_rejects=1, options=options).published


def update(source: Any, out: Path, options: SourceOptions, name: str, **settings: Any) -> None:
    """As `change`; what it gives is what it says."""
    change(source, out, options, name, **settings)
    assert verify(out) == []
    assert verify_deep(out, source, workers=0).problems == ()


def served(out: Path) -> dict[str, tuple[Any, ...]]:
    """Path -> what is stored of the picture and of its mask, its class and its fields."""
    dataset = open_dataset(out)
    manifest, index = dataset.manifest, dataset.read_index(removed=True)
    read = FORMATS[manifest.recipe.format].read_shard
    samples = (sample for shard in manifest.shards for sample in read(dataset.shard_path(shard)))
    found: dict[str, tuple[Any, ...]] = {}
    for row, sample in enumerate(samples):
        if index.served[row]:
            fields = [column.value(row) for column in index.fields.values()]
            target: Any = None if index.targets is None else index.targets.value(row)
            if manifest.target == "classes":
                target = {manifest.classes[number] for number in target}
            elif manifest.target == "class":
                target = manifest.classes[sample.label]
            mask = None if sample.mask is None else bytes(sample.mask)
            found[str(index.path(row))] = (
                bytes(sample.data), mask, target, *fields
            )  # fmt: skip
            assert sample.id == index.ids[row]
    assert len(found) == manifest.samples
    return found


def ids(out: Path) -> dict[str, int]:
    index = open_dataset(out).read_index()
    return {str(index.path(row)): int(index.ids[row]) for row in range(len(index))}


def split_of(out: Path) -> dict[str, str]:
    dataset = open_dataset(out)
    indexes = {split: dataset.read_index(split) for split in dataset.manifest.split_samples}
    return {str(index.path(row)): split for split, index in indexes.items() for row in range(len(index))}


def rejected(out: Path) -> list[str]:
    return sorted(picture.path for picture in open_dataset(out).manifest.rejected)


@pytest.mark.parametrize(("kind", "seed"), [(kind, number % 3) for number, kind in enumerate(KINDS)])
def test_an_update_serves_what_converting_afresh_serves(kind: str, seed: int, tmp_path: Path) -> None:
    world, out = World(seed), tmp_path / "out"
    name = sorted(FORMATS)[seed % len(FORMATS)]
    source, options = KINDS[kind](world, tmp_path)
    how: dict[str, Any] = {"fit": "keep"} if seed == 1 else {}
    update(source, out, options, name, **how)
    for number in range(ROUNDS):
        before, ids_before = served(out), ids(out)
        world.edit(times=1 + number * 3)
        source, options = KINDS[kind](world, tmp_path)
        update(source, out, options, name, **how)
        afresh = tmp_path / f"afresh-{number}"
        change(source, afresh, options, name, **how)
        now, ids_now = served(out), ids(out)
        assert now == served(afresh)
        assert rejected(out) == rejected(afresh)
        stay = [path for path in before if now.get(path) == before[path]]
        assert {path: ids_now[path] for path in stay} == {path: ids_before[path] for path in stay}
        assert not change(source, out, options, name, **how)
        assert not options.split or split_of(out) == split_of(afresh)


@pytest.mark.parametrize(
    ("name", "masks", "seed"),
    [("dali", "none", 0), ("dali", "stored", 1), ("shards", "stored", 0), ("shards", "beside", 1),
     ("webdataset", "none", 1), ("webdataset", "beside", 0)],
)  # fmt: skip
def test_what_is_made_from_a_dataset_follows_its_updates(
    name: str, masks: str, seed: int, tmp_path: Path
) -> None:
    """Whether each of them is followed, or several at once: the ids are the same ones."""
    world, first, second = World(seed), tmp_path / "first", tmp_path / "second"
    onto = sorted(FORMATS)[seed % len(FORMATS)]
    for number in range(ROUNDS):
        for _ in range(1 + number % 2):
            source, options = (tree if masks == "none" else masked_tree)(world, tmp_path)
            beside = options if masks == "beside" else SourceOptions()
            stored = SourceOptions() if beside.mask else options
            update(source, first, stored, name, size=min(SHAPE), fit="keep")
            world.edit(times=4)
        afresh = tmp_path / f"afresh-{number}"
        update(first, second, beside, onto, splits=DEFAULT_SPLITS)
        change(first, afresh, beside, onto, splits=DEFAULT_SPLITS)
        assert served(second) == served(afresh)
        if masks != "beside":  # a mask there is changed behind the first one's back, and ids are used once
            assert ids(second) == ids(first)
        assert rejected(second) == rejected(afresh)
        assert not change(first, second, beside, onto, splits=DEFAULT_SPLITS)


def test_a_dataset_that_was_made_anew_is_followed_too(tmp_path: Path) -> None:
    """Its ids are those of other pictures now: all is served, and nothing is done again and again."""
    world, first, second = World(1), tmp_path / "first", tmp_path / "second"
    for number in range(ROUNDS):
        source, _ = tree(world, tmp_path)
        recipe = Recipe(format="shards", size=16)
        convert(source, first, recipe, workers=0, overwrite=True, max_rejects=1)
        update(first, second, SourceOptions(), "shards")
        change(first, tmp_path / f"afresh-{number}", SourceOptions(), "shards")
        assert served(second) == served(tmp_path / f"afresh-{number}")
        assert not change(first, second, SourceOptions(), "shards")
        world.edit(times=5)


@pytest.mark.parametrize("masked_first", [False, True])
def test_masks_that_a_dataset_got_or_lost_are_refused_by_name(masked_first: bool, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for made in (masked_tree, tree) if masked_first else (tree, masked_tree):
        source, options = made(World(1), tmp_path)
        recipe = Recipe(format="shards", size=16)
        convert(source, first, recipe, workers=0, overwrite=True, max_rejects=1, options=options)
        if not second.exists():
            update(first, second, SourceOptions(), "webdataset")
    before = served(second)
    has = "has masks, but .*first now has none" if masked_first else "has no masks, but .*first now has some"
    with pytest.raises(DatasetError, match=f"second: {has}; convert it again with --overwrite"):
        update(first, second, SourceOptions(), "webdataset")
    assert served(second) == before


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_mask_that_was_damaged_where_it_is_stored_is_a_reject(name: str, tmp_path: Path) -> None:
    source, options = masked_tree(World(1), tmp_path)
    change(source, tmp_path / "first", options, name)
    whole = served(tmp_path / "first")
    dataset = open_dataset(tmp_path / "first")
    victim, stored = next((path, of[1]) for path, of in whole.items() if of[1])
    for shard in dataset.manifest.shards:
        content = dataset.shard_path(shard).read_bytes()
        damaged = stored[:-20] + bytes([stored[-20] ^ 1]) + stored[-19:]
        dataset.shard_path(shard).write_bytes(content.replace(stored, damaged))
    change(tmp_path / "first", tmp_path / "second", SourceOptions(), "shards")
    assert rejected(tmp_path / "second") == [victim]
    assert served(tmp_path / "second").keys() == whole.keys() - {victim}


def test_a_list_of_splits_is_followed_whatever_splits_the_source_has(tmp_path: Path) -> None:
    world, first, second = World(1), tmp_path / "first", tmp_path / "second"
    for _ in range(2):
        source, options = tree(world, tmp_path)
        change(source, first, options, "shards")
        lines = [f"{path},{'xy'[number % 2]}\n" for path, number in sorted(ids(first).items())[1:]]
        (tmp_path / "list.csv").write_text("".join(lines))
        recipe = Recipe(format="shards", size=16)
        split_list = tmp_path / "list.csv"
        convert(first, second, recipe, workers=0, update=True, max_rejects=1, split_list=split_list)
        assert verify_deep(second, first, workers=0).problems == ()
        assert len(served(second)) == len(lines)
        world.edit(times=4)

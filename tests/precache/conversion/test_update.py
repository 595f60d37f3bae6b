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
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from precache import (
    Conversion,
    Recipe,
    SourceOptions,
    convert,
    export,
    open_dataset,
    verify,
    verify_across,
    verify_deep,
)
from precache.conversion.journal import unfinished_names
from precache.errors import DatasetError, PrecacheError, SourceError
from precache.formats import FORMATS
from precache.recipe import DEFAULT_SPLITS
from tests.command import ROOT
from tests.conftest import IMAGES, small_recipe
from tests.precache.destinations import contents
from tests.precache.sources.archives import Files, make_tar, make_zip, put
from tests.precache.sources.objects import Items
from tests.precache.sources.tables import WRITERS
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
        if not self.pictures:
            for _ in range(8):
                self.add()
            self.edit(times=3)
            victim = sorted(self.pictures)[1]
            self.pictures[victim] = replace(self.pictures[victim], mask=0)

    def add(self) -> None:
        number = next(self.numbers)
        name = f"{int(self.rng.integers(100)):02}-{number}"
        self.pictures[name] = Picture(number, "ab"[number % 2], number, written_s=self.round)

    def edit(self, times: int) -> None:
        self.round += 1
        if self.round == 3:  # masks that were missing come
            for name, picture in self.pictures.items():
                self.pictures[name] = replace(picture, mask=picture.mask or next(self.numbers))
        for _ in range(times):
            first, *others = sorted(self.pictures)  # one stays: a dataset has pictures
            name, number = str(self.rng.choice(others)), next(self.numbers)
            was = self.pictures[name]
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


def files(world: World) -> Files:
    return {f"{picture.label}/{name}.bmp": picture.content for name, picture in world.pictures.items()}


def written(world: World, folder: Path) -> Path:
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
    return folder / "tree"


def tree(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    return written(world, folder), SourceOptions()


def masked_tree(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    return written(world, folder), SourceOptions(mask=str(folder / "masks"))


def table(world: World, folder: Path, suffix: str, **columns: list[Any]) -> Path:
    written(world, folder)
    WRITERS[suffix](folder / f"t.{suffix}", {"path": [f"tree/{name}" for name in files(world)], **columns})
    return folder / f"t.{suffix}"


def masked_table(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    """Of several classes each."""
    pictures, masks = world.pictures.values(), [f"masks/{name}" for name in files(world)]
    labels = [f"{picture.label};odd{picture.mask % 3}" for picture in pictures]
    named = SourceOptions(label="label", separator=";", target="classes", fields=("note",), mask="mask")
    return table(world, folder, "parquet", label=labels, note=[*world.pictures], mask=masks), named


def folded_table(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    """With splits of its own, fields of every kind, and numbers to be predicted."""
    pictures = world.pictures.values()
    columns: dict[str, list[Any]] = {
        "label": [(picture.mask + ord(picture.label)) / 4 for picture in pictures],
        "fold": [["val", "train"][(picture.seed + picture.written_s) % 2] for picture in pictures],
        "width": [picture.mask for picture in pictures],
        "box": [[[1.5, 2, 3, picture.seed]] * (picture.mask % 3) for picture in pictures],
    }
    named = SourceOptions(label="label", split="fold", fields=("width", "box"), target="number")
    return table(world, folder, "csv", **columns), named


def zipped(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    """What is broken has a wrong CRC: it cannot even be read."""
    whole = {name: replace(picture, broken=False) for name, picture in world.pictures.items()}
    path = make_zip(folder / "x.zip", files(replace(world, pictures=whole)), zipfile.ZIP_STORED)
    content = path.read_bytes()
    for name, picture in world.pictures.items():
        if picture.broken:
            right = whole[name].content
            content = content.replace(right, right[:-1] + bytes([right[-1] ^ 1]))
    path.write_bytes(content)
    os.utime(path, (world.round, world.round))
    return path, SourceOptions()


def webdataset(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    (folder / "tars").mkdir(exist_ok=True)
    names = list(world.pictures)
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        members: Files = {}
        for name in part:
            members[f"{name}.bmp"] = world.pictures[name].content
            members[f"{name}.cls"] = world.pictures[name].label.encode()
        path = make_tar(folder / f"tars/{number}.tar", members)
        os.utime(path, (world.round, world.round))
    return folder / "tars", SourceOptions()


def in_memory(world: World, folder: Path) -> tuple[Any, SourceOptions]:
    rows = [(Image.fromarray(one.pixels), ord(one.label)) for one in world.pictures.values()]
    return Items(rows), SourceOptions()


KINDS = {
    made.__name__: made for made in (masked_tree, masked_table, folded_table, zipped, webdataset, in_memory)
}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the disk: nothing here ends before its time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


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
            found[str(index.path(row))] = bytes(sample.data), mask, target, *fields
            assert sample.id == index.ids[row]
    assert len(found) == manifest.samples
    return found


def ids(out: Path) -> dict[str, int]:
    return {path: place[-1] for path, place in places(out).items()}


def places(out: Path) -> dict[str, tuple[str, int, int]]:
    """Path -> shard, row and id."""
    dataset = open_dataset(out)
    index, shards = dataset.read_index(removed=True), dataset.manifest.shards
    rows = [(shard.name, row) for shard in shards for row in range(shard.samples)]
    served = np.flatnonzero(index.served).tolist()
    return {str(index.path(row)): (*rows[row], int(index.ids[row])) for row in served}


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
    used = [-1]
    for number in range(ROUNDS):
        before, places_before, classes = served(out), places(out), open_dataset(out).manifest.classes
        splits = split_of(out)
        used += [place[-1] for place in places_before.values()]
        world.edit(times=1 + number * 3)
        source, options = KINDS[kind](world, tmp_path)
        update(source, out, options, name, **how)
        afresh = tmp_path / f"afresh-{number}"
        change(source, afresh, options, name, **how)
        now, places_now = served(out), places(out)
        assert now == served(afresh)
        assert rejected(out) == rejected(afresh)
        stay = {path for path in before if now.get(path) == before[path]}
        stay &= {
            path for path, split in split_of(afresh).items() if not options.split or split == splits.get(path)
        }
        moved = {path for path, place in places_before.items() if places_now.get(path) != place}
        assert not stay & moved
        assert all(place[-1] > max(used) for path, place in places_now.items() if path not in stay)
        assert open_dataset(out).manifest.classes[: len(classes)] == classes
        assert not change(source, out, options, name, **how)
        assert not options.split or split_of(out) == split_of(afresh)


@pytest.mark.parametrize(
    ("name", "masks", "seed"), [("dali", "none", 0), ("shards", "stored", 1), ("webdataset", "beside", 0)]
)
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
    export(first, tmp_path / "exported", workers=0)
    written = [path for path in tmp_path.rglob("exported/**/*.*") if path.suffix in (".png", ".jpg")]
    names = [Path(path).stem for path in served(first)]
    assert sorted({path.stem for path in written}) == sorted(names)


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


def test_a_mask_that_was_damaged_where_it_is_stored_is_a_reject(tmp_path: Path) -> None:
    source, options = masked_tree(World(1), tmp_path)
    change(source, tmp_path / "first", options, "shards")
    whole, dataset = served(tmp_path / "first"), open_dataset(tmp_path / "first")
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


# By hand.


def on(tree: Path, out: Path, workers: int = 0) -> Conversion:
    """Follow a tree of 70 pictures."""
    recipe = small_recipe("shards", splits="train=0.8,val=0.2")
    return convert(tree, out, recipe, workers=workers, update=True, max_rejects=0.5)


def grow(tree: Path, times: int) -> None:
    """Another way each time: a picture gone, one changed, one broken, a new class."""
    classes = sorted(path for path in tree.iterdir() if path.is_dir())
    pictures = sorted(path for path in classes[0].iterdir() if path.suffix == ".jpg")
    pictures[0].unlink()
    shutil.copy(sorted(classes[1].iterdir())[0], pictures[1])
    (classes[0] / f"broken-{times}.jpg").write_bytes(b"\xff\xd8\xff" + bytes(times))
    shutil.copytree(classes[1], tree / f"00{times}.new")


def test_the_same_history_gives_the_same_bytes_whatever_workers_copies_and_hashes(
    raw_tree: Path, tmp_path: Path
) -> None:
    for name in ("first", "copy"):
        shutil.copytree(raw_tree, tmp_path / name)
    script = "import sys; from pathlib import Path; from tests.precache.conversion.test_update import on; "
    script += "on(Path(sys.argv[1]), Path(sys.argv[2]), workers=2)"
    command = [sys.executable, "-c", script, tmp_path / "copy", tmp_path / "two"]
    environment = {**os.environ, "PYTHONHASHSEED": "2"}  # sets of our splits have another order
    for times in range(2):
        for name in ("first", "copy") if times else ():
            grow(tmp_path / name, times)
        on(tmp_path / "first", tmp_path / "one")
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    one, two = (contents(tmp_path / out) for out in ("one", "two"))
    times_differ = {name for name in one if name.startswith("dataset")}
    assert one.keys() == two.keys()
    assert {name for name in one if one[name] != two[name]} <= times_differ
    assert open_dataset(tmp_path / "one").digest == open_dataset(tmp_path / "two").digest
    assert verify_across([tmp_path / "one", tmp_path / "two"]) == []


def test_an_id_is_never_used_again(raw_tree: Path, tmp_path: Path) -> None:
    tree, out = Path(shutil.copytree(raw_tree, tmp_path / "tree")), tmp_path / "out"
    extra = min(tree.iterdir()) / "zzz.jpg"
    used = []
    on(tree, out)
    for _ in range(3):
        shutil.copy(next(tree.rglob("*.jpg")), extra)
        on(tree, out)
        used.append(ids(out)[str(extra.relative_to(tree))])
        extra.unlink()
        on(tree, out)
    assert used == [IMAGES, IMAGES + 1, IMAGES + 2]


def test_statistics_grow_with_what_is_stored(raw_tree: Path, tmp_path: Path) -> None:
    less, recipe = Path(shutil.copytree(raw_tree, tmp_path / "less")), small_recipe("shards")
    for picture in sorted(path for path in less.rglob("*.*") if path.is_file())[::2]:
        picture.unlink()
    convert(less, tmp_path / "out", recipe, workers=0)
    convert(raw_tree, tmp_path / "whole", recipe, workers=0)
    grown = convert(raw_tree, tmp_path / "out", recipe, workers=0, update=True).manifest.statistics["train"]
    whole = open_dataset(tmp_path / "whole").manifest.statistics["train"]
    assert grown.pixels == whole.pixels
    assert (*grown.mean, *grown.std) == pytest.approx((*whole.mean, *whole.std), abs=1e-9)


def test_a_source_that_lost_everything_leaves_the_dataset_as_it_is(raw_tree: Path, tmp_path: Path) -> None:
    tree, out = Path(shutil.copytree(raw_tree, tmp_path / "tree")), tmp_path / "out"
    on(tree, out)
    before = contents(out)
    for picture in tree.rglob("*.*"):
        picture.is_dir() or picture.unlink()
    with pytest.raises(SourceError, match="no class folder with pictures"):
        on(tree, out)
    assert contents(out) == before
    (next(tree.iterdir()) / "broken.jpg").write_bytes(b"\xff\xd8\xff no JPEG")
    with pytest.raises(DatasetError, match=r"broken\.jpg"):
        convert(tree, out, small_recipe("shards", splits="train=0.8,val=0.2"), update=True, max_rejects=1)
    assert before.items() <= contents(out).items()
    assert verify(out) == []


def test_a_file_under_a_name_that_an_update_needs_is_not_overwritten(raw_tree: Path, tmp_path: Path) -> None:
    """Also where another update is unfinished."""
    tree, out = Path(shutil.copytree(raw_tree, tmp_path / "tree")), tmp_path / "out"
    on(tree, out)
    grow(tree, 1)
    with stopping(tmp_path, Stop(25)), pytest.raises(KilledError):
        on(tree, out)
    grow(tree, 2)
    planned = unfinished_names(out)
    assert planned
    shutil.copytree(out, tmp_path / "copy")
    on(tree, tmp_path / "copy")
    mine = out / max(contents(tmp_path / "copy").keys() - contents(out).keys() - planned)
    mine.write_text("mine")
    with pytest.raises(DatasetError, match=f"not part of the dataset.*{mine.name}"):
        on(tree, out)
    assert mine.read_text() == "mine"
    mine.rename(tmp_path / mine.name)
    on(tree, out)
    assert verify_deep(out, tree, workers=0).problems == ()


def test_another_kind_of_source_is_refused_by_name(tmp_path: Path) -> None:
    def follow(cells: str, **options: Any) -> None:
        rows = "".join(f"{row}.png,{cell},x{row}\n" for row, cell in enumerate(cells.split()))
        (tmp_path / "t.csv").write_text(f"path,width,name\n{rows}")
        named = {"fields": ("width",), "target": "none", "update": True, **options}
        convert(tmp_path / "t.csv", tmp_path / "out", small_recipe("shards"), workers=0, **named)

    for row in range(3):
        Image.new("RGB", (9, 9), (row, 0, 0)).save(tmp_path / f"{row}.png")
    follow("1 2")
    for cells, options, says in (
        ("1 2 3", {"fields": ("name",)}, r"fields \['width'\], asked for \['name'\]"),
        ("a b c", {}, r"its 'width' is int, but in .* it is now text"),
        ("1 2", {"overwrite": True}, "update and overwrite"),
    ):
        with pytest.raises(PrecacheError, match=says):
            follow(cells, **options)
    source, options = masked_tree(World(1), tmp_path)
    change(source, tmp_path / "first", options, "shards")
    change(tmp_path / "first", tmp_path / "second", SourceOptions(), "webdataset")
    convert(source, tmp_path / "first", Recipe(format="shards", size=16), overwrite=True, max_rejects=1)
    with pytest.raises(DatasetError, match=r"second: has masks, but .*first now has none; .*--overwrite"):
        update(tmp_path / "first", tmp_path / "second", SourceOptions(), "webdataset")

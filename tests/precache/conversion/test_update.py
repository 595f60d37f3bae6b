"""A source that grew or lost pictures: what stays keeps its place; the same history gives the same bytes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from precache import convert, open_dataset, verify, verify_across, verify_deep
from precache.conversion.export import export
from precache.conversion.journal import unfinished_names
from precache.errors import DatasetError, SourceError
from precache.sources import SourceOptions
from tests.command import ROOT
from tests.conftest import IMAGES, small_recipe
from tests.precache.conversion.updating import BROKEN, grow, interrupt, places, stored, update
from tests.precache.destinations import contents


@pytest.mark.parametrize("name", ["shards", "webdataset"])
def test_what_stays_keeps_shard_row_id_and_label_and_what_is_new_comes_behind(
    tree: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    update(tree, out, name)
    before, pixels, classes = places(out), stored(out), open_dataset(out).manifest.classes
    grow(tree, 0)  # its new class is the first one by name
    result = update(tree, out, name)
    after = places(out)
    stays = before.keys() & after.keys()
    assert {key: after[key] for key in stays} == {key: before[key] for key in stays}
    assert len(before) - len(stays) == 2 == sum(result.manifest.removed.values())
    assert result.manifest.classes == (*classes, "000.new")
    new = sorted(after.keys() - stays)
    assert result.converted == len(new) == result.manifest.updates[-1].added
    broken = [rejected.id for rejected in result.manifest.rejected]
    assert sorted([*(after[key][2] for key in new), *broken]) == list(range(IMAGES, IMAGES + len(new) + 1))
    assert [after[key][2] for key in new] == sorted(after[key][2] for key in new)  # by their paths
    now = stored(out)
    assert all(now[after[key][2]] == pixels[before[key][2]] for key in stays)
    assert verify(out) == []
    assert verify_deep(out, tree, workers=0).problems == ()
    assert result.manifest.samples == len(after) == verify_deep(out, tree, workers=0).samples


def test_the_same_history_gives_the_same_bytes_whatever_workers_copies_and_hashes(
    tree: Path, tmp_path: Path
) -> None:
    shutil.copytree(tree, tmp_path / "copy")
    script = "import sys; from tests.precache.conversion.updating import update; "
    script += "from pathlib import Path; update(Path(sys.argv[1]), Path(sys.argv[2]), workers=2)"
    command = [sys.executable, "-c", script, tmp_path / "copy", tmp_path / "two"]
    environment = {**os.environ, "PYTHONHASHSEED": "2"}  # sets of our splits have another order
    for times in range(2):
        for source in (tree, tmp_path / "copy") if times else ():
            grow(source, times)
        update(tree, tmp_path / "one")
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    one, two = (contents(tmp_path / out) for out in ("one", "two"))
    times_differ = {name for name in one if name.startswith("dataset")}
    assert one.keys() == two.keys()
    assert {name for name in one if one[name] != two[name]} <= times_differ
    assert open_dataset(tmp_path / "one").digest == open_dataset(tmp_path / "two").digest
    assert verify_across([tmp_path / "one", tmp_path / "two"]) == []


def test_an_id_is_never_used_again(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    update(tree, out)
    extra = tree / sorted(os.listdir(tree))[0] / "zzz.jpg"
    used = []
    for number in range(3):
        shutil.copy(next(tree.rglob("*.jpg")), extra)
        update(tree, out)
        used += [place[2] for key, place in places(out).items() if key[0].endswith("zzz.jpg")]
        extra.unlink()
        assert len(open_dataset(out).manifest.updates) == 2 * number + 1
        update(tree, out)
    assert used == [IMAGES, IMAGES + 1, IMAGES + 2]


def test_folders_of_splits_say_where_a_new_picture_belongs(tree: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    for split in ("train", "val"):
        shutil.copytree(tree, source / split)
    update(source, out, splits="train=1")
    added = next((source / "val").rglob("*.jpg"))
    shutil.copy(added, added.with_name("zzz.jpg"))
    result = update(source, out, splits="train=1")
    assert [shard.split for shard in result.manifest.shards[-1:]] == ["val"]
    assert len(open_dataset(out).read_index("val")) == IMAGES + 1


def test_a_source_that_lost_everything_leaves_the_dataset_as_it_is(tree: Path, tmp_path: Path) -> None:
    update(tree, tmp_path / "out")
    before = contents(tmp_path / "out")
    for picture in tree.rglob("*.*"):
        picture.is_dir() or picture.unlink()
    with pytest.raises(SourceError, match="no class folder with pictures"):
        update(tree, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    (next(tree.iterdir()) / "broken.jpg").write_bytes(BROKEN)
    with pytest.raises(DatasetError, match=r"broken\.jpg"):
        convert(
            tree,
            tmp_path / "out",
            small_recipe("shards", splits="train=0.8,val=0.2"),
            workers=0,
            update=True,
            max_rejects=1,
        )
    now = contents(tmp_path / "out")
    assert {name: now[name] for name in before} == before
    assert verify(tmp_path / "out") == []


def test_verify_deep_notices_a_source_that_went_on(tree: Path, tmp_path: Path) -> None:
    update(tree, tmp_path / "out")
    grow(tree, 1)
    update(tree, tmp_path / "out")
    picture = sorted(tree.rglob("*.jpg"))[-1]
    picture.rename(picture.with_name("other.jpg"))
    with pytest.raises(DatasetError, match="changed since"):
        verify_deep(tmp_path / "out", tree, workers=0)


def test_what_other_software_adds_is_said_and_recorded(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    before = update(tree, out).manifest.made_by
    grow(tree, 1)
    monkeypatch.setattr("precache.conversion.update.made_by", lambda: {**before, "pillow": "99"})
    manifest = update(tree, out).manifest
    assert (manifest.made_by, manifest.updates[0].made_by) == (before, {**before, "pillow": "99"})
    assert "was made with other versions of pillow; " in caplog.text


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_file_under_a_name_that_an_update_needs_is_not_overwritten(
    tree: Path, tmp_path: Path, unfinished: bool
) -> None:
    out = tmp_path / "out"
    update(tree, out)
    grow(tree, 1)
    if unfinished:
        interrupt(tree, out)
        grow(tree, 2)
    planned = unfinished_names(out)
    shutil.copytree(out, tmp_path / "copy")
    update(tree, tmp_path / "copy")
    mine = out / max(contents(tmp_path / "copy").keys() - contents(out).keys() - planned)
    mine.write_text("mine")
    with pytest.raises(DatasetError, match=f"not part of the dataset.*{mine.name}"):
        update(tree, out)
    assert mine.read_text() == "mine"
    mine.rename(tmp_path / mine.name)
    update(tree, out)
    assert verify_deep(out, tree, workers=0).problems == ()


def paths_of(out: Path) -> dict[int, str]:
    index = open_dataset(out).read_index()
    return {int(index.ids[row]): str(index.path(row)) for row in range(len(index))}


@pytest.mark.parametrize("name", ["shards", "webdataset"])
def test_what_is_removed_is_neither_converted_on_nor_exported(tree: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    update(tree, out, name)
    grow(tree, 1)
    update(tree, out, name)
    on = convert(out, tmp_path / "on", small_recipe("shards"), workers=0).manifest
    assert on.samples == open_dataset(out).manifest.samples
    assert paths_of(tmp_path / "on") == paths_of(out)
    if name == "shards":
        assert stored(tmp_path / "on") == stored(out)
    label = SourceOptions(classes=("001.new",))
    some = convert(out, tmp_path / "some", small_recipe("shards"), workers=0, options=label)
    assert {path.split("/")[0] for path in paths_of(tmp_path / "some").values()} == {"001.new"}
    assert some.manifest.samples == sum("001.new/" in path for path in paths_of(out).values())
    export(out, tmp_path / "back", workers=0)
    files = [path for path in (tmp_path / "back").rglob("*.*") if path.suffix in (".png", ".jpg")]
    assert len(files) == on.samples
    names = sorted(Path(path).with_suffix("").name for path in paths_of(out).values())
    assert sorted(file.stem for file in files) == names


def test_statistics_grow_with_what_is_stored(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(tree, tmp_path / "less")
    for picture in sorted((tmp_path / "less").rglob("*.*"))[::2]:
        picture.is_dir() or picture.unlink()
    recipe = small_recipe("shards")
    convert(tmp_path / "less", out, recipe, workers=0)
    grown = convert(tree, out, recipe, workers=0, update=True).manifest.statistics["train"]
    whole = convert(tree, tmp_path / "whole", recipe, workers=0).manifest.statistics["train"]
    assert grown.pixels == whole.pixels
    assert (*grown.mean, *grown.std) == pytest.approx((*whole.mean, *whole.std), abs=1e-9)
    assert verify_deep(out, tree, workers=0).problems == ()


def test_other_options_and_kinds_of_fields_are_refused_by_name(tmp_path: Path) -> None:
    def follow(cells: str, **options: Any) -> None:
        rows = "".join(f"{row}.png,{cell},x{row}\n" for row, cell in enumerate(cells.split()))
        (tmp_path / "t.csv").write_text(f"path,width,name\n{rows}")
        named = {"fields": ("width",), "target": "none", **options}
        convert(tmp_path / "t.csv", tmp_path / "out", small_recipe("shards"), workers=0, update=True, **named)

    for row in range(3):
        Image.new("RGB", (9, 9), (row, 0, 0)).save(tmp_path / f"{row}.png")
    follow("1 2")
    with pytest.raises(DatasetError, match=r"fields \['width'\], asked for \['name'\]"):
        follow("1 2 3", fields=("name",))
    with pytest.raises(DatasetError, match=r"its 'width' is int, but in .* it is now text"):
        follow("a b c")
    assert verify(tmp_path / "out") == []

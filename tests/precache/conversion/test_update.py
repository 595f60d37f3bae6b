"""A source that grew or lost pictures: what stays keeps its place; the same history gives the same bytes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from precache import convert, open_dataset, verify, verify_across, verify_deep
from precache.conversion.journal import unfinished_names
from precache.dataset.index import index_name
from precache.errors import DatasetError, SettingError, SourceError
from precache.formats import FORMATS
from precache.sources.tree import scan_tree
from tests.command import ROOT
from tests.conftest import IMAGES, small_recipe
from tests.precache.conversion.updating import BROKEN, grow, interrupt, places, stored, update
from tests.precache.destinations import contents


@pytest.mark.parametrize("name", sorted(FORMATS))
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
    for times in range(2):
        for source in (tree, tmp_path / "copy") if times else ():
            grow(source, times)
        update(tree, tmp_path / "one")
        for out, seed in (("two", "2"), ("three", "3")):  # under which sets of our splits differ in order
            command = [sys.executable, "-c", script, tmp_path / "copy", tmp_path / out]
            subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, check=True)
    one, two, three = (contents(tmp_path / out) for out in ("one", "two", "three"))
    assert two == three
    times_differ = {name for name in one if name.startswith("dataset")}
    assert one.keys() == two.keys()
    assert {name for name in one if one[name] != two[name]} <= times_differ
    assert open_dataset(tmp_path / "one").digest == open_dataset(tmp_path / "two").digest
    assert verify_across([tmp_path / "one", tmp_path / "two"]) == []


@pytest.mark.parametrize("touched", [False, True])
def test_an_unchanged_source_touches_nothing(tree: Path, tmp_path: Path, touched: bool) -> None:
    out = tmp_path / "out"
    update(tree, out)
    grow(tree, 1)
    update(tree, out)
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    for picture in tree.rglob("*.jpg") if touched else ():
        os.utime(picture, ns=(1, 1))
    assert not update(tree, out).published
    assert not convert(
        tree, out, small_recipe("shards", splits="train=0.8,val=0.2"), workers=0, max_rejects=1
    ).published
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == before


@pytest.mark.parametrize("modified_ns", [0, 1])
def test_a_picture_that_changed_at_the_same_size_is_removed_and_added(
    tree: Path, tmp_path: Path, modified_ns: int
) -> None:
    out = tmp_path / "out"
    victim = sorted(tree.rglob("*.jpg"))[0]
    os.utime(victim, ns=(0, 0))  # as of what knows no times: it says nothing
    update(tree, out)
    old = {key[0]: place[2] for key, place in places(out).items()}[str(victim.relative_to(tree))]
    data = bytearray(victim.read_bytes())
    data[-20] ^= 1
    victim.write_bytes(data)
    os.utime(victim, ns=(modified_ns, modified_ns))
    digest = open_dataset(out).manifest.source_digest
    result = update(tree, out)
    assert result.manifest.source_digest == digest
    assert (result.converted, sum(result.manifest.removed.values())) == (1, 1)
    now = {key[0]: place[2] for key, place in places(out).items()}[str(victim.relative_to(tree))]
    assert (old < IMAGES, now) == (True, IMAGES)
    assert verify_deep(out, tree, workers=0).problems == ()


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


def test_a_rejected_picture_is_tried_again_once_it_changed(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, broken = tmp_path / "out", tree / sorted(os.listdir(tree))[0] / "broken.jpg"
    broken.write_bytes(BROKEN)
    first = update(tree, out).manifest.rejected
    assert [rejected.path for rejected in first] == [str(broken.relative_to(tree))]
    assert not update(tree, out).published
    grow(tree, 1)
    both = update(tree, out).manifest.rejected
    assert both[0] == first[0]
    assert both[0].id == first[0].id
    assert len(both) == 2
    shutil.copy(next(tree.rglob("*.png")), broken)
    last = update(tree, out)
    assert [rejected.path for rejected in last.manifest.rejected] == [both[1].path]
    assert str(broken.relative_to(tree)) in {path for path, _ in places(out)}
    assert last.manifest.removed == open_dataset(out).manifest.removed
    assert verify_deep(out, tree, workers=0).problems == ()


def test_no_file_of_the_dataset_that_a_reader_has_open_changes(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    update(tree, out)
    reader = open_dataset(out)
    before = contents(out)
    grow(tree, 1)
    update(tree, out)
    named = [file.name for file in reader.manifest.files]
    assert {name: contents(out)[name] for name in named} == {name: before[name] for name in named}
    assert len(reader.read_index()) == reader.manifest.samples == IMAGES


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


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"size": 32}, "size 48, asked for 32"),
        ({"splits": "train=1"}, "splits train=0.8,val=0.2, asked for train=1"),
        ({"name": "dali"}, "format shards, asked for dali"),
    ],
)
def test_another_recipe_is_refused_with_the_difference(
    tree: Path, tmp_path: Path, settings: dict[str, str], told: str
) -> None:
    update(tree, tmp_path / "out")
    before = contents(tmp_path / "out")
    grow(tree, 1)
    with pytest.raises(DatasetError, match=f"{told}.*--overwrite"):
        update(tree, tmp_path / "out", **settings)
    with pytest.raises(DatasetError, match="--update to follow the source or --overwrite"):
        convert(tree, tmp_path / "out", small_recipe("shards", splits="train=0.8,val=0.2"), workers=0)
    with pytest.raises(SettingError, match="update and overwrite"):
        convert(tree, tmp_path / "out", small_recipe("shards"), workers=0, update=True, overwrite=True)
    assert contents(tmp_path / "out") == before


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


def test_a_list_of_splits_may_grow(tree: Path, tmp_path: Path) -> None:
    out, listed = tmp_path / "out", tmp_path / "splits.csv"
    paths = [sample.path for sample in scan_tree(tree).samples]
    splits = {path: "val" if number % 4 == 0 else "train" for number, path in enumerate(paths[:60])}
    for last in (40, 60):
        listed.write_text("".join(f"{path},{split}\n" for path, split in list(splits.items())[:last]))
        convert(tree, out, small_recipe("shards"), workers=0, update=True, split_list=listed)
    index = {split: open_dataset(out).read_index(split) for split in ("train", "val")}
    found = {str(of.path(row)): split for split, of in index.items() for row in range(len(of))}
    assert found == splits
    assert open_dataset(out).manifest.removed == {}
    assert verify_deep(out, tree, workers=0).problems == ()


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


def test_a_damaged_index_of_an_update_is_noticed(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    update(tree, out)
    grow(tree, 1)
    manifest = update(tree, out).manifest
    assert manifest.index.name != index_name()
    path = out / manifest.index.name
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    assert [manifest.index.name in problem for problem in verify(out)] == [True]
    with pytest.raises(DatasetError, match=manifest.index.name):
        open_dataset(out).read_index()
    path.unlink()
    with pytest.raises(DatasetError, match=manifest.index.name):
        open_dataset(out).read_index()


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

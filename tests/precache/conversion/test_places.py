"""The destination of a conversion: what it may be, which files it may hold, and who changes it meanwhile.

`test_histories.py` is about the user's files under other names, and about runs that are stopped.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from precache import convert, verify
from precache.dataset.index import REJECTED_NAME
from precache.dataset.manifest import MANIFEST_NAME
from precache.dataset.unfinished import CONVERSION_NAME
from precache.errors import DatasetError, PrecacheError
from tests.command import ROOT
from tests.conftest import small_recipe
from tests.damage import edit_manifest
from tests.precache.destinations import THESIS, contents, interrupt


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "data" / "out"


# The kind of the destination.


def test_convert_refuses_a_file_and_a_folder_that_overlaps_the_source(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    before = contents(tmp_path)
    for place in (tmp_path / "file", tmp_path / "loop", tree, tree.parent):
        with pytest.raises(PrecacheError, match=str(place)):
            convert(tree, place, small_recipe("shards"), workers=0)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["x" * 112, "x" * 225, "x" * 255, "ü" * 127])
def test_a_destination_of_a_long_name_can_be_overwritten(name: str, tree: Path, tmp_path: Path) -> None:
    for size, overwrite in ((8, False), (9, True)):
        convert(
            tree, tmp_path / "out" / name, small_recipe("shards", size=size), workers=0, overwrite=overwrite
        )
    assert os.listdir(tmp_path / "out") == [name]
    assert verify(tmp_path / "out" / name) == []


def test_overwrite_refuses_to_replace_the_working_folder(
    raw_tree: Path, converted: dict[str, Path], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out.mkdir(parents=True)
    monkeypatch.chdir(out)
    convert(raw_tree, ".", small_recipe("shards"), workers=0)
    with pytest.raises(DatasetError) as raised:
        convert(raw_tree, ".", small_recipe("shards"), workers=0, overwrite=True)
    assert raised.value.path == out
    assert contents(out) == contents(converted["shards"])


# Files of others with our names.


def put_texts(out: Path) -> None:
    """Write text files that have the names of a dataset's files."""
    out.mkdir(parents=True)
    for name in (CONVERSION_NAME, MANIFEST_NAME, "train-00000.tar", ".dataset.json.0123456789abcdef.partial"):
        (out / name).write_text('{"a": 1}\n')


def cut_manifest(out: Path) -> None:
    (out / MANIFEST_NAME).write_text((out / MANIFEST_NAME).read_text()[:-9])


def list_thesis(out: Path) -> None:
    """Make a manifest name a file of the user's as the dataset's."""
    (out / "thesis.txt").write_bytes(THESIS)
    content = json.loads((out / MANIFEST_NAME).read_bytes())
    edit_manifest(out, index={**content["index"], "name": "thesis.txt"})


@pytest.mark.parametrize("spoil", [put_texts, cut_manifest, list_thesis])
def test_convert_refuses_a_folder_with_files_of_others(
    spoil: Callable[[Path], None], raw_tree: Path, converted: dict[str, Path], out: Path
) -> None:
    if spoil is not put_texts:
        shutil.copytree(converted["shards"], out)
    spoil(out)
    before = contents(out.parent)
    for overwrite in (False, True):
        with pytest.raises(DatasetError, match=str(out)):
            convert(raw_tree, out, small_recipe("dali"), workers=0, overwrite=overwrite)
    assert contents(out.parent) == before


def test_convert_replaces_links_and_never_writes_through_them(
    raw_tree: Path, converted: dict[str, Path], out: Path, tmp_path: Path
) -> None:
    names = ("dataset.index", MANIFEST_NAME, REJECTED_NAME, "train-00005.safetensors", "dataset.json.partial")
    victims = [tmp_path / f"victim of {name}" for name in names]

    def plant(done: int, total: int) -> None:
        for name, victim in zip(names, victims, strict=True):
            if not os.path.lexists(out / name):
                victim.write_bytes(THESIS)
                (out / name).symlink_to(victim)

    interrupt(raw_tree, out)
    convert(raw_tree, out, small_recipe("shards"), workers=0, on_progress=plant)
    files = {name: data for name, data in contents(out).items() if not (out / name).is_symlink()}
    assert files == contents(converted["shards"])
    assert [victim.read_bytes() for victim in victims] == [THESIS] * len(victims)


@pytest.mark.parametrize("kind", ["a link", "a file"])
def test_overwrite_refuses_a_foreign_file_with_the_name_of_its_folder(
    kind: str, raw_tree: Path, converted: dict[str, Path], out: Path, tmp_path: Path
) -> None:
    shutil.copytree(converted["dali"], out)
    (tmp_path / "mine").mkdir()
    hidden = out.parent / ".out.precache-overwrite"
    hidden.symlink_to(tmp_path / "mine") if kind == "a link" else hidden.write_bytes(THESIS)
    with pytest.raises(DatasetError) as raised:
        convert(raw_tree, out, small_recipe("shards"), workers=0, overwrite=True)
    assert raised.value.path == hidden
    assert contents(out) == contents(converted["dali"])
    assert os.listdir(tmp_path / "mine") == []


# Changes by others during a conversion.


def test_what_stops_an_overwrite_is_said_of_the_destination(tree: Path, tmp_path: Path) -> None:
    convert(tree, tmp_path / "out", small_recipe("shards"), workers=0)
    next(tree.rglob("*.jpg")).write_bytes(b"broken")
    with pytest.raises(DatasetError, match="1 picture is rejected") as raised:
        convert(tree, tmp_path / "out", small_recipe("shards"), workers=0, overwrite=True, max_rejects=0)
    assert raised.value.path == tmp_path / "out"


def test_a_file_put_into_the_old_dataset_stops_overwrite(
    raw_tree: Path, converted: dict[str, Path], out: Path
) -> None:
    shutil.copytree(converted["dali"], out)

    def put(done: int, total: int) -> None:
        (out / "thesis.txt").write_bytes(THESIS)

    with pytest.raises(DatasetError, match=r"thesis\.txt") as raised:
        convert(raw_tree, out, small_recipe("shards"), workers=0, overwrite=True, on_progress=put)
    assert raised.value.path == out
    assert contents(out) == {**contents(converted["dali"]), "thesis.txt": THESIS}
    (out / "thesis.txt").unlink()
    assert convert(raw_tree, out, small_recipe("shards"), workers=0, overwrite=True).converted == 0
    assert contents(out) == contents(converted["shards"])
    assert os.listdir(out.parent) == ["out"]


def test_a_file_put_into_the_old_dataset_survives_overwrite(
    raw_tree: Path, converted: dict[str, Path], out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file comes between the two renames of a swap that is killed; the next run names it."""
    shutil.copytree(converted["dali"], out)
    hidden = out.parent / ".out.precache-overwrite"
    shutil.copytree(converted["shards"], hidden / "new")
    old = out.rename(hidden / "old")
    (old / "thesis\x1b.txt").write_bytes(THESIS)
    assert convert(raw_tree, out, small_recipe("shards"), workers=0).converted == 0
    assert contents(out) == contents(converted["shards"])
    assert contents(old) == {"thesis\x1b.txt": THESIS}
    assert "thesis\\x1b.txt" in caplog.text
    assert str(old) in caplog.text
    shutil.rmtree(out)  # the rest of the old dataset does not take its place
    assert convert(raw_tree, out, small_recipe("shards"), workers=0).converted == 70
    with pytest.raises(DatasetError) as raised:
        convert(raw_tree, out, small_recipe("dali"), workers=0, overwrite=True)
    assert raised.value.path == old
    assert contents(old) == {"thesis\x1b.txt": THESIS}


@pytest.mark.parametrize("moment", ["converting", "overwriting", "finished"])
def test_convert_fails_while_a_shard_is_missing(moment: str, tree: Path, tmp_path: Path) -> None:
    """The same command, or --overwrite once the dataset is finished, writes it again."""
    out, recipe, removed = tmp_path / "out", small_recipe("shards"), list[Path]()
    if moment != "converting":
        convert(tree, out, recipe, workers=0)
    options, place = (
        ({"overwrite": True}, ".out.precache-overwrite/new") if moment == "overwriting" else ({}, "out")
    )

    def remove_shard(done: int = 0, total: int = 0) -> None:
        if removed:
            return
        for shard in tmp_path.glob(f"{place}/train-00000.*"):
            shard.unlink()
            removed.append(shard)

    if moment == "finished":
        remove_shard()
    with pytest.raises(DatasetError, match=r"train-00000\.safetensors"):
        convert(tree, out, recipe, workers=0, on_progress=remove_shard, **options)
    if moment == "finished":
        options = {"overwrite": True}
    convert(tree, out, recipe, workers=0, **options)
    assert verify(out) == []


def test_a_resumed_conversion_converts_changed_pictures_again(
    tree: Path, out: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that were only copied, so that they have other times, are not converted again."""
    interrupt(tree, out)
    finished = len(list(out.glob("*-*.json")))
    for path in tree.glob("*/*.jpg"):
        os.utime(path, ns=(0, 1_000_000_000))
    victims = change_pictures(tree, 0, 3)
    assert convert(tree, out, small_recipe("shards"), workers=0).converted < 60
    assert finished > 0
    assert any(str(victim) in caplog.text for victim in victims)
    convert(tree, tmp_path / "fresh", small_recipe("shards"), workers=0)
    assert contents(out) == contents(tmp_path / "fresh")


def test_a_picture_that_changed_at_its_size_is_named(tree: Path, out: Path) -> None:
    convert(tree, out, small_recipe("shards"), workers=0)
    (victim,) = change_pictures(tree, 20, 21)
    with pytest.raises(DatasetError, match=str(victim)) as raised:
        convert(tree, out, small_recipe("shards"), workers=0)
    assert raised.value.path == out
    assert "--overwrite" in raised.value.remedy


def change_pictures(tree: Path, start: int, stop: int) -> list[Path]:
    """Change a byte of some pictures, so that they keep their length and can be decoded."""
    victims = sorted(tree.glob("*/*.jpg"))[start:stop]
    for victim in victims:
        content = bytearray(victim.read_bytes())
        content[-40] ^= 16
        victim.write_bytes(content)
    return victims


def test_a_mount_point_is_filled_but_not_replaced(
    raw_tree: Path, converted: dict[str, Path], out: Path, tmp_path: Path
) -> None:
    out.mkdir(parents=True)
    disk = tmp_path / "disk"
    (disk / "lost+found").mkdir(parents=True)
    mount, unshared = f"mount --bind {disk} {out}", ["unshare", "-rm", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*unshared, mount], check=False).returncode:
        pytest.skip("needs a system on which users may mount in a namespace of their own")
    for flags in ("--format shards", "--format dali --overwrite"):
        words = f"{raw_tree} {out} {small_recipe('shards').to_flags()} --workers 0 {flags}"
        command = [*unshared, f"{mount} && exec {sys.executable} -m precache convert {words}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == (2 if "overwrite" in flags else 0), ended.stderr
        assert contents(disk) == contents(converted["shards"])
    assert f"{out}: is a mount point" in ended.stderr
    assert [path.name for path in out.parent.iterdir()] == ["out"]

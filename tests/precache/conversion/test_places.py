"""What DST may be, what lies there under our names, and who meddles with it while it is converted.

See `test_histories.py` for files of the user's under other names, and for runs that are stopped.
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
from precache.conversion.journal import JOURNAL_NAME
from precache.dataset.index import REJECTED_NAME
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError, PrecacheError
from tests.command import ROOT
from tests.conftest import small_recipe
from tests.damage import edit_manifest
from tests.precache.destinations import THESIS, contents, interrupt


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "data" / "out"


# What it may be.


def test_convert_refuses_a_file_and_a_folder_that_overlaps_the_source(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    before = contents(tmp_path)
    for place in (tmp_path / "file", tmp_path / "loop", tree, tree.parent):
        with pytest.raises(PrecacheError, match=f"{place}"):
            convert(tree, place, small_recipe("shards"), workers=0)
    assert contents(tmp_path) == before


def test_overwrite_refuses_to_replace_the_working_folder(
    raw_tree: Path, converted: dict[str, Path], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out.mkdir(parents=True)
    monkeypatch.chdir(out)
    convert(raw_tree, ".", small_recipe("shards"), workers=0)
    with pytest.raises(DatasetError, match=f"{out}: is the working folder.* run the command from another"):
        convert(raw_tree, ".", small_recipe("shards"), workers=0, overwrite=True)
    assert contents(out) == contents(converted["shards"])


# What lies there under our names.


def put_texts(out: Path) -> None:
    out.mkdir(parents=True)
    for name in (JOURNAL_NAME, MANIFEST_NAME, "train-00000.tar", ".dataset.json.0123456789abcdef.partial"):
        (out / name).write_text('{"a": 1}\n')


def cut_manifest(out: Path) -> None:
    (out / MANIFEST_NAME).write_text((out / MANIFEST_NAME).read_text()[:-9])


def list_thesis(out: Path) -> None:
    """A manifest that names a file of the user's as the dataset's."""
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
    there = contents(out.parent)
    for overwrite in (False, True):
        with pytest.raises(DatasetError, match=str(out)):
            convert(raw_tree, out, small_recipe("dali"), workers=0, overwrite=overwrite)
    assert contents(out.parent) == there


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
    found = {name: data for name, data in contents(out).items() if not (out / name).is_symlink()}
    assert found == contents(converted["shards"])
    assert [victim.read_bytes() for victim in victims] == [THESIS] * len(victims)


# Who meddles.


def test_a_file_put_into_the_old_dataset_survives_overwrite(
    raw_tree: Path, converted: dict[str, Path], out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the swap it stops the run; after it the new dataset is in place."""
    shutil.copytree(converted["dali"], out)

    def put(done: int, total: int) -> None:
        (out / "thesis.txt").write_bytes(THESIS)

    with pytest.raises(DatasetError, match=r"not part of the dataset \(thesis.txt\)"):
        convert(raw_tree, out, small_recipe("shards"), workers=0, overwrite=True, on_progress=put)
    assert contents(out) == {**contents(converted["dali"]), "thesis.txt": THESIS}
    (out / "thesis.txt").rename(out.parent / "thesis.txt")
    (new,) = out.parent.glob(".out.*.new.precache")
    old = out.rename(new.with_name(new.name.replace(".new.", ".old.")))  # killed between the renames
    (old / "thesis\x1b.txt").write_bytes(THESIS)
    assert convert(raw_tree, out, small_recipe("shards"), workers=0).converted == 0
    assert contents(out) == contents(converted["shards"])
    assert contents(old) == {"thesis\x1b.txt": THESIS}
    assert f"(thesis\\x1b.txt); the rest is in {old}" in caplog.text
    shutil.rmtree(out)  # then what is left of the old one does not take its place
    assert convert(raw_tree, out, small_recipe("shards"), workers=0).converted == 70
    assert contents(old) == {"thesis\x1b.txt": THESIS}


@pytest.mark.parametrize("moment", ["converting", "overwriting", "finished"])
def test_convert_fails_while_a_shard_is_missing(moment: str, tree: Path, tmp_path: Path) -> None:
    """Whoever took it away, and whenever; and the same command, or --overwrite, makes it again."""
    out, recipe, damaged = tmp_path / "out", small_recipe("shards"), list[Path]()
    if moment != "converting":
        convert(tree, out, recipe, workers=0)
    options, place = ({"overwrite": True}, ".out.*.precache") if moment == "overwriting" else ({}, "out")

    def spoil(done: int = 0, total: int = 0) -> None:
        for shard in tmp_path.glob(f"{place}/train-00000.*") if not damaged else ():
            shard.unlink()
            damaged.append(shard)

    if moment == "finished":
        spoil()
    with pytest.raises(DatasetError, match=r"train-00000.safetensors: missing"):
        convert(tree, out, recipe, workers=0, on_progress=spoil, **options)
    convert(tree, out, recipe, workers=0, **(options if moment != "finished" else {"overwrite": True}))
    assert verify(out) == []


def test_a_resumed_conversion_converts_changed_pictures_again(
    tree: Path, out: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt(tree, out)
    kept = len((out / JOURNAL_NAME).read_text().splitlines()) - 1
    for path in tree.glob("*/*.jpg"):  # a copy of the tree, or a checkout: other times, the same bytes
        os.utime(path, ns=(0, 1_000_000_000))
    victims = change(tree, 0, 3)
    assert convert(tree, out, small_recipe("shards"), workers=0).converted < 60
    assert kept > 0
    assert "has changed since it was converted; " in caplog.text
    assert any(str(victim) in caplog.text for victim in victims)
    convert(tree, tmp_path / "fresh", small_recipe("shards"), workers=0)
    assert contents(out) == contents(tmp_path / "fresh")
    (victim,) = change(tree, 20, 21)
    with pytest.raises(DatasetError, match=rf"first: {victim}.*--overwrite"):
        convert(tree, out, small_recipe("shards"), workers=0)


def change(tree: Path, start: int, stop: int) -> list[Path]:
    """Other bytes of the same length in some pictures, and what they give are pictures, too."""
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
    told = ""
    for flags in ("--format shards", "--format dali --overwrite"):
        words = f"{raw_tree} {out} {small_recipe('shards').to_flags()} --workers 0 {flags}"
        command = [*unshared, f"{mount} && exec {sys.executable} -m precache convert {words}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == (2 if "overwrite" in flags else 0), ended.stderr
        assert contents(disk) == contents(converted["shards"])
        told = ended.stderr
    assert f"{out}: is a mount point" in told
    assert [path.name for path in out.parent.iterdir()] == ["out"]

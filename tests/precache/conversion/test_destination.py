"""What lies in DST and beside it and is not on record as ours is never removed, renamed or written to."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from precache import convert
from precache.conversion.journal import JOURNAL_NAME
from precache.dataset.index import REJECTED_NAME
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError
from precache.storage.output import publish, write_beside
from tests.command import ROOT, check_bad_input, run
from tests.conftest import small_recipe
from tests.damage import edit_manifest
from tests.precache.destinations import THESIS, beside, contents, interrupt


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "data" / "out"


# Beside DST.


@pytest.mark.parametrize("begun", ["missing", "finished"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_folders_beside_the_destination_are_the_users(
    overwrite: bool, begun: str, raw_tree: Path, converted: dict[str, Path], out: Path
) -> None:
    """A folder of papers, an unfinished conversion and a dataset, with names that might be taken for ours."""
    for suffix in (".old", ".lock"):
        (out.parent / f"out{suffix}").mkdir(parents=True)
        (out.parent / f"out{suffix}" / "thesis.txt").write_bytes(THESIS)
    shutil.copytree(converted["dali"], out.parent / "out.new")
    shutil.copytree(converted["dali"], out.parent / ".out.0123456789abcdef.precache")
    before = contents(out.parent)
    if begun == "finished":
        shutil.copytree(converted["dali"], out)
    options = {"recipe": small_recipe("shards"), "workers": 0, "overwrite": overwrite}
    if begun == "missing" or overwrite:
        convert(raw_tree, out, **options)
        assert contents(out) == contents(converted["shards"])
    else:
        with pytest.raises(DatasetError, match="--overwrite"):
            convert(raw_tree, out, **options)
        assert contents(out) == contents(converted["dali"])
    shutil.rmtree(out)
    assert contents(out.parent) == before


def test_an_old_folder_of_the_users_is_not_put_into_the_place_of_a_missing_destination(
    raw_tree: Path, converted: dict[str, Path], out: Path
) -> None:
    shutil.copytree(converted["shards"], out.parent / "out.old")
    convert(raw_tree, out, small_recipe("webdataset"), workers=0)
    assert contents(out) == contents(converted["webdataset"])
    assert contents(out.parent / "out.old") == contents(converted["shards"])


# In DST.


@pytest.mark.parametrize("again", ["shards", "dali"])
def test_overwriting_an_unfinished_conversion_leaves_what_its_journal_does_not_list(
    again: str, raw_tree: Path, converted: dict[str, Path], out: Path
) -> None:
    interrupt(raw_tree, out)
    mine = (
        "mine-12345.jpg",
        "mine-00000.safetensors",
        "train-00000.jpg",
        "train-99999.safetensors",
        ".x.partial",
    )
    for name in mine:
        (out / name).write_bytes(THESIS)
    convert(raw_tree, out, small_recipe(again), workers=0, overwrite=True)
    assert contents(out) == {**contents(converted[again]), **dict.fromkeys(mine, THESIS)}


def test_a_file_that_comes_to_the_old_dataset_meanwhile_survives(
    raw_tree: Path, converted: dict[str, Path], out: Path
) -> None:
    """Before the swap it stops the run, which goes on from there once the file is moved."""
    shutil.copytree(converted["dali"], out)

    def put(done: int, total: int) -> None:
        (out / "thesis.txt").write_bytes(THESIS)

    options = {"recipe": small_recipe("shards"), "workers": 0}
    with pytest.raises(DatasetError, match=r"not part of the dataset \(thesis.txt\)"):
        convert(raw_tree, out, overwrite=True, on_progress=put, **options)
    assert contents(out) == {**contents(converted["dali"]), "thesis.txt": THESIS}
    with pytest.raises(DatasetError, match=r"not part of the dataset \(thesis.txt\)"):
        convert(raw_tree, out, **options)
    (out / "thesis.txt").rename(out.parent / "thesis.txt")
    assert convert(raw_tree, out, **options).converted == 0
    assert contents(out) == contents(converted["shards"])
    assert beside(out) == ["thesis.txt"]


def test_a_folder_of_the_users_with_files_of_our_names_is_not_touched(
    raw_tree: Path, converted: dict[str, Path], out: Path
) -> None:
    out.mkdir(parents=True)
    names = (
        JOURNAL_NAME,
        MANIFEST_NAME,
        REJECTED_NAME,
        "train-00000.tar",
        ".dataset.json.0123456789abcdef.partial",
    )
    for name in names:
        (out / name).write_text('{"a": 1}\n')
    before = contents(out)
    for overwrite in (False, True):
        with pytest.raises(DatasetError, match="not a manifest of this project"):
            convert(raw_tree, out, small_recipe("webdataset"), workers=0, overwrite=overwrite)
        assert contents(out) == before


def test_an_edited_manifest_can_be_replaced_and_a_broken_one_says_what_to_do(
    raw_tree: Path, converted: dict[str, Path], out: Path
) -> None:
    shutil.copytree(converted["shards"], out)
    options = {"recipe": small_recipe("dali"), "workers": 0, "overwrite": True}
    text = (out / MANIFEST_NAME).read_text()
    (out / MANIFEST_NAME).write_text(text.replace('"quality": 95', '"quality": 94'))
    convert(raw_tree, out, **options)
    assert contents(out) == contents(converted["dali"])
    (out / MANIFEST_NAME).write_text(text[:-9])
    before = contents(out)
    with pytest.raises(
        DatasetError, match=f"so it is unknown which files are the dataset's: remove {out} yourself"
    ):
        convert(raw_tree, out, **options)
    assert contents(out) == before


def test_a_manifest_that_lists_a_file_of_the_users_removes_none(
    raw_tree: Path, converted: dict[str, Path], out: Path
) -> None:
    shutil.copytree(converted["shards"], out)
    (out / "thesis.txt").write_bytes(THESIS)
    content = json.loads((out / MANIFEST_NAME).read_bytes())
    edit_manifest(out, index={**content["index"], "name": "thesis.txt"})
    before = contents(out)
    with pytest.raises(DatasetError, match=f"unknown which files .* remove {out} yourself"):
        convert(raw_tree, out, small_recipe("shards"), workers=0, overwrite=True)
    assert contents(out) == before


@pytest.mark.parametrize("moment", ["before", "midway"])
def test_links_at_our_names_are_replaced_and_not_written_through(
    moment: str, raw_tree: Path, converted: dict[str, Path], out: Path, tmp_path: Path
) -> None:
    names = (
        "dataset.index", MANIFEST_NAME, REJECTED_NAME, "train-00005.safetensors", "journal.jsonl.partial",
        "dataset.index.partial", "dataset.json.partial",
    )  # fmt: skip
    victims = [tmp_path / f"victim of {name}" for name in names]

    def plant(done: int = 0, total: int = 0) -> None:
        for name, victim in zip(names, victims, strict=True):
            if not os.path.lexists(out / name):
                victim.write_bytes(THESIS)
                (out / name).symlink_to(victim)

    interrupt(raw_tree, out)
    if moment == "before":
        plant()
        with pytest.raises(DatasetError, match="not valid JSON"):
            convert(raw_tree, out, small_recipe("shards"), workers=0)
        (out / MANIFEST_NAME).unlink()
        convert(raw_tree, out, small_recipe("shards"), workers=0)
    else:
        convert(raw_tree, out, small_recipe("shards"), workers=0, on_progress=plant)
    found = {name: data for name, data in contents(out).items() if not (out / name).is_symlink()}
    assert found == contents(converted["shards"])
    assert [victim.read_bytes() for victim in victims] == [THESIS] * len(victims)


def test_a_journal_that_is_a_link_is_not_ours(raw_tree: Path, out: Path, tmp_path: Path) -> None:
    interrupt(raw_tree, out)
    victim = (out / JOURNAL_NAME).rename(tmp_path / "victim")
    (out / JOURNAL_NAME).symlink_to(victim)
    before = contents(out)
    for overwrite in (False, True):
        with pytest.raises(DatasetError, match=f"{JOURNAL_NAME}: cannot be read as the journal"):
            convert(raw_tree, out, small_recipe("dali"), workers=0, overwrite=overwrite)
    assert contents(out) == before
    (out / JOURNAL_NAME).unlink()
    os.link(victim, out / JOURNAL_NAME)  # another name of the file: it is replaced
    convert(raw_tree, out, small_recipe("shards"), workers=0)
    assert victim.read_bytes() == before[JOURNAL_NAME]


def test_a_shard_is_published_over_a_link_itself(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(THESIS)
    (tmp_path / "shard").symlink_to(tmp_path / "victim")
    with write_beside(tmp_path / "shard") as file:
        file.write(b"new")
    publish([file])
    assert (tmp_path / "victim").read_bytes() == THESIS


# What DST may be.


def test_a_destination_that_is_a_link_stays_one(
    raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    real = Path(shutil.copytree(converted["dali"], tmp_path / "disk" / "real"))
    (tmp_path / "out").symlink_to(real)
    convert(raw_tree, tmp_path / "out", small_recipe("shards"), workers=0, overwrite=True)
    assert (tmp_path / "out").readlink() == real
    assert contents(real) == contents(converted["shards"])
    assert beside(real) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(DatasetError, match="loop: is a link to itself"):
        convert(raw_tree, tmp_path / "loop", small_recipe("shards"), workers=0)


def test_the_working_folder_can_be_the_destination_but_not_be_replaced(
    raw_tree: Path, converted: dict[str, Path], out: Path
) -> None:
    out.mkdir(parents=True)
    arguments = (
        "convert",
        raw_tree,
        ".",
        "--format",
        "shards",
        *("--size", 48, "--fit", "crop", "--resample", "bilinear"),
        "--shard-bytes",
        12 * 48 * 48 * 3,
    )
    assert run("precache", *arguments, cwd=out).returncode == 0
    assert contents(out) == contents(converted["shards"])
    check_bad_input(run("precache", *arguments, "--overwrite", cwd=out), str(out), "is the working folder")
    assert contents(out) == contents(converted["shards"])


MOUNTED = """
import sys
from pathlib import Path
from precache import convert
from precache.errors import DatasetError
from precache.conversion.lock import LOCK_SUFFIX
from tests.conftest import small_recipe
tree, out = map(Path, sys.argv[1:])
(out / "lost+found").mkdir()
convert(tree, out, small_recipe("shards"), workers=0)
before = sorted(path.name for path in out.iterdir())
try:
    convert(tree, out, small_recipe("dali"), workers=0, overwrite=True)
except DatasetError as error:
    print(error)
assert before == sorted(path.name for path in out.iterdir())
assert LOCK_SUFFIX not in before
"""


@pytest.mark.parametrize("kind", ["bind", "tmpfs"])
def test_a_mount_point_is_filled_but_not_replaced(
    kind: str, raw_tree: Path, out: Path, tmp_path: Path
) -> None:
    out.mkdir(parents=True)
    (tmp_path / "disk").mkdir()
    mount = f"mount --bind {tmp_path}/disk {out}" if kind == "bind" else f"mount -t tmpfs none {out}"
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False).returncode
    ):
        pytest.skip("needs a system on which users may mount in a namespace of their own")
    command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", MOUNTED]
    result = subprocess.run(
        [*command, raw_tree, out],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert f"{out}: is a mount point" in result.stdout
    assert [path.name for path in out.parent.iterdir()] == ["out"]


# Pictures that changed.


def change(tree: Path, place: int) -> Path:
    """Other bytes of the same length, and what they give is a picture, too."""
    victim = sorted(tree.glob("*/*.jpg"))[place]
    content = bytearray(victim.read_bytes())
    content[-40] ^= 16
    victim.write_bytes(content)
    return victim


def test_a_picture_that_another_of_its_size_replaced_is_noticed(
    raw_tree: Path, out: Path, tmp_path: Path
) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    convert(tree, out, small_recipe("shards"), workers=0)
    for path in tree.glob("*/*.jpg"):  # a copy of the tree, or a checkout: other times, the same bytes
        os.utime(path, ns=(0, 1_000_000_000))
    assert not convert(tree, out, small_recipe("shards"), workers=0).published
    victim = change(tree, 20)
    with pytest.raises(DatasetError, match=rf"1 source picture changed .*first: {victim}.*--overwrite"):
        convert(tree, out, small_recipe("shards"), workers=0)
    convert(tree, out, small_recipe("shards"), workers=0, overwrite=True)
    convert(tree, tmp_path / "fresh", small_recipe("shards"), workers=0)
    assert contents(out) == contents(tmp_path / "fresh")


def test_a_resumed_conversion_does_not_mix_old_pictures_with_new(
    raw_tree: Path, out: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    interrupt(tree, out)
    kept = len((out / JOURNAL_NAME).read_text().splitlines()) - 1
    for path in tree.glob("*/*.jpg"):
        os.utime(path, ns=(0, 1_000_000_000))
    victims = [change(tree, place) for place in range(3)]
    with caplog.at_level(logging.WARNING, "precache"):
        done = convert(tree, out, small_recipe("shards"), workers=0)
    assert "has changed since it was converted; " in caplog.text
    assert any(str(victim) in caplog.text for victim in victims)
    assert kept > 0
    convert(tree, tmp_path / "fresh", small_recipe("shards"), workers=0)
    assert contents(out) == contents(tmp_path / "fresh")
    assert done.converted < 60

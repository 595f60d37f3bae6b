"""What lies in DST and beside it and is not on record as ours is never removed, renamed or written to."""

import errno
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from precache import convert
from precache.converted import open_dataset
from precache.errors import DatasetError
from precache.journal import JOURNAL_NAME
from precache.lock import Swap, hold_lock, lock_path
from precache.manifest import MANIFEST_NAME, REJECTED_NAME
from precache.output import publish, write_beside
from tests.command import ROOT, check_bad_input, run
from tests.conftest import small_recipe

THESIS = b"years of work"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def beside(path: Path) -> list[str]:
    """What lies beside `path` but for its lock, which stays, and is empty when nothing is under way."""
    assert lock_path(path).read_bytes() == b""
    return sorted({entry.name for entry in path.parent.iterdir()} - {path.name, lock_path(path).name})


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "data" / "out"


def interrupt(tree: Path, out: Path, name: str = "shards", **options: object) -> None:
    def stop(done: int, total: int) -> None:
        if done > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tree, out, small_recipe(name), workers=0, on_progress=stop, **options)


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
    lock_path(out).unlink()
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
    (out / MANIFEST_NAME).write_text(text.replace('"converted": 70', '"converted": 71'))
    convert(raw_tree, out, **options)
    assert contents(out) == contents(converted["dali"])
    (out / MANIFEST_NAME).write_text(text[:-9])
    before = contents(out)
    with pytest.raises(
        DatasetError, match=f"so it is unknown which files are the dataset's: remove {out} yourself"
    ):
        convert(raw_tree, out, **options)
    assert contents(out) == before


def test_a_manifest_that_lists_files_of_the_users_removes_none(
    raw_tree: Path, converted: dict[str, Path], out: Path
) -> None:
    shutil.copytree(converted["shards"], out)
    (out / "thesis.txt").write_bytes(THESIS)
    text = (out / MANIFEST_NAME).read_text()
    first = open_dataset(out).manifest.shards[-1].file_name
    (out / MANIFEST_NAME).write_text(text.replace(first, "thesis.txt"))
    with pytest.raises(
        DatasetError, match=r"lists files that precache does not write \(train-00005\); remove .*/out"
    ):
        convert(raw_tree, out, small_recipe("shards"), workers=0, overwrite=True)
    assert (out / "thesis.txt").read_bytes() == THESIS


@pytest.mark.parametrize("moment", ["before", "midway"])
def test_links_at_our_names_are_replaced_and_not_written_through(
    moment: str, raw_tree: Path, converted: dict[str, Path], out: Path, tmp_path: Path
) -> None:
    names = (
        "index.safetensors", "source.safetensors", MANIFEST_NAME, REJECTED_NAME, "train-00005.safetensors",
        "journal.jsonl.partial", "index.safetensors.partial", "dataset.json.partial",
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


# The swap.


@pytest.mark.parametrize(
    "state", ["noted", "built", "old moved away", "both moved", "half removed", "build lost"]
)
def test_a_swap_that_was_killed_is_completed_or_undone(
    state: str, raw_tree: Path, converted: dict[str, Path], out: Path
) -> None:
    shutil.copytree(converted["dali"], out)
    with hold_lock(out) as lock:
        swap = lock.new_swap()
        build, old = out.with_name(swap.build), out.with_name(swap.old)
        if state in ("built", "old moved away", "both moved", "half removed"):
            shutil.copytree(converted["shards"], build)
        if state not in ("noted", "built"):
            lock.note(replace(swap, files=tuple(contents(out))))
            out.rename(old)
        if state in ("both moved", "half removed"):
            build.rename(out)
        if state == "half removed":
            for name in sorted(contents(old))[:5]:
                (old / name).unlink()
    name = "dali" if state in ("noted", "build lost") else "shards"
    assert convert(raw_tree, out, small_recipe(name), workers=0).converted == 0
    assert contents(out) == contents(converted[name])
    if state != "noted":
        assert beside(out) == []


def test_nothing_is_renamed_before_it_is_on_record(
    raw_tree: Path, converted: dict[str, Path], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(converted["dali"], out)
    rename, records = os.rename, []

    def watch(source: Path, target: Path) -> None:
        records.append((source.name, target.name, lock_path(out).read_text()))
        rename(source, target)

    monkeypatch.setattr(os, "rename", watch)
    convert(raw_tree, out, small_recipe("shards"), workers=0, overwrite=True)
    (_, old, first), (build, _, second) = records
    for text in (first, second):
        assert all(f'"{name}"' in text for name in (old, build, *contents(converted["dali"])))


def test_what_comes_to_the_old_dataset_while_it_is_removed_survives_and_is_named(
    raw_tree: Path, converted: dict[str, Path], out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(converted["dali"], out)
    with hold_lock(out) as lock:
        swap = replace(lock.new_swap(), files=tuple(contents(out)))
        lock.note(swap)
        old = out.rename(out.with_name(swap.old))
        shutil.copytree(converted["shards"], out)
        (old / "thesis\x1b.txt").write_bytes(THESIS)
    with caplog.at_level(logging.WARNING, "precache"):
        convert(raw_tree, out, small_recipe("shards"), workers=0)
    assert contents(old) == {"thesis\x1b.txt": THESIS}
    (message,) = caplog.messages
    assert f"(thesis\\x1b.txt); the rest is in {old}" in message
    assert beside(out) == [old.name]


def test_an_old_file_that_cannot_be_removed_is_named_and_removed_by_the_next_run(
    raw_tree: Path,
    converted: dict[str, Path],
    out: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(converted["dali"], out)
    unlink = Path.unlink

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self.name == "train-00001.tfrecord":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        unlink(self, missing_ok)

    with monkeypatch.context() as patches, caplog.at_level(logging.WARNING, "precache"):
        patches.setattr(Path, "unlink", refuse)
        for name in ("shards", "webdataset"):
            convert(raw_tree, out, small_recipe(name), workers=0, overwrite=True)
            assert contents(out) == contents(converted[name])
    (left,) = out.parent.glob(".out.*.precache")
    assert f"(train-00001.tfrecord); the rest is in {left}" in caplog.text
    shutil.copytree(converted["dali"], other := out.with_name("other"))
    with monkeypatch.context() as patches:
        patches.setattr(Path, "unlink", refuse)
        convert(raw_tree, other, small_recipe("shards"), workers=0, overwrite=True)
    assert not convert(raw_tree, other, small_recipe("shards"), workers=0).published
    assert list(out.parent.glob(".other.*.precache")) == []


def test_a_folder_that_took_the_destinations_place_is_not_replaced(
    raw_tree: Path, converted: dict[str, Path], out: Path
) -> None:
    shutil.copytree(converted["dali"], out)
    with hold_lock(out) as lock:
        swap = replace(lock.new_swap(), files=tuple(contents(out)))
        lock.note(swap)
        out.rename(out.with_name(swap.old))
        shutil.copytree(converted["shards"], out.with_name(swap.build))
    out.mkdir()
    (out / "thesis.txt").write_bytes(THESIS)
    with pytest.raises(DatasetError, match="was created while --overwrite was about to put"):
        convert(raw_tree, out, small_recipe("shards"), workers=0)
    assert contents(out) == {"thesis.txt": THESIS}
    shutil.rmtree(out)
    assert convert(raw_tree, out, small_recipe("shards"), workers=0).converted == 0
    assert beside(out) == []


@pytest.mark.parametrize(
    "swap",
    [Swap("../victim", ".out.0123456789abcdef.precache"), Swap("victim", "victim"),
     Swap(".out.0123456789abcdef.precache", ".out.1123456789abcdef.precache", ("../victim/thesis.txt",))],
)  # fmt: skip
def test_a_record_that_names_what_no_swap_makes_is_refused(swap: Swap, raw_tree: Path, out: Path) -> None:
    victim = out.parent / "victim"
    victim.mkdir(parents=True)
    (victim / "thesis.txt").write_bytes(THESIS)
    with hold_lock(out) as lock:
        lock.note(swap)
    with pytest.raises(DatasetError, match="names files that precache does not make"):
        convert(raw_tree, out, small_recipe("shards"), workers=0)
    assert contents(victim) == {"thesis.txt": THESIS}


def test_an_unfinished_overwrite_is_continued_and_named_to_who_does_not(
    raw_tree: Path, converted: dict[str, Path], out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(converted["dali"], out)
    interrupt(raw_tree, out, overwrite=True)
    (build,) = out.parent.glob(".out.*.precache")
    assert contents(out) == contents(converted["dali"])
    with caplog.at_level(logging.WARNING, "precache"):
        convert(raw_tree, out, small_recipe("dali"), workers=0)
    assert f"an unfinished --overwrite takes space in {build}" in caplog.text
    assert 0 < convert(raw_tree, out, small_recipe("shards"), workers=0, overwrite=True).converted < 70
    assert contents(out) == contents(converted["shards"])
    assert beside(out) == []


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
        "--size",
        48,
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
from precache.lock import LOCK_SUFFIX
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
assert LOCK_SUFFIX in before
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

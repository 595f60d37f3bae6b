"""A finished dataset is replaced by another one: whole, on record, and nothing of the user's with it."""

import errno
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from precache import convert
from precache.conversion.lock import Swap, hold_lock, lock_path
from precache.errors import DatasetError
from tests.conftest import small_recipe
from tests.precache.destinations import THESIS, beside, contents, interrupt


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "data" / "out"


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

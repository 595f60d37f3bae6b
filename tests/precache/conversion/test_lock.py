"""The lock of a destination; `locks` in `tests/faults` is about what a crash leaves."""

import errno
import fcntl
import os
import sys
from pathlib import Path

import pytest

from precache import convert
from precache.errors import DatasetError, SettingError
from precache.storage import locks as lock
from precache.storage.locks import lock_path
from tests.conftest import small_recipe


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.0)


def test_a_second_conversion_into_a_destination_is_refused(raw_tree: Path, tmp_path: Path) -> None:
    place = tmp_path / "out"
    errors: list[DatasetError] = []

    def intrude(*_: object) -> None:
        with pytest.raises(DatasetError, match=f"{place}.*another process") as raised:
            convert(raw_tree, place, small_recipe("shards"), workers=0)
        errors.append(raised.value)

    assert convert(raw_tree, place, small_recipe("shards"), workers=0, on_start=intrude).published
    assert len(errors) == 1
    assert not lock_path(place).exists()


@pytest.mark.parametrize("kind", ["second name", "fifo"])
def test_a_foreign_file_with_the_name_of_the_lock_is_refused(
    kind: str, raw_tree: Path, tmp_path: Path
) -> None:
    path, victim = lock_path(tmp_path / "out"), tmp_path / "victim"
    victim.write_text("mine")
    os.mkfifo(path) if kind == "fifo" else os.link(victim, path)
    for _ in range(2):
        with pytest.raises(DatasetError, match=str(path)):
            convert(raw_tree, tmp_path / "out", small_recipe("shards"), workers=0)
    assert victim.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [path, victim]


def test_a_file_system_without_locks_is_refused(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(DatasetError, match=os.strerror(errno.ENOLCK)):
        convert(raw_tree, tmp_path / "out", small_recipe("shards"), workers=0)
    assert not (tmp_path / "out").exists()


def test_a_system_without_flock_is_refused_in_one_line(
    raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(SettingError, check=lambda error: "WSL" in error.remedy):
        convert(raw_tree, tmp_path / "out", small_recipe("shards"), workers=0)
    assert not (tmp_path / "out").exists()

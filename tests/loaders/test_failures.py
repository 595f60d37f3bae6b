"""Failures reach the caller, with the file's name."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import psutil
import pytest
from torch.utils.data import DataLoader

import loaders
from loaders.loader import Loader
from precache import open_dataset
from precache.dataset.columns import Column
from precache.errors import DatasetError, PrecacheError, WorkerError
from tests.building import build_loader
from tests.command import ROOT
from tests.damage import edit_samples, flip_a_bit
from tests.loader_contract import ids_of
from tests.loaders.arms import OF_FILES, OF_SHARDS

SHARD = "train-00003"


def replaced(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda path: (path.unlink(), make(path))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "gone": Path.unlink,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a directory": replaced(Path.mkdir),
    # reading it from its start fails, as a bad sector does
    "EIO": replaced(lambda path: path.symlink_to("/proc/self/mem")),
    "another shard": lambda path: path.write_bytes(path.with_name(path.name.replace("3", "2")).read_bytes()),
    "a changed bit": lambda path: flip_a_bit(path.parent, 3),
    "html": lambda path: path.write_bytes(b"<html>"),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name not in ("html", "empty")])
@pytest.mark.parametrize(("backend", "kind"), OF_SHARDS)
def test_a_damaged_shard_is_named(
    backend: str, kind: str, damage: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    """Also where no checksum is compared."""
    path = Path(shutil.copytree(converted[kind], tmp_path / "copy"))
    (shard,) = path.glob(f"{SHARD}*[!x]")  # without .idx
    settings = {"backend": backend, "workers": 1, "batch_size": 16}
    with build_loader(path, **settings) as checking, build_loader(path, check="never", **settings) as other:
        DAMAGE[damage](shard)
        for loader in (checking, other) if damage in ("gone", "a directory", "EIO") else (checking,):
            with pytest.raises(DatasetError) as caught:
                list(loader)
            assert str(shard) in str(caught.value)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name[:2] != "a " and name != "another shard"])
@pytest.mark.parametrize(("backend", "kind"), OF_FILES)
def test_a_damaged_picture_is_named(
    backend: str, kind: str, damage: str, raw_tree: Path, tmp_path: Path
) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    bad = sorted(tree.glob("*/*.jpg"))[40]
    with build_loader(tree, backend=backend, size=32, workers=1, batch_size=16) as loader:
        DAMAGE[damage](bad)
        with pytest.raises(PrecacheError) as caught:
            list(loader)
        assert str(bad) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("backend", "kind"), OF_SHARDS)
def test_labels_that_differ_from_the_index_are_refused(
    backend: str, kind: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(converted[kind], tmp_path / "copy"))
    edit_samples(path, labels=Column(np.roll(open_dataset(path).read_index().labels, 1)))
    with (
        build_loader(path, backend=backend, workers=1) as loader,
        pytest.raises(DatasetError, match=str(path)),
    ):
        list(loader)


@pytest.mark.parametrize("handled", [False, True], ids=["alone", "beside a DataLoader"])
def test_a_killed_worker_is_an_error_not_a_hang(handled: bool, raw_tree: Path) -> None:
    """torch's own handler, which a DataLoader of the training code sets up, raises in the main thread."""
    if handled:
        list(DataLoader([1, 2], num_workers=1))
    before = psutil.Process().children()
    with build_loader(raw_tree, size=32, workers=1, batch_size=1) as loader:
        iterator = iter(loader)
        next(iterator)
        (worker,) = (c for c in psutil.Process().children() if c not in before)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(PrecacheError, match="fewer workers"):
            list(iterator)


OURS = str(Path(loaders.__file__).parent)


class Interruption:
    """What torch's handler of SIGCHLD raises between any two lines: at the `line`-th of ours."""

    def __init__(self, line: int, spared: CodeType | None = None) -> None:
        self.left = line
        self._spared = spared

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        ours = frame.f_code.co_filename.startswith(OURS) and frame.f_code is not self._spared
        if event == "line" and ours:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")
        return self

    def __enter__(self) -> "Interruption":
        sys.settrace(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)


def test_the_death_of_a_worker_is_one_error_wherever_the_caller_is(converted: dict[str, Path]) -> None:
    with build_loader(converted["shards"], batch_size=16) as loader:
        due = ids_of(loader)
        for line in count(2):  # before the first, it is the caller who is interrupted
            loader.set_epoch(0)
            iterator = iter(loader)
            with suppress(WorkerError), Interruption(line) as interruption:
                next(iterator)
            if interruption.left > 0:
                break
            assert next(iterator, None) is None
            loader.set_epoch(0)
            assert ids_of(loader) == due, "nothing that was read ahead is taken for another batch"
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert line > 20


@pytest.mark.parametrize("backend", ["shards", "pytorch"])
def test_the_death_of_a_worker_while_a_loader_is_closed_is_no_error(
    backend: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    path = raw_tree if backend == "pytorch" else converted["shards"]
    before = psutil.Process().children(), threading.active_count()
    for line in count(1, 11 if backend == "pytorch" else 2):
        loader = build_loader(path, backend=backend, size=32, batch_size=16, workers=1)
        next(iter(loader))
        with Interruption(line, Loader.close.__code__) as interruption:
            loader.close()
        assert (psutil.Process().children(), threading.active_count()) == before
        if interruption.left > 0:
            break
    assert line > 20


TRUNCATE_IN_PLACE = """
import os, sys
import loaders

path, shard = sys.argv[1:]
with loaders.build(path, batch_size=16, reading=loaders.Reading(check="never", workers=2)) as loader:
    list(loader)
    os.truncate(shard, 5000)
    for _ in range(3):
        list(loader)
"""


def test_a_shard_truncated_in_place_ends_the_program(converted: dict[str, Path], tmp_path: Path) -> None:
    """What a mapped file has no longer cannot be read; promises.md says so, and that we truncate none."""
    path = Path(shutil.copytree(converted["shards"], tmp_path / "copy"))
    result = subprocess.run(
        [sys.executable, "-c", TRUNCATE_IN_PLACE, str(path), str(path / f"{SHARD}.safetensors")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == -signal.SIGBUS, result

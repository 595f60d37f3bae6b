"""Failures reach the caller, with the file's name."""

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
from torch.utils.data import DataLoader

import loaders
from precache import open_dataset
from precache.dataset.columns import Column
from precache.dataset.index import INDEX_NAME
from precache.errors import DatasetError, PrecacheError, SettingError, WorkerError
from tests.building import build_loader
from tests.command import ROOT
from tests.conftest import IMAGES
from tests.damage import edit_samples
from tests.limits import no_more_threads
from tests.loader_contract import ids_of
from tests.loaders.cases import CONVERTED_CASES, TREE_CASES

SHARD = "train-00003"
DAMAGE: dict[str, Callable[[Path], Any]] = {
    "gone": Path.unlink,
    # reading it from its start fails, as a bad sector does
    "EIO": lambda path: (path.unlink(), path.symlink_to("/proc/self/mem")),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "swapped": lambda path: shutil.copy(path.with_name(path.name.replace("3", "2")), path),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(("backend", "kind"), [*CONVERTED_CASES, *TREE_CASES])
def test_a_damaged_shard_is_named(
    backend: str, kind: str, damage: str, raw_tree: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """A shard that cannot be read, or a picture of a tree, is named even without checksums."""
    if kind == "raw" and damage == "swapped":
        pytest.skip("a raw tree has no checksums")
    path = Path(shutil.copytree({"raw": raw_tree, **converted}[kind], tmp_path / "copy"))
    (bad,) = [*path.glob(f"{SHARD}*[!x]"), *sorted(path.glob("*/*.jpg"))[40:41]]  # without .idx
    settings = {"backend": backend, "size": 32, "workers": 1, "batch_size": 16}
    with build_loader(path, **settings) as checking, build_loader(path, check="never", **settings) as other:
        DAMAGE[damage](bad)
        for loader in (checking, other) if damage in ("gone", "EIO") else (checking,):
            with pytest.raises(PrecacheError) as caught:
                list(loader)
            assert str(bad) in str(caught.value)
            if damage == "EIO":  # it may be intact
                assert "rewrite" not in caught.value.remedy


@pytest.mark.parametrize(("backend", "kind"), CONVERTED_CASES)
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
        worker.kill()
        with pytest.raises(WorkerError, check=lambda error: "workers" in error.remedy):
            list(iterator)
        loader.set_epoch(0)
        assert sorted(ids_of(loader)) == [*range(IMAGES)], "by new workers"


@pytest.mark.parametrize("limit", ["threads", "processes"])
@pytest.mark.parametrize(("backend", "kind"), [*CONVERTED_CASES, *TREE_CASES])
def test_no_further_thread_or_process_is_an_error_that_loses_no_sample(
    backend: str,
    kind: str,
    limit: str,
    raw_tree: Path,
    converted: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test runs as root perhaps, for whom there is no limit of processes: it is simulated."""
    path = {"raw": raw_tree, **converted}[kind]

    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with build_loader(path, backend=backend, size=16, workers=1) as loader:
        with no_more_threads() if limit == "threads" else monkeypatch.context() as patch:
            if patch is not None:
                patch.setattr(os, "fork", refuse)
            starts_none = limit == "processes" and backend != "pytorch"
            may_raise = nullcontext() if starts_none else pytest.raises(WorkerError)
            with may_raise as caught:
                list(loader)
            if caught is not None:
                assert "ulimit -u" in caught.value.remedy
        loader.set_epoch(0)
        assert sorted(ids_of(loader)) == [*range(IMAGES)]
    gc.collect()  # here and not in another test: torch's half-made iterator raises when it is collected


PACKAGE = str(Path(loaders.__file__).parent)


@dataclass
class Interruption:
    """Raises the error of torch's SIGCHLD handler, which may come between any two lines of code.

    Attributes:
        lines_left: lines of this package that run before it is raised.
    """

    lines_left: int

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and frame.f_code.co_filename.startswith(PACKAGE):
            self.lines_left -= 1
            if self.lines_left == 0:
                raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")
        return self.trace

    def __enter__(self) -> "Interruption":
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def test_a_dead_worker_is_one_error_at_any_line_of_the_loader(converted: dict[str, Path]) -> None:
    """Also while the thread that reads ahead starts: the loader goes on with it, or with another one."""
    with build_loader(converted["shards"], batch_size=16) as loader:
        expected = ids_of(loader)
    for line in count(2):  # an interruption before the first line is in the caller's code
        with build_loader(converted["shards"], batch_size=16) as loader:
            iterator = iter(loader)
            with suppress(WorkerError), Interruption(line) as interruption:
                next(iterator)
            if interruption.lines_left > 0:
                break
            assert next(iterator, None) is None
            loader.set_epoch(0)
            assert ids_of(loader) == expected, "nothing that was read ahead is taken for another batch"
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert line > 40


@dataclass
class Closing(Interruption):
    """Closes a loader between two lines of its code, as a signal handler may."""

    loader: loaders.Loader

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        with suppress(RuntimeError):
            return super().trace(frame, event, argument)
        sys.settrace(None)
        self.loader.close()
        return None


def test_a_signal_handler_may_close_the_loader_at_any_line(converted: dict[str, Path]) -> None:
    for line in count(2):
        with build_loader(converted["shards"], batch_size=16) as loader:
            iterator = iter(loader)
            with suppress(SettingError), Closing(line, loader) as closing:
                next(iterator)
            if closing.lines_left > 0:
                break
            with pytest.raises(SettingError, match="closed"):
                next(iter(loader))
    assert line > 40


TRUNCATE_IN_PLACE = """
import os, sys
import loaders

path, mapped, left = sys.argv[1:]
with loaders.build(path, batch_size=16, reading=loaders.Reading(check="never", workers=2)) as loader:
    list(loader)
    os.truncate(mapped, int(left))
    for _ in range(3):
        list(loader)
"""


@pytest.mark.parametrize(("name", "left"), [(f"{SHARD}.safetensors", 5000), (INDEX_NAME, 0)])
def test_a_file_truncated_in_place_ends_the_program(
    name: str, left: int, converted: dict[str, Path], tmp_path: Path
) -> None:
    """A mapped page behind the end of its file cannot be read; this project truncates no file in place."""
    path = Path(shutil.copytree(converted["shards"], tmp_path / "copy"))
    command = [sys.executable, "-c", TRUNCATE_IN_PLACE, str(path), str(path / name), str(left)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert result.returncode == -signal.SIGBUS, result

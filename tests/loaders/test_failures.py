"""Failures reach the caller, with the file's name."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import loaders
from loaders.loader import Loader
from precache import open_dataset
from precache.dataset.columns import Column
from precache.errors import DatasetError, PrecacheError, WorkerError
from precache.formats.shards import DATA_START
from tests.building import build_loader
from tests.command import ROOT
from tests.damage import edit_samples, flip_a_bit
from tests.loader_contract import ids_of


@pytest.mark.parametrize("backend", ["pytorch", "dali"])
@pytest.mark.parametrize("damage", ["html", "truncated", "empty", "gone"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_picture_is_named(
    backend: str, damage: str, workers: int, raw_tree: Path, tmp_path: Path
) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    bad = sorted(tree.glob("*/*.jpg"))[40]
    with build_loader(tree, backend=backend, size=32, workers=workers, batch_size=16) as loader:
        if damage == "gone":
            bad.unlink()
        else:
            content = bad.read_bytes()
            bad.write_bytes(
                {"html": b"<html>", "truncated": content[: len(content) // 2], "empty": b""}[damage]
            )
        with pytest.raises(PrecacheError, match=str(bad)) as caught:
            list(loader)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("shards", "shards"), ("webdataset", "webdataset"), ("dali", "webdataset"), ("dali", "dali")],
)
@pytest.mark.parametrize("damage", ["gone", "truncated", "swapped", "flipped bit"])
def test_a_damaged_shard_is_named(
    backend: str, kind: str, damage: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    path = Path(shutil.copytree(converted[kind], tmp_path / "copy"))
    files = sorted(path.glob("train-*[!x]"))  # without .idx
    content = files[3].read_bytes()
    with build_loader(path, backend=backend, workers=2, batch_size=16) as loader:
        if damage == "gone":
            files[3].unlink()
        elif damage == "truncated":
            files[3].write_bytes(content[: len(content) - 12_000])
        elif damage == "swapped":
            files[3].write_bytes(files[2].read_bytes())
        else:
            flip_a_bit(path, 3)
        with pytest.raises(DatasetError, match=str(files[3])) as caught:
            list(loader)
        assert "\n" not in str(caught.value)
        assert "precache verify" in str(caught.value)


@pytest.mark.parametrize("backend", ["webdataset", "dali"])
def test_a_jpeg_with_a_damaged_header_is_named(
    backend: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    """DALI 2.4 itself crashes on this one."""
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    path = Path(shutil.copytree(converted["webdataset"], tmp_path / "copy"))
    shard = path / "train-00000.tar"
    content = bytearray(shard.read_bytes())
    content[512:812] = bytes(300)
    shard.write_bytes(content)
    with (
        build_loader(path, backend=backend, shuffle=False, workers=2, check="never") as loader,
        pytest.raises(PrecacheError, match=f"{shard}: sample .* cannot be decoded"),
    ):
        list(loader)


@pytest.mark.parametrize("backend", ["shards", "webdataset", "dali"])
def test_labels_that_differ_from_the_index_are_refused(
    backend: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    path = Path(shutil.copytree(converted[backend], tmp_path / "copy"))
    edit_samples(path, labels=Column(np.roll(open_dataset(path).read_index().labels, 1)))
    with (
        build_loader(path, workers=1) as loader,
        pytest.raises(DatasetError, match="holds other samples than the dataset's index says"),
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


def test_a_flipped_bit_is_served_where_nothing_is_checked(converted: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "copy"))
    shard = path / open_dataset(path).manifest.shards[0].file_name
    content = bytearray(shard.read_bytes())
    content[DATA_START] ^= 16
    shard.write_bytes(content)
    served = []
    for folder in (path, converted["shards"]):
        with build_loader(folder, shuffle=False, check="never") as loader:
            served.append(torch.cat([batch.images for batch in loader]))
    assert (served[0] != served[1]).sum() == 1


TRUNCATE_IN_PLACE = """
import os, sys
import loaders
from precache.errors import DatasetError

path, shard = sys.argv[1:]
with loaders.build(path, batch_size=16, reading=loaders.Reading(check="never", workers=2)) as loader:
    list(loader)
    os.truncate(shard, 5000)
    try:
        for _ in range(3):
            list(loader)
    except DatasetError as error:
        print(error)
"""


def test_a_shard_truncated_in_place_ends_the_program(converted: dict[str, Path], tmp_path: Path) -> None:
    """What a mapped file has no longer cannot be read; promises.md says so, and that we truncate none."""
    path = Path(shutil.copytree(converted["shards"], tmp_path / "copy"))
    shard = sorted(path.glob("*.safetensors"))[3]
    result = subprocess.run(
        [sys.executable, "-c", TRUNCATE_IN_PLACE, str(path), str(shard)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == -signal.SIGBUS, result


@pytest.mark.parametrize("backend", ["pytorch", "dali"])
@pytest.mark.parametrize("damage", ["EIO", "a directory", "no permission"])
def test_a_picture_that_the_disk_does_not_give_is_named(
    backend: str, damage: str, raw_tree: Path, tmp_path: Path
) -> None:
    """Reading /proc/self/mem from its start fails with EIO, as a bad sector does."""
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    if damage == "EIO" and not Path("/proc/self/mem").exists():
        pytest.skip("no /proc")
    if damage == "no permission" and os.geteuid() == 0:
        pytest.skip("root may read everything")
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    bad = sorted(tree.glob("*/*.jpg"))[40]
    with build_loader(tree, backend=backend, size=32, workers=1, batch_size=16) as loader:
        bad.unlink()
        if damage == "EIO":
            bad.symlink_to("/proc/self/mem")
        elif damage == "a directory":
            bad.mkdir()
        else:
            bad.touch(mode=0)
        with pytest.raises(PrecacheError, match=str(bad)) as caught:
            list(loader)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("shards", "shards"), ("webdataset", "webdataset"), ("dali", "webdataset"), ("dali", "dali")],
)
@pytest.mark.parametrize("check", ["first-read", "never"])
@pytest.mark.parametrize("damage", ["EIO", "a directory"])
def test_a_shard_that_the_disk_does_not_give_is_named(
    backend: str, kind: str, check: str, damage: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    if damage == "EIO" and not Path("/proc/self/mem").exists():
        pytest.skip("no /proc")
    path = Path(shutil.copytree(converted[kind], tmp_path / "copy"))
    shard = sorted(path.glob("train-*[!x]"))[3]  # without .idx
    with build_loader(path, backend=backend, workers=1, batch_size=16, check=check) as loader:
        shard.unlink()
        if damage == "EIO":
            shard.symlink_to("/proc/self/mem")
        else:
            shard.mkdir()
        with pytest.raises(DatasetError, match=str(shard)) as caught:
            list(loader)
        assert "\n" not in str(caught.value)

"""Loaders keep few files open at a time, and report clearly if the process may open no more."""

import gc
import multiprocessing
import os
import resource
import socket
import tracemalloc  # noqa: F401 (pytest would, when there is no file for it)
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import loaders
from precache import convert
from precache.errors import OpenFilesError
from precache.formats import FORMATS
from precache.storage.urls import Url
from tests.building import build_loader
from tests.cloud.uploading import upload
from tests.conftest import IMAGES, small_recipe
from tests.loader_contract import ids_of
from tests.loaders.cases import CONVERTED_CASES, TREE_CASES

ALL_IDS = [*range(IMAGES)]
SHUFFLES: tuple[Any, ...] = (True, "window", False)


@contextmanager
def free_files(count: int) -> Iterator[None]:
    """Limit this process to opening `count` more files within the block."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/dev/fd")))
    fillers = [os.open(os.devnull, os.O_RDONLY)]  # take all free descriptors below the highest
    while fillers[-1] < highest:
        fillers.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers) + 1 + count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in fillers:
            os.close(descriptor)


@pytest.fixture(scope="module")
def scattered(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Paths of the raw tree, and of its conversions to each format with one shard per picture."""
    root = tmp_path_factory.mktemp("scattered")
    for name in FORMATS:
        convert(raw_tree, root / name, small_recipe(name, size=16, shard_bytes=1), workers=0)
        assert len([*(root / name).glob("train-*[!x]")]) == IMAGES
    return {"raw": raw_tree, **{name: root / name for name in FORMATS}}


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize(("backend", "kind"), [*CONVERTED_CASES, *TREE_CASES])
def test_open_files_do_not_grow_with_the_number_of_shards(
    backend: str, kind: str, shuffle: Any, scattered: dict[str, Path]
) -> None:
    """A validation with one batch of all samples runs in the middle of a training epoch."""
    if kind == "raw" and shuffle == "window":
        pytest.skip("a raw tree has no shards")
    build = partial(build_loader, scattered[kind], backend=backend, shuffle=shuffle, size=16, workers=1)
    with free_files(60), build(batch_size=8) as training, build(batch_size=IMAGES) as validation:
        batches = iter(training)
        first = next(batches)
        assert sorted(ids_of(validation)) == ALL_IDS
        assert sorted(ids_of([first, *batches])) == ALL_IDS


def test_open_files_stay_few_with_memory_bytes(scattered: dict[str, Path]) -> None:
    settings: dict[str, Any] = {"memory_bytes": 1 << 30, "shuffle": "window"}
    with free_files(30), build_loader(scattered["shards"], size=16, **settings) as loader:
        assert sorted(ids_of(loader)) == sorted(ids_of(loader)) == ALL_IDS


def test_open_files_stay_few_in_a_list_and_an_image_dataset(scattered: dict[str, Path]) -> None:
    dataset = loaders.ImageDataset(scattered["shards"], decode="tensor")
    with free_files(60), build_loader([scattered["shards"]] * 3, size=16) as loader:
        assert sorted(ids_of(loader)) == [*range(3 * IMAGES)]
        assert sum(1 for _ in DataLoader(dataset, batch_size=None, num_workers=2)) == IMAGES


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize(("backend", "kind"), [*CONVERTED_CASES, *TREE_CASES])
def test_batches_that_are_kept_open_no_files(
    backend: str, kind: str, dtype: str, scattered: dict[str, Path]
) -> None:
    """There are more batches than files may be open."""
    settings = {"backend": backend, "size": 16, "batch_size": 1, "dtype": dtype, "workers": 2}
    with free_files(55), build_loader(scattered[kind], **settings) as loader:
        batches = list(loader)
        assert sorted(ids_of(batches)) == ALL_IDS
        assert sorted(ids_of([*loader, *batches])) == sorted(2 * ALL_IDS)


def test_workers_that_are_no_forks_send_no_files_through_sockets(
    raw_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        with build_loader(raw_tree, size=16, workers=1, batch_size=1) as loader:
            batches = iter(loader)
            first = next(batches)
            monkeypatch.setattr(socket, "socket", None)
            with free_files(0):
                assert sorted(ids_of([first, *batches])) == ALL_IDS
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize(
    ("kind", "shuffle"),
    [("shards", "full"), ("shards", "window"), ("shards", False), ("webdataset", "window")],
)
def test_open_files_stay_few_at_a_url(
    kind: str,
    shuffle: Any,
    scattered: dict[str, Path],
    bucket: Url,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache"))
    url = upload(scattered[kind], bucket / kind)
    with free_files(90), build_loader(url, size=16, batch_size=4, shuffle=shuffle) as loader:
        assert sorted(ids_of(loader)) == sorted(ids_of(loader)) == ALL_IDS


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's own iterator
@pytest.mark.parametrize("when", ["before", "midway"])
@pytest.mark.parametrize(("backend", "kind"), [*CONVERTED_CASES, *TREE_CASES])
def test_too_many_open_files_are_an_error_that_loses_no_sample(
    backend: str, kind: str, when: str, scattered: dict[str, Path]
) -> None:
    """Once other files have been closed, all samples are served."""
    with build_loader(scattered[kind], backend=backend, size=16, batch_size=8, workers=1) as loader:
        batches = iter(loader)
        if when == "midway":
            next(batches)
        with free_files(0):
            # midway, workers may have opened all they need, and some batches have been read ahead
            may_raise = suppress(OpenFilesError) if when == "midway" else pytest.raises(OpenFilesError)
            with may_raise as caught:
                list(batches)
            if caught is not None:
                assert "ulimit -n" in caught.value.remedy
                assert "verify" not in str(caught.value)
            if when == "before":  # midway, threads that read ahead close files, and others can be opened
                with pytest.raises(OpenFilesError, match=str(scattered[kind])):
                    build_loader(scattered[kind], backend=backend)
        assert sorted(ids_of(loader)) == ALL_IDS
    gc.collect()  # here and not in another test: torch's half-made iterator raises when it is collected

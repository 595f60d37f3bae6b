"""How many files loaders open at a time, over all of a process; and what is said where there is no room."""

import gc
import os
import resource
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

EVERY = [*range(IMAGES)]
SHUFFLES: tuple[Any, ...] = (True, "window", False)


@contextmanager
def free_files(count: int) -> Iterator[None]:
    """This process can open so many files, and no more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/dev/fd")))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < highest:
        taken.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1 + count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)


@pytest.fixture(scope="module")
def scattered(raw_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tree in each format, a shard for each picture; and as it is."""
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
    """A validation runs in the midst of a training, with a batch of all."""
    if kind == "raw" and shuffle == "window":
        pytest.skip("of a tree there are no shards")
    build = partial(build_loader, scattered[kind], backend=backend, shuffle=shuffle, size=16, workers=1)
    with free_files(60), build(batch_size=8) as training, build(batch_size=IMAGES) as validation:
        batches = iter(training)
        first = next(batches)
        assert sorted(ids_of(validation)) == EVERY
        assert sorted(ids_of([first, *batches])) == EVERY


@pytest.mark.parametrize(
    "settings", [{"cache": "ram"}, {"memory_bytes": 1 << 30, "shuffle": "window"}], ids=str
)
def test_open_files_stay_few_with_a_cache_or_memory_bytes(
    settings: dict[str, Any], scattered: dict[str, Path]
) -> None:
    with free_files(30), build_loader(scattered["shards"], size=16, **settings) as loader:
        assert sorted(ids_of(loader)) == sorted(ids_of(loader)) == EVERY


def test_open_files_stay_few_in_a_mixture_and_an_image_dataset(scattered: dict[str, Path]) -> None:
    dataset = loaders.ImageDataset(scattered["shards"], decode="tensor")
    with free_files(60), build_loader([scattered[name] for name in FORMATS], size=16) as mixture:
        assert sorted(ids_of(mixture)) == sorted(EVERY * len(FORMATS))
        assert sum(1 for _ in DataLoader(dataset, batch_size=None, num_workers=2)) == IMAGES


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
        assert sorted(ids_of(loader)) == sorted(ids_of(loader)) == EVERY


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's own iterator
@pytest.mark.parametrize("when", ["before", "midway"])
@pytest.mark.parametrize(("backend", "kind"), [*CONVERTED_CASES, *TREE_CASES])
def test_too_many_open_files_are_an_error_that_loses_no_sample(
    backend: str, kind: str, when: str, scattered: dict[str, Path]
) -> None:
    """Nothing is wrong with the dataset: once others have closed their files, all of it is served."""
    with build_loader(scattered[kind], backend=backend, size=16, batch_size=8, workers=1) as loader:
        batches = iter(loader)
        if when == "midway":
            next(batches)
        with free_files(0):
            # midway, workers have what they need, and what was read ahead is there
            may_end = suppress(OpenFilesError) if when == "midway" else pytest.raises(OpenFilesError)
            with may_end as caught:
                list(batches)
            if caught is not None:
                assert "ulimit -n" in str(caught.value)
                assert "verify" not in str(caught.value)
            if when == "before":  # midway, threads that read ahead close files, and there is room again
                with pytest.raises(OpenFilesError, match=str(scattered[kind])):
                    build_loader(scattered[kind], backend=backend)
        assert sorted(ids_of(loader)) == EVERY
    gc.collect()  # now, and not in the midst of another test: torch's iterator, half made, fails once more

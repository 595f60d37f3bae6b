"""What is kept in memory that does not hold everything, and how processes would find it."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loaders import Loader
from loaders.augment.cpu import Crops
from loaders.batch import Request
from loaders.dataset import open_split
from loaders.deliver.devices import Lane
from loaders.read import host_memory, shards
from loaders.read.cache import open_cached
from precache import convert
from precache.errors import DatasetError
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE, small_recipe
from tests.loader_contract import ids_of
from tests.loaders.sharing import memory_files


def allow(monkeypatch: pytest.MonkeyPatch, pictures: int) -> None:
    """Memory for so many as are stored is free: the machine's is the one thing that a test cannot use up."""
    free = pictures * STORED_SIZE**2 * 3
    monkeypatch.setattr(host_memory, "free_memory", lambda: (free, 0))


@pytest.fixture
def folders(raw_tree: Path, converted: dict[str, Path], shaped: dict[str, Path]) -> dict[str, Path]:
    return {"raw": raw_tree, **converted, **shaped}


def how_many_are_kept(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Of each cache that was opened since and cannot keep all samples."""
    said = re.findall(rf"keeps (\d+) of {IMAGES} samples", caplog.text)
    caplog.clear()
    return [*map(int, said)]


def same(ours: Loader, theirs: Loader, epochs: int = 3) -> None:
    for _ in range(epochs):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.ids, b.ids)
            assert torch.equal(a.labels, b.labels)
            assert torch.equal(a.images, b.images)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("shards", {}),
        ("shards", {"shuffle": "window"}),
        ("shards", {"augment": "train", "size": 32}),
        ("webdataset", {"shuffle": False, "size": 32}),
        ("webdataset", {"weights": np.arange(IMAGES) % 3, "views": 2, "augment": "train"}),
        ("keep-shards", {"shuffle": "window", "augment": "crop", "size": 32}),
        ("keep-webdataset", {}),
        ("raw", {"augment": "train", "size": 32}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_a_share_of_what_does_not_fit_serves_the_same_pixels(
    kind: str,
    how: dict[str, Any],
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    allow(monkeypatch, 30 if kind != "raw" else 2000)  # larger pictures
    settings = {"workers": 2, "batch_size": 8, "size": 36, **how}
    with (
        build_loader(folders[kind], **settings) as plain,
        build_loader(folders[kind], cache="ram", **settings) as cached,
    ):
        (kept,) = how_many_are_kept(caplog)
        assert 8 <= kept < IMAGES
        same(cached, plain)


@pytest.mark.parametrize("shuffle", ["window", False])
def test_shards_that_are_kept_are_never_opened_again(
    shuffle: object, raw_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, 30)
    path = tmp_path / "shards"  # of three pictures: many more than two windows of them
    convert(raw_tree, path, small_recipe("shards", shard_bytes=3 * STORED_SIZE**2 * 3), workers=0)
    with build_loader(path, cache="ram", shuffle=shuffle, workers=1, batch_size=8) as loader:
        files = open_split(path, "train").files
        first = ids_of(loader)
        for file in files[:10]:  # of the 30 pictures that are kept
            Path(file).unlink()
        for _ in range(3):
            assert sorted(ids_of(loader)) == sorted(first)
        for file in files[10:]:
            Path(file).unlink()
        with pytest.raises(DatasetError):
            ids_of(loader)


def test_a_cache_that_lacks_little_does_not_look_ahead_for_epochs(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of shards is read ahead, of which hardly a sample is still asked for."""
    allow(monkeypatch, IMAGES - 1)
    settings: dict[str, Any] = {"shuffle": "window", "workers": 1, "size": STORED_SIZE, "cache": "ram"}
    with build_loader(converted["shards"], **settings) as loader:
        spec = loader.spec
    data, crops = open_split(converted["shards"], "train"), Crops(STORED_SIZE, STORED_SIZE)
    asked = 0

    def ask() -> Iterator[Request]:
        nonlocal asked
        for asked in range(20 * IMAGES):
            yield Request(asked // IMAGES, np.array([asked % IMAGES]))

    open_shards = partial(shards.open_reader, spec, data)
    reader = open_cached(open_shards, "shards", spec, data, crops, Lane(spec.device))
    with closing(reader):
        for number, batch in enumerate(reader.read(ask())):
            assert len(batch.images) == 1
            assert asked - number < 600
    assert number + 1 == 20 * IMAGES


def test_auto_takes_half_of_what_is_free_and_nothing_where_that_keeps_little(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"cache": "auto", "workers": 1, "size": STORED_SIZE}
    for free, kept in ((2 * IMAGES, []), (60, [30]), (14, [7])):
        allow(monkeypatch, free)
        build_loader(converted["shards"], **settings).close()
        assert how_many_are_kept(caplog) == kept
    allow(monkeypatch, 13)
    with build_loader(converted["shards"], **settings) as loader:
        assert len(ids_of(loader)) == IMAGES
        assert not memory_files()
    assert "cache 'auto' keeps nothing" in caplog.text
    caplog.clear()
    build_loader(converted["shards"], backend="synthetic", **settings).close()
    assert not caplog.text


def test_what_is_promised_to_others_is_not_free(
    converted: dict[str, Path],
    raw_tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Memory files take no memory until they are written to."""
    allow(monkeypatch, 100)
    settings: dict[str, Any] = {"cache": "ram", "workers": 0, "size": STORED_SIZE}
    with build_loader(converted["shards"], **settings), build_loader(raw_tree, **settings):
        (second,) = how_many_are_kept(caplog)
        assert 25 <= second <= 30


def test_loaders_of_one_process_share_with_other_crops_and_epochs(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(converted["webdataset"], tmp_path / "copy"))
    common: dict[str, Any] = {"workers": 1, "batch_size": 16, "augment": "train"}
    with (
        build_loader(path, size=32, cache="ram", **common) as first,
        build_loader(path, size=24, seed=5, cache="ram", **common) as second,
        build_loader(converted["webdataset"], size=24, seed=5, **common) as plain,
    ):
        list(first)
        list(first)  # what was read ahead of the first epoch's end
        first.close()
        shutil.rmtree(path)
        for loader in (second, plain):
            loader.set_epoch(3)
        same(second, plain)


def test_another_picture_of_the_same_name_is_not_served_from_memory(raw_tree: Path, tmp_path: Path) -> None:
    tree = Path(shutil.copytree(raw_tree, tmp_path / "tree"))
    settings = {"workers": 0, "batch_size": 16, "size": 32}
    with build_loader(tree, cache="ram", **settings) as first:
        list(first)
        picture = sorted(tree.glob("*/*.jpg"))[40]
        other = next(p for p in sorted(tree.glob("*/*.jpg")) if p.stat().st_size < picture.stat().st_size)
        size = picture.stat().st_size
        picture.write_bytes(other.read_bytes().ljust(size, b"\0"))  # the digest goes by names and sizes
        with (
            build_loader(tree, cache="ram", **settings) as second,
            build_loader(tree, **settings) as plain,
        ):
            same(second, plain)


@pytest.mark.parametrize(
    "other", [{"size": 32}, {"split": "val"}, {"check": "never"}, {"backend": "dali"}], ids=str
)
def test_what_would_be_other_pixels_is_not_shared(
    other: dict[str, Any], raw_tree: Path, tmp_path: Path
) -> None:
    if other.get("backend") == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    path = tmp_path / "out"
    convert(raw_tree, path, small_recipe("webdataset", splits="train=0.5,val=0.5"), workers=0)
    settings: dict[str, Any] = {"cache": "ram", "workers": 1, "size": STORED_SIZE, "split": "train"}
    with build_loader(path, **settings), build_loader(path, **{**settings, **other}):
        assert len(memory_files()) == 2


def test_what_cannot_be_shared_is_said_once_and_kept(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a system without memory files; the room is that of as many copies as there are ranks."""
    monkeypatch.setattr("sys.platform", "darwin")
    allow(monkeypatch, 60)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    settings = {"workers": 1, "batch_size": 16, "size": STORED_SIZE}
    with (
        build_loader(converted["shards"], cache="ram", **settings) as loader,
        build_loader(converted["shards"], **settings) as plain,
    ):
        same(loader, plain)
    assert caplog.text.count("for itself") == 1
    assert how_many_are_kept(caplog) == [30]


def test_memory_that_is_given_back_is_nowhere_to_be_found(converted: dict[str, Path]) -> None:
    with build_loader(converted["shards"], cache="ram", workers=1) as loader:
        list(loader)
        assert len(memory_files()) == 1
    assert not memory_files()
    loader = build_loader(converted["shards"], cache="ram", workers=1)
    list(loader)
    del loader  # nobody closes it: its thread ends by itself
    deadline_s = time.monotonic() + 20
    while memory_files():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_nobody_can_shorten_the_memory_or_read_it_as_another_user() -> None:
    memory = host_memory.share_memory("sealed", lambda promised: 10_000)
    (path,) = memory_files().values()
    assert os.stat(path).st_mode & 0o777 == 0o600
    with open(path, "r+b") as file:
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(file.fileno(), size)
    del memory


def test_who_comes_at_the_same_time_gets_the_same_memory() -> None:
    made = []

    def size_of(promised: int) -> int:
        time.sleep(0.02)  # in which the others look for it
        made.append(promised)
        return 100

    with ThreadPoolExecutor(8) as threads:
        memories = [*threads.map(lambda _: host_memory.share_memory("race", size_of), range(8))]
    assert len(made) == len(memory_files()) == 1
    del memories


def test_memory_that_was_never_finished_is_made_anew() -> None:
    descriptor = os.memfd_create(f"{host_memory._PREFIX}half", os.MFD_ALLOW_SEALING)
    memory = host_memory.share_memory("half", lambda promised: 8)
    os.close(descriptor)
    assert memory is not None
    assert len(memory) == 8


def test_a_control_group_limits_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: str, **files: object) -> None:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (tmp_path / folder / name.replace("memory_", "memory.")).write_text(f"{content}\n")

    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    own = "0::/job/step\n"
    read = host_memory._read
    monkeypatch.setattr(
        host_memory, "_read", lambda path: own if str(path) == "/proc/self/cgroup" else read(path)
    )
    free, _ = host_memory.free_memory()
    assert free > 1 << 20
    write("job", memory_max=3 << 20, memory_current=2 << 20, memory_stat="anon 5\ninactive_file 4096")
    write("job/step", memory_max="max", memory_current=1 << 20)
    assert host_memory.free_memory() == ((1 << 20) + 4096, 3 << 20)
    own = "9:cpu:/x\n4:memory:/api/1\n0::/\n"
    write("memory/api", memory_limit_in_bytes=1 << 62, memory_usage_in_bytes=5)
    write("memory", memory_limit_in_bytes=500_000, memory_usage_in_bytes=400_000)
    assert host_memory.free_memory() == (100_000, 500_000)

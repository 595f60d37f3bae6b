"""What is kept in memory that does not hold everything, and how processes would find it."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loaders import Loader
from loaders.dataset import open_split
from loaders.read import host_memory
from loaders.read.cache import CachedReader, HostPictures, Places, choose_share
from precache import convert
from precache.errors import DatasetError
from tests.building import build_loader
from tests.conftest import IMAGES, STORED_SIZE, small_recipe
from tests.loader_contract import ids_of

PICTURE = STORED_SIZE**2 * 3
ROOM = 30 * PICTURE


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 30 pictures: the machine's memory is the one thing that a test cannot use up."""
    monkeypatch.setattr(host_memory, "free_memory", lambda: (ROOM, 0))


@pytest.fixture
def folders(raw_tree: Path, converted: dict[str, Path], shaped: dict[str, Path]) -> dict[str, Path]:
    return {"raw": raw_tree, **converted, **shaped}


def kept_by(loader: Loader) -> HostPictures:
    reader = loader._source._reader  # type: ignore[attr-defined]
    while not isinstance(reader, CachedReader):
        reader = reader._reader
    assert isinstance(reader._kept, HostPictures)
    return reader._kept


def same(ours: Loader, theirs: Loader, epochs: int = 3) -> None:
    for _ in range(epochs):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.ids, b.ids)
            assert torch.equal(a.labels, b.labels)
            assert torch.equal(a.images, b.images)


@pytest.mark.usefixtures("little_room")
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
    kind: str, how: dict[str, Any], folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"workers": 2, "batch_size": 8, "size": 36, **how}
    with (
        build_loader(folders[kind], **settings) as plain,
        build_loader(folders[kind], cache="ram", **settings) as cached,
    ):
        share = kept_by(cached).share
        assert 0 < share.samples < IMAGES
        assert 0.6 * ROOM < share.total_bytes <= ROOM
        same(cached, plain)
    (said,) = [r.getMessage() for r in caplog.records if "cache 'ram'" in r.getMessage()]
    assert f"keeps {share.samples} of {IMAGES} samples" in said


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("shuffle", ["window", False])
def test_shards_that_are_kept_are_never_opened_again(shuffle: object, raw_tree: Path, tmp_path: Path) -> None:
    path = tmp_path / "shards"  # of three pictures: many more than two windows of them
    convert(raw_tree, path, small_recipe("shards", shard_bytes=3 * PICTURE), workers=0)
    with build_loader(path, cache="ram", shuffle=shuffle, workers=1, batch_size=8) as loader:
        data = open_split(path, "train")
        whole = np.flatnonzero(kept_by(loader).share.counts == data.shard_samples)
        assert len(whole) == 10
        first = ids_of(loader)
        for shard in whole.tolist():
            Path(data.files[shard]).unlink()
        for _ in range(3):
            assert sorted(ids_of(loader)) == sorted(first)
        for file in data.files:
            Path(file).unlink(missing_ok=True)
        with pytest.raises(DatasetError):
            ids_of(loader)


@pytest.mark.parametrize("kind", ["shards", "keep-shards", "raw"])
def test_the_same_room_keeps_the_same_samples_and_fills_it(kind: str, folders: dict[str, Path]) -> None:
    data = open_split(folders[kind], "train")
    places = Places(data, None if data.shapes is not None else PICTURE)
    shapes = data.shapes_at(slice(None)).prod(axis=1) * 3 if data.shapes is not None else None
    lengths = np.full(len(data.ids), PICTURE) if shapes is None else shapes
    everything = np.arange(len(data.ids))
    for most in (
        0,
        1,
        PICTURE - 1,
        PICTURE,
        5 * PICTURE,
        ROOM,
        places.total_bytes - 1,
        places.total_bytes,
        1 << 40,
    ):
        share = choose_share(data, places, most)
        numbers = share.find(everything)
        chosen = np.flatnonzero(numbers >= 0)
        assert sorted(numbers[chosen].tolist()) == list(range(share.samples))
        assert share.total_bytes == lengths[chosen].sum() <= most
        assert share.total_bytes > min(most, places.total_bytes) - lengths.max()
        starts = share.starts(chosen)
        order = np.argsort(starts)
        assert (starts[order] == np.cumsum(lengths[chosen][order]) - lengths[chosen][order]).all()
        again = choose_share(data, places, most)
        assert (again.find(everything) == numbers).all()


def test_auto_takes_half_of_what_is_free_and_nothing_where_that_keeps_little(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"cache": "auto", "workers": 1, "size": STORED_SIZE}
    for free, samples in ((3 * IMAGES * PICTURE, IMAGES), (60 * PICTURE, 30), (14 * PICTURE, 7)):
        monkeypatch.setattr(host_memory, "free_memory", lambda free=free: (free, 0))
        with build_loader(converted["shards"], **settings) as loader:
            assert kept_by(loader).share.samples == samples
    monkeypatch.setattr(host_memory, "free_memory", lambda: (13 * PICTURE, 0))
    caplog.clear()
    with build_loader(converted["shards"], **settings) as loader:
        assert type(loader._source._reader).__name__ == "ShardsReader"  # type: ignore[attr-defined]
        assert len(ids_of(loader)) == IMAGES
    assert "cache 'auto' keeps nothing" in caplog.text
    caplog.clear()
    with build_loader(converted["shards"], backend="synthetic", **settings) as loader:
        assert type(loader._source._reader).__name__ == "SyntheticReader"  # type: ignore[attr-defined]
    assert not caplog.text


def test_what_is_promised_to_others_is_not_free(
    converted: dict[str, Path], raw_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory files take no memory until they are written to."""
    free = 100 * PICTURE
    monkeypatch.setattr(host_memory, "free_memory", lambda: (free, 0))
    settings: dict[str, Any] = {"cache": "ram", "workers": 0, "size": STORED_SIZE}
    with (
        build_loader(converted["shards"], **settings) as first,
        build_loader(raw_tree, **settings) as second,
    ):
        assert kept_by(first).share.samples == IMAGES
        assert 25 <= kept_by(second).share.samples <= 30


def test_loaders_of_one_process_share_with_other_crops_and_epochs(converted: dict[str, Path]) -> None:
    common: dict[str, Any] = {"cache": "ram", "workers": 1, "batch_size": 16, "augment": "train"}
    with build_loader(converted["webdataset"], size=32, **common) as first:
        list(first)
        with (
            build_loader(converted["webdataset"], size=24, seed=5, **common) as second,
            build_loader(converted["webdataset"], size=24, seed=5, **{**common, "cache": "none"}) as plain,
        ):
            assert kept_by(second).there(np.arange(IMAGES)).all()
            first.close()
            for loader in (second, plain):
                loader.set_epoch(3)
            same(second, plain)


def test_a_picture_that_is_not_whole_is_decoded_again(converted: dict[str, Path]) -> None:
    """As where its mark can be seen before all of it can: each byte of memory that is not right is found."""
    settings = {"workers": 1, "batch_size": 16, "size": STORED_SIZE}
    with build_loader(converted["webdataset"], cache="ram", **settings) as first:
        list(first)
        theirs = kept_by(first)
        for position in (0, 7, 69):
            theirs.pictures(np.array([position]))[0][STORED_SIZE // 2 :] = 0
        with (
            build_loader(converted["webdataset"], cache="ram", **settings) as second,
            build_loader(converted["webdataset"], **settings) as plain,
        ):
            there = kept_by(second).there(np.arange(IMAGES))
            assert np.flatnonzero(~there).tolist() == [0, 7, 69]
            same(second, plain)
            assert kept_by(second).there(np.arange(IMAGES)).all()


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
            assert (~kept_by(second).there(np.arange(IMAGES))).sum() == 1
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
    with build_loader(path, **settings) as first, build_loader(path, **{**settings, **other}) as second:
        list(first)
        assert not kept_by(second)._marks.any()


def test_what_cannot_be_shared_is_said_once_and_kept(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a system without memory files; the room is that of as many copies as there are ranks."""
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(host_memory, "free_memory", lambda: (60 * PICTURE, 0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    settings = {"workers": 1, "batch_size": 16, "size": STORED_SIZE}
    with (
        build_loader(converted["shards"], cache="ram", **settings) as loader,
        build_loader(converted["shards"], **settings) as plain,
    ):
        assert kept_by(loader).share.samples == 30
        same(loader, plain)
    lines = [record.getMessage() for record in caplog.records]
    assert [("for itself" in line) for line in lines] == [True, False], lines


def test_memory_that_is_given_back_is_nowhere_to_be_found(converted: dict[str, Path]) -> None:
    with build_loader(converted["shards"], cache="ram", workers=1) as loader:
        list(loader)
        assert len({memory.status.st_ino for memory in host_memory._find()}) == 1
    assert not list(host_memory._find())
    loader = build_loader(converted["shards"], cache="ram", workers=1)
    list(loader)
    del loader  # nobody closes it: its thread ends by itself
    deadline_s = time.monotonic() + 20
    while list(host_memory._find()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_nobody_can_shorten_the_memory_or_read_it_as_another_user() -> None:
    memory = host_memory.share_memory("sealed", lambda promised: 100, lambda most: 10_000)
    assert memory is not None
    (found,) = host_memory._find()
    assert found.status.st_mode & 0o777 == 0o600
    descriptor = os.open(found.path, os.O_RDWR)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)
    joined = host_memory.share_memory("sealed", lambda promised: 7, lambda most: 10_000)
    assert joined is not None
    assert joined.joined
    assert joined.most_bytes == 100
    other = host_memory.share_memory("sealed", lambda promised: 7, lambda most: 20_000)
    assert other is not None
    assert not other.joined, "what is laid out otherwise is another's"


def test_who_comes_at_the_same_time_gets_the_same_memory() -> None:
    def most_bytes(promised: int) -> int:
        time.sleep(0.02)  # in which the others look for it
        return 100

    with ThreadPoolExecutor(8) as threads:
        found = threads.map(
            lambda _: host_memory.share_memory("race", most_bytes, lambda most: 100), range(8)
        )
        memories = list(found)
    assert [memory.joined for memory in memories if memory is not None].count(True) == 7
    assert len({memory.status.st_ino for memory in host_memory._find()}) == 1


def test_memory_that_was_never_finished_is_made_anew() -> None:
    descriptor = os.memfd_create(f"{host_memory._PREFIX}half", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, host_memory.HEADER_BYTES + 8)
    os.pwrite(descriptor, b'{"most_bytes": 8}', 0)
    memory = host_memory.share_memory("half", lambda promised: 8, lambda most: most)
    os.close(descriptor)
    assert memory is not None
    assert not memory.joined


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

"""Conversions into a URL: stopped, beside other writers, and into a storage that fails."""

import random
from contextlib import suppress
from pathlib import Path

import pytest

from precache import convert
from precache.conversion.journal import JOURNAL_NAME
from precache.conversion.url import leftovers, working_folder
from precache.errors import DatasetError, PrecacheError, StorageError
from precache.storage.objects import ObjectStore
from precache.storage.retries import PATIENCE_VARIABLE
from precache.storage.urls import Url
from tests.cloud.storages import FAULTS, Storage
from tests.cloud.uploading import objects
from tests.conftest import small_recipe
from tests.precache.destinations import contents, interrupt
from tests.stopping import WAYS, KilledError, Stop, stopping


def shard_names(url: Url) -> list[str]:
    return [info.name for info in ObjectStore(url).list() if info.name.endswith(".safetensors")]


def replace_first_shard(url: Url) -> None:
    """Replace the first shard by as many other bytes."""
    store, name = ObjectStore(url), shard_names(url)[0]
    store.put(name, bytes(len(store.get(name))))


def test_workers_push_their_shards_and_leave_no_local_files(
    bucket: Url, raw_tree: Path, converted: dict[str, Path]
) -> None:
    url = bucket / "sets/caltech"
    convert(raw_tree, str(url), small_recipe("webdataset"), workers=2)
    expected = contents(converted["webdataset"])
    assert objects(bucket) == {f"sets/caltech/{name}": content for name, content in expected.items()}
    assert list(working_folder(url).parent.iterdir()) == []  # the lock was there, too


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_conversion_stopped_at_any_request_is_completed_or_cleaned(
    step: int, bucket: Url, raw_tree: Path, converted: dict[str, Path]
) -> None:
    """The URL holds no dataset until then; the user's objects stay, even under names of ours."""
    folders = working_folder(bucket).parent
    with stopping(folders, Stop(counts="requests")) as run:
        convert(raw_tree, bucket / "whole", small_recipe("shards"), workers=0)
    for moment in (*range(1, run.count - 1, step), run.count - 1, run.count):
        url, stop = bucket / str(moment), Stop(moment, WAYS[moment % len(WAYS)], "requests")
        with suppress(KilledError, KeyboardInterrupt, PrecacheError), stopping(folders, stop):
            convert(raw_tree, url, small_recipe("shards"), workers=0)
        mine = dict.fromkeys(("train-99999.safetensors", "rejected.csv"), b"mine")
        if not (working_folder(url) / JOURNAL_NAME).exists():
            mine = {}
        for name, content in mine.items():
            ObjectStore(url).put(name, content)
        whole = {**contents(converted["shards"]), **mine}
        is_finished = "dataset.json" in objects(url)
        assert not is_finished or objects(url) == whole
        if moment // step // 2 % 2 or is_finished:  # clean half of them, whatever the way of the stop
            with leftovers(url) as unfinished:
                unfinished.remove()
            assert objects(url) == (whole if is_finished else mine)
        else:
            convert(raw_tree, url, small_recipe("shards"), workers=0)
            assert objects(url) == whole
        assert not [*folders.iterdir()]
    assert is_finished


def test_a_conversion_starts_over_on_another_machine_and_warns(
    bucket: Url,
    raw_tree: Path,
    converted: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    interrupt(raw_tree, bucket)
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache of another machine"))
    assert convert(raw_tree, bucket, small_recipe("shards"), workers=0).converted == 70
    assert f"{bucket}: holds 3 files" in caplog.text
    assert objects(bucket) == contents(converted["shards"])


def test_the_later_of_two_conversions_fails_and_keeps_the_other_dataset(
    bucket: Url,
    raw_tree: Path,
    converted: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A conversion with another seed on another machine finishes first."""
    other_runs: list[object] = []

    def convert_elsewhere(done: int, total: int) -> None:
        if not other_runs:
            other_runs.append(done)
            with monkeypatch.context() as patches:
                patches.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache of another machine"))
                convert(raw_tree, bucket, small_recipe("shards"), workers=0)

    with pytest.raises(DatasetError, match=str(bucket)):
        convert(raw_tree, bucket, small_recipe("shards", seed=7), workers=0, on_progress=convert_elsewhere)
    assert objects(bucket) == contents(converted["shards"])


@pytest.mark.parametrize("damage", ["removed", "replaced"])
def test_a_finished_shard_that_changed_at_the_url_is_converted_again(
    damage: str, bucket: Url, raw_tree: Path, converted: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    interrupt(raw_tree, bucket)
    replace_first_shard(bucket)
    if damage == "removed":
        ObjectStore(bucket).delete(shard_names(bucket)[:1])
    convert(raw_tree, bucket, small_recipe("shards"), workers=0)
    assert "1 finished shard must" in caplog.text
    assert objects(bucket) == contents(converted["shards"])


def test_a_finished_dataset_at_a_url_that_lost_a_shard_is_refused(bucket: Url, raw_tree: Path) -> None:
    convert(raw_tree, bucket, small_recipe("shards"), workers=0)
    (first, *_) = shard_names(bucket)
    ObjectStore(bucket).delete([first])
    with pytest.raises(DatasetError) as raised:
        convert(raw_tree, bucket, small_recipe("shards"), workers=0)
    assert raised.value.path == bucket / first
    assert "another DST" in raised.value.remedy


def test_a_shard_that_another_process_replaced_is_never_committed(
    bucket: Url, raw_tree: Path, converted: dict[str, Path]
) -> None:
    def replace(done: int, total: int) -> None:
        if done == total and shard_names(bucket):
            replace_first_shard(bucket)

    with pytest.raises(DatasetError, match="train-00000"):
        convert(raw_tree, bucket, small_recipe("shards"), workers=0, on_progress=replace)
    assert ObjectStore(bucket).find("dataset.json") is None


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 60), marks=pytest.mark.faults)])
@pytest.mark.timeout(900)
def test_a_storage_that_fails_at_random_loses_nothing(
    seeds: range,
    bucket: Url,
    storage: Storage,
    raw_tree: Path,
    converted: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quarter of the requests fail, in every way but a stall, which would take too long."""
    monkeypatch.setenv(PATIENCE_VARIABLE, "1")
    storage.plan = lambda seen: "503" if seen.method == "PUT" and "train-" in seen.path else None
    with pytest.raises(StorageError, match=r"s3://bucket.*train-0000.*SlowDown"):
        convert(raw_tree, bucket / "none", small_recipe("shards"), workers=0)
    monkeypatch.setenv(PATIENCE_VARIABLE, "2")
    kinds = [fault for fault in FAULTS if fault not in ("flip", "stall")]
    for seed in seeds:
        url, draw = bucket / str(seed), random.Random(seed)
        storage.plan = lambda seen, draw=draw: draw.choice(kinds) if draw.random() < 0.25 else None
        for _ in range(4):
            with suppress(PrecacheError):  # no other exception may arrive
                convert(raw_tree, url, small_recipe("shards"), workers=0)
        storage.plan = lambda seen: None
        convert(raw_tree, url, small_recipe("shards"), workers=0)
        assert objects(url) == contents(converted["shards"]), f"seed {seed}"

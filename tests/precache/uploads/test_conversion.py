"""A conversion whose destination is a URL, against a real S3 endpoint."""

import tempfile
from pathlib import Path

import pytest

from precache import convert
from precache.errors import DatasetError, SettingError, StorageError
from precache.storage import staging
from precache.storage.objects import ObjectStore
from precache.storage.retries import PATIENCE
from precache.storage.urls import Url
from precache.uploads.lock import LOCK_NAME
from tests.cloud.proxy import Proxy
from tests.conftest import small_recipe


def objects(url: Url) -> dict[str, bytes]:
    """All that lies below a URL."""
    store = ObjectStore(url)
    return {info.name: store.get(info.name) for info in store.list()}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["shards", "webdataset", "dali"])
def test_objects_are_what_a_folder_would_hold(
    name: str, bucket: Url, raw_tree: Path, converted: dict[str, Path]
) -> None:
    url = bucket / "sets/caltech"
    done = convert(raw_tree, str(url), small_recipe(name), workers=0)
    assert done.published
    assert objects(url) == files(converted[name])
    assert [info.name for info in ObjectStore(bucket).list()] == [
        f"sets/caltech/{file}" for file in sorted(files(converted[name]))
    ]


def interrupt(tree: Path, url: Url, **settings: object) -> None:
    """Leave an unfinished conversion there."""

    def stop(done: int, total: int) -> None:
        if done > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tree, url, small_recipe("shards", **settings), workers=0, on_progress=stop)


def shards_there(url: Url) -> list[str]:
    return [info.name for info in ObjectStore(url).list() if info.name.endswith(".safetensors")]


def test_the_same_command_goes_on_where_it_was_interrupted(
    bucket: Url, raw_tree: Path, converted: dict[str, Path]
) -> None:
    interrupt(raw_tree, bucket)
    there = shards_there(bucket)
    assert len(there) == 3
    assert ObjectStore(bucket).find("dataset.json") is None
    assert ObjectStore(bucket).find(LOCK_NAME) is None
    done = convert(raw_tree, bucket, small_recipe("shards"), workers=0)
    assert done.converted < 40
    assert objects(bucket) == files(converted["shards"])


def test_workers_upload_what_they_write_and_leave_nothing_in_their_staging_folders(
    bucket: Url,
    raw_tree: Path,
    converted: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(staging, "_own", {})
    convert(raw_tree, bucket, small_recipe("webdataset"), workers=2)
    assert objects(bucket) == files(converted["webdataset"])
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".precache-staging"]


@pytest.mark.parametrize("damage", ["gone", "replaced", "record"])
def test_a_finished_shard_that_is_not_as_it_was_is_converted_again(
    damage: str, bucket: Url, raw_tree: Path, converted: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    interrupt(raw_tree, bucket)
    store, name = ObjectStore(bucket), shards_there(bucket)[0]
    if damage == "gone":
        store.delete([name])
    elif damage == "replaced":  # as large as it was
        store.put(name, bytes(store.find(name).bytes))  # type: ignore[union-attr]
    else:
        (record,) = (info.name for info in store.list("journal") if name.split(".")[0] in info.name)
        store.put(record, store.get(record).replace(b"1", b"2", 1))
    convert(raw_tree, bucket, small_recipe("shards"), workers=0)
    assert "1 finished shard must be converted again" in caplog.text
    assert objects(bucket) == files(converted["shards"])


def test_an_unfinished_conversion_of_other_settings_is_refused_or_discarded(
    bucket: Url, raw_tree: Path, converted: dict[str, Path]
) -> None:
    interrupt(raw_tree, bucket, size=40)
    with pytest.raises(DatasetError, match=r"holds another conversion .*--overwrite"):
        convert(raw_tree, bucket, small_recipe("shards"), workers=0)
    convert(raw_tree, bucket, small_recipe("shards"), workers=0, overwrite=True)
    assert objects(bucket) == files(converted["shards"])


def test_objects_of_somebody_else_are_left_alone(bucket: Url, raw_tree: Path) -> None:
    store = ObjectStore(bucket)
    store.put("thesis.txt", b"years of work")
    with pytest.raises(DatasetError, match=r"is not empty.*thesis\.txt"):
        convert(raw_tree, bucket, small_recipe("shards"), workers=0, overwrite=True)
    assert objects(bucket) == {"thesis.txt": b"years of work"}


def test_a_finished_dataset_is_neither_replaced_nor_updated_in_place(bucket: Url, raw_tree: Path) -> None:
    convert(raw_tree, bucket, small_recipe("shards"), workers=0)
    before = objects(bucket)
    with pytest.raises(SettingError, match="choose another URL"):
        convert(raw_tree, bucket, small_recipe("shards"), workers=0, overwrite=True)
    with pytest.raises(SettingError, match="precache pull s3://"):
        convert(raw_tree, bucket, small_recipe("shards"), workers=0, update=True)
    assert objects(bucket) == before


def test_a_shard_that_another_process_replaced_is_never_committed(
    bucket: Url, raw_tree: Path, converted: dict[str, Path]
) -> None:
    store = ObjectStore(bucket)

    def replace(done: int, total: int) -> None:
        if done == total and (there := shards_there(bucket)):
            store.put(there[0], bytes(store.find(there[0]).bytes))  # type: ignore[union-attr]

    with pytest.raises(DatasetError, match="another object than was uploaded"):
        convert(raw_tree, bucket, small_recipe("shards"), workers=0, on_progress=replace)
    assert store.find("dataset.json") is None
    convert(raw_tree, bucket, small_recipe("shards"), workers=0)
    assert objects(bucket) == files(converted["shards"])


def test_what_the_storage_refuses_for_a_while_is_put_again(
    bucket: Url, proxy: Proxy, raw_tree: Path, converted: dict[str, Path]
) -> None:
    faults = ("reset", "500", "503")
    proxy.plan = lambda seen: faults[seen.number // 3 % 3] if seen.number % 3 == 0 else None
    convert(raw_tree, bucket, small_recipe("shards"), workers=0)
    assert sum(proxy.faults.values()) > 10
    proxy.plan = lambda seen: None
    assert objects(bucket) == files(converted["shards"])


def test_a_storage_that_takes_no_shard_is_named(
    bucket: Url, proxy: Proxy, raw_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATIENCE, "1")
    proxy.plan = lambda seen: "503" if seen.method == "PUT" and "train-" in seen.path else None
    with pytest.raises(StorageError, match=r"s3://bucket.*train-0000.*SlowDown"):
        convert(raw_tree, bucket, small_recipe("shards"), workers=1)
    proxy.plan = lambda seen: None
    assert objects(bucket).keys() == {"journal/header.json"}


def test_a_finished_dataset_that_lacks_a_shard_is_not_called_done(bucket: Url, raw_tree: Path) -> None:
    convert(raw_tree, bucket / "set", small_recipe("shards"), workers=0)
    ObjectStore(bucket / "set").delete(["train-00002.safetensors"])
    with pytest.raises(DatasetError, match=r"train-00002.safetensors: missing or cut; .* another DST"):
        convert(raw_tree, bucket / "set", small_recipe("shards"), workers=0)

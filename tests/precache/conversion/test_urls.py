"""URLs: sources and destinations there are refused with a command; `verify` reads the storage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precache import check, convert, open_dataset, open_source, verify, verify_deep
from precache.errors import SettingError
from precache.sharing.push_pull import push
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url, locate
from tests.cloud.uploading import upload
from tests.conftest import small_recipe

PHOTOS, COPY = "s3://bucket/my photos", "aws s3 sync 's3://bucket/my photos' 'my photos'"
SOURCES: dict[str, Callable[[Any, Path], object]] = {
    "convert": lambda url, out: convert(url, out, small_recipe("shards")),
    "open_source": lambda url, out: open_source(url),
    "check": lambda url, out: check(url),
    "verify_deep": lambda url, out: verify_deep(out, url),
}


@pytest.mark.parametrize("name", SOURCES)
def test_pictures_at_a_url_are_refused_with_the_command(
    name: str, converted: dict[str, Path], raw_tree: Path
) -> None:
    for url in (PHOTOS, locate(PHOTOS)):
        with pytest.raises(SettingError, check=lambda error: COPY in error.remedy) as raised:
            SOURCES[name](url, converted["shards"])
        assert str(raised.value.path) == PHOTOS


def test_a_destination_at_a_url_is_refused_with_the_command(raw_tree: Path) -> None:
    for url in ("gs://bucket/out", "https://host/out"):
        with pytest.raises(SettingError) as raised:
            convert(raw_tree, url, small_recipe("shards"))
        assert f"precache push DST {url}" in raised.value.remedy


def test_a_root_of_a_table_at_a_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, check=lambda error: str(error.path) == PHOTOS):
        convert(tmp_path / "labels.csv", tmp_path / "out", small_recipe("shards"), root=PHOTOS)


def test_push_to_a_web_server_is_refused(converted: dict[str, Path]) -> None:
    with pytest.raises(SettingError, check=lambda error: str(error.path) == "https://host/set"):
        push(converted["shards"], "https://host/set")


def test_verify_reads_the_storage_and_not_the_cache(bucket: Url, converted: dict[str, Path]) -> None:
    url = upload(converted["dali"], bucket / "set")
    open_dataset(url).read_index()  # fills the cache
    assert verify(str(url)) == []
    store, index = ObjectStore(url), open_dataset(url).manifest.index.name
    store.put(index, store.get(index)[:-1] + b"?")
    store.delete(["train-00000.idx"])
    damaged_files = [problem.partition(": ")[0] for problem in verify(str(url))]
    assert damaged_files == [f"{url}/train-00000.idx", f"{url}/{index}"]

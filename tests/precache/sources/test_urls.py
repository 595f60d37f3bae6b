"""Sources at a URL: parallel reads, web servers, and what `verify` reads."""

import os
import time
from pathlib import Path

import boto3
import pytest

from precache import convert, open_dataset, verify
from precache.errors import SettingError, SourceError
from precache.pictures.reading import MAX_PIXELS
from precache.sources import open_source
from precache.sources.base import picture_readers
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url
from tests.cloud.storages import Storage
from tests.cloud.uploading import upload
from tests.conftest import small_recipe
from tests.precache.sources.tars import JPEG, files_of, make_tar


def test_objects_are_read_several_at_a_time(bucket: Url, storage: Storage, raw_tree: Path) -> None:
    store = ObjectStore(bucket / "photos")
    for name, content in files_of(raw_tree).items():
        store.put(name, content)
    scan = open_source(f"{bucket}/photos").scan()
    refs = list(scan.samples)[:32]
    storage.latency_s = 0.1
    begin_s = time.monotonic()
    pictures = [read() for read in picture_readers(scan.source, refs, MAX_PIXELS)]
    assert time.monotonic() - begin_s < storage.latency_s * len(refs) / 2
    assert pictures == [(raw_tree / ref.path).read_bytes() for ref in refs]


def test_a_deleted_object_is_an_error_with_its_url(bucket: Url) -> None:
    store = ObjectStore(bucket / "photos")
    store.put("a/1.jpg", JPEG)
    scan = open_source(f"{bucket}/photos").scan()
    store.delete(["a/1.jpg"])
    with pytest.raises(SourceError, check=lambda error: str(error.path) == f"{bucket}/photos/a/1.jpg"):
        scan.source.read(scan.samples[0], MAX_PIXELS)


def test_a_web_server_serves_tars_but_no_trees(bucket: Url, raw_tree: Path, tmp_path: Path) -> None:
    path, client = make_tar(tmp_path / "photos.tar", {"1.jpg": JPEG, "1.cls": b"0"}), boto3.client("s3")
    client.put_bucket_acl(Bucket=bucket.name, ACL="public-read")
    client.put_object(Bucket=bucket.name, Key="photos.tar", Body=path.read_bytes(), ACL="public-read")
    http_url = f"{os.environ['AWS_ENDPOINT_URL']}/{bucket.name}"
    assert open_source(f"{http_url}/photos.tar").scan().digest == open_source(path).scan().digest
    with pytest.raises(SourceError, check=lambda error: str(error.path) == f"{http_url}/photos"):
        open_source(f"{http_url}/photos")
    with pytest.raises(SettingError, match=f"{http_url}/set"):
        convert(raw_tree, f"{http_url}/set", small_recipe("shards"), workers=0)


def test_verify_reads_the_storage_and_not_the_cache(bucket: Url, converted: dict[str, Path]) -> None:
    url = upload(converted["dali"], bucket / "set")
    open_dataset(url).read_index()  # fills the cache
    assert verify(str(url)) == []
    store, index = ObjectStore(url), open_dataset(url).manifest.index.name
    store.put(index, store.get(index)[:-1] + b"?")
    store.delete(["train-00000.idx"])
    damaged_files = [problem.partition(": ")[0] for problem in verify(str(url))]
    assert damaged_files == [f"{url}/train-00000.idx", f"{url}/{index}"]

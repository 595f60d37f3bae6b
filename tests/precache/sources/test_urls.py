"""Sources at a URL: the same samples, and the same bytes, as on disk."""

import os
import time
from pathlib import Path

import boto3
import pytest

from precache import convert, open_dataset, verify
from precache.errors import SettingError, SourceError
from precache.pictures.reading import MAX_PIXELS
from precache.sources import SourceOptions, open_source
from precache.sources.base import check_apart, reads_of
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url
from tests.cloud.storages import Storage
from tests.conftest import small_recipe
from tests.precache.sources.archives import files_of, make_tar


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache"))


def put(folder: Path, url: Url) -> Url:
    """All files of a folder, as objects."""
    store = ObjectStore(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.upload(path, str(path.relative_to(folder)))
    return url


def test_pictures_come_several_at_a_time(bucket: Url, storage: Storage, raw_tree: Path) -> None:
    scan = open_source(str(put(raw_tree, bucket / "photos"))).scan()
    refs = list(scan.samples)[:32]
    storage.latency_s = 0.1
    begin_s = time.monotonic()
    pictures = [read() for read in reads_of(scan.source, refs, MAX_PIXELS)]
    assert time.monotonic() - begin_s < storage.latency_s * len(refs) / 2
    assert pictures == [(raw_tree / ref.path).read_bytes() for ref in refs]


def test_a_picture_that_is_gone_is_named_and_a_mark_of_a_folder_is_none(bucket: Url) -> None:
    store, url = ObjectStore(bucket / "photos"), bucket / "photos"
    for name in ("a/1.jpg", "b/2.jpg"):
        store.put(name, b"\xff\xd8\xff")
    before = open_source(str(url)).scan()
    store.put("a", b"")
    scan = open_source(str(url)).scan()
    assert scan.digest == before.digest
    store.delete(["a/1.jpg"])
    with pytest.raises(SourceError, match=f"{url}/a/1.jpg: disappeared"):
        scan.source.read(scan.samples[0], MAX_PIXELS)


def test_a_table_at_a_url_names_objects_or_files_of_this_machine(bucket: Url, raw_tree: Path) -> None:
    refs = list(open_source(raw_tree).scan().samples)[:5]
    lines = ["image,label", *(f"{ref.path},{ref.label}" for ref in refs)]
    ObjectStore(bucket).put("labels.csv", "\n".join(lines).encode())
    on_disk = open_source(f"{bucket}/labels.csv", SourceOptions(root=str(raw_tree))).scan()
    put(raw_tree, bucket)
    at_url = open_source(f"{bucket}/labels.csv").scan()
    assert on_disk.digest == at_url.digest
    check_apart(at_url.source, bucket / "out")  # beside the table, as on disk


def test_a_web_server_gives_archives_and_no_trees(bucket: Url, raw_tree: Path, tmp_path: Path) -> None:
    path, client = make_tar(tmp_path / "photos.tar", files_of(raw_tree)), boto3.client("s3")
    client.put_bucket_acl(Bucket=bucket.name, ACL="public-read")  # one that may be read by everybody
    client.put_object(Bucket=bucket.name, Key="photos.tar", Body=path.read_bytes(), ACL="public-read")
    plain = f"{os.environ['AWS_ENDPOINT_URL']}/{bucket.name}"
    assert open_source(f"{plain}/photos.tar").scan().digest == open_source(path).scan().digest
    with pytest.raises(SourceError, match="a web server cannot list a tree"):
        open_source(f"{plain}/photos")
    with pytest.raises(SettingError, match="is read-only"):
        convert(raw_tree, f"{plain}/set", small_recipe("shards"), workers=0)


def test_verify_reads_what_the_storage_holds(bucket: Url, converted: dict[str, Path]) -> None:
    url = put(converted["dali"], bucket / "set")
    open_dataset(url).read_index()  # into the cache, which is not what is asked for
    assert verify(str(url)) == []
    store, index = ObjectStore(url), open_dataset(url).manifest.index.name
    store.put(index, store.get(index)[:-1] + b"?")
    store.delete(["train-00000.idx"])
    named = [problem.partition(": ")[0] for problem in verify(str(url))]
    assert named == [f"{url}/train-00000.idx", f"{url}/{index}"]


def test_messages_name_what_is_fetched_by_its_url(
    bucket: Url, raw_tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ObjectStore(bucket)
    store.put("photos.tar", b"no tar" * 1000)
    store.put("labels.csv", b"image,label\nheron.jpg,heron\n")
    for name in ("photos.tar", "labels.csv"):
        with pytest.raises(SourceError, match=f"^{bucket}/{name}[:,]"):
            open_source(str(bucket / name)).scan()
    store.upload(make_tar(tmp_path / "x", files_of(raw_tree), mode="w:gz"), "photos.tar.gz")
    open_source(str(bucket / "photos.tar.gz")).scan()
    assert f"{bucket}/photos.tar.gz: is compressed as a whole" in caplog.text

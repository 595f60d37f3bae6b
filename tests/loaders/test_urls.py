"""Loaders on datasets in a bucket: what they serve is what they serve of a folder."""

from pathlib import Path

import pytest
import torch

import loaders
from loaders import Reading
from precache import open_dataset
from precache.errors import DatasetError
from precache.storage.urls import Url
from tests.cloud.proxy import Proxy
from tests.cloud.uploading import upload

QUIET = {"batch_size": 8, "seed": 3, "device": "cpu"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of the test."""
    monkeypatch.setenv("PRECACHE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def served(path: Path | Url | str, **settings: object) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Ids, images and labels of the batches of one epoch."""
    with loaders.build(path, **{**QUIET, **settings}) as loader:
        return [(batch.ids.tolist(), batch.images.clone(), batch.labels.clone()) for batch in loader]


def assert_same(found: list, expected: list) -> None:
    assert [ids for ids, _, _ in found] == [ids for ids, _, _ in expected]
    for (_, images, labels), (_, wanted_images, wanted_labels) in zip(found, expected, strict=True):
        assert torch.equal(images, wanted_images)
        assert torch.equal(labels, wanted_labels)


@pytest.mark.parametrize(
    ("kind", "shuffle"),
    [("shards", False), ("shards", "window"), ("shards", "full"), ("webdataset", "window")],
)
def test_a_url_serves_what_the_folder_serves(
    kind: str, shuffle: bool | str, converted: dict[str, Path], bucket: Url
) -> None:
    url = upload(converted[kind], bucket / f"sets/{kind}")
    assert_same(served(str(url), shuffle=shuffle), served(converted[kind], shuffle=shuffle))


def test_true_is_the_window_at_a_url(converted: dict[str, Path], bucket: Url) -> None:
    url = upload(converted["shards"], bucket / "a")
    found = [ids for ids, _, _ in served(url)]
    assert found == [ids for ids, _, _ in served(converted["shards"], shuffle="window")]


def test_the_second_epoch_asks_the_storage_for_nothing(
    converted: dict[str, Path], bucket: Url, proxy: Proxy
) -> None:
    url = upload(converted["shards"], bucket / "a")
    with loaders.build(url, **QUIET) as loader:
        first = sorted(id for batch in loader for id in batch.ids.tolist())
        asked = len(proxy.seen)
        assert sorted(id for batch in loader for id in batch.ids.tolist()) == first
    assert len(proxy.seen) == asked
    served(url)  # another loader: the manifest alone
    assert [seen.path.rpartition("/")[2] for seen in proxy.seen[asked:]] == ["dataset.json"]


def test_the_dataset_of_a_url_is_the_one_of_the_folder(converted: dict[str, Path], bucket: Url) -> None:
    url = upload(converted["shards"], bucket / "a")
    here, there = open_dataset(converted["shards"]), open_dataset(str(url))
    assert (there.digest, there.manifest, there.place) == (here.digest, here.manifest, url)
    assert there.read_index().ids.tolist() == here.read_index().ids.tolist()
    shard = there.manifest.shards[0]
    assert there.shard_path(shard).read_bytes() == here.shard_path(shard).read_bytes()


def test_a_url_without_a_manifest_is_no_dataset(bucket: Url) -> None:
    says = rf"^{bucket}/nothing: not a converted dataset \(no dataset.json.*convert {bucket}/nothing DST"
    with pytest.raises(DatasetError, match=says):
        loaders.build(f"{bucket}/nothing")


def test_reading_says_where_shards_are_kept(converted: dict[str, Path], bucket: Url, tmp_path: Path) -> None:
    url = upload(converted["shards"], bucket / "a")
    served(url, reading=Reading(cache_dir=tmp_path / "elsewhere"))
    assert list((tmp_path / "elsewhere").glob("*/train-*.safetensors"))
    assert not (tmp_path / "cache").exists()

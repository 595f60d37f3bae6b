"""Contract suite over all formats, and other libraries' readers of them."""

import json
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from precache import Recipe, convert, open_dataset
from precache.dataset.converted import ConvertedDataset
from precache.errors import DatasetError
from precache.formats import FORMATS, Sample
from precache.formats.shards import DATA_START, ShardFile
from precache.pictures.images import Size
from precache.pictures.jpeg import encode_jpeg
from precache.storage.output import publish
from tests import format_contract as contract
from tests.conftest import small_recipe
from tests.precache.sources.examples import FIELDS, SAMPLES, TARGETS, example_source

# JPEGs have quality 95, 4:4:4, and the sample tree is noise; stored pixels are exact.
MIN_JPEG_PSNR = 34.0
Read = Iterator[tuple[int, dict[str, Any], Any]]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["", "keep-", "grey-"])
def test_dataset_of_every_format_holds_its_tree(
    name: str, kind: str, converted: dict[str, Path], shaped: dict[str, Path], raw_tree: Path
) -> None:
    dataset = open_dataset({**converted, **shaped}[kind + name])
    min_psnr = math.inf if FORMATS[name].holds_pixels else MIN_JPEG_PSNR
    contract.check_holds_its_tree(dataset, raw_tree, min_psnr)


def test_all_formats_hold_the_same_samples_in_the_same_splits(raw_tree: Path, tmp_path: Path) -> None:
    for name in FORMATS:
        recipe = small_recipe(name, splits="train=0.6,val=0.4")
        convert(raw_tree, tmp_path / name, recipe, workers=0)
    datasets = [open_dataset(tmp_path / name) for name in FORMATS]
    assert [*datasets[0].manifest.samples_per_class] == ["train", "val"]
    contract.check_hold_the_same_samples(datasets)


def read_with_safetensors(dataset: ConvertedDataset) -> Read:
    """Read shards by the layout in the docstring of `precache.formats.shards`."""
    for shard in dataset.manifest.shards:
        tensors = load_file(dataset.shard_path(shard))
        pictures = tensors["images"]
        if "offsets" in tensors:
            values, pictures = pictures, []
            for start, (height, width) in zip(tensors["offsets"], tensors["shapes"], strict=True):
                pictures.append(values[start : start + 3 * height * width].reshape(height, width, 3))
        for sample_id, label, picture in zip(tensors["ids"], tensors["labels"], pictures, strict=True):
            yield int(sample_id), {"label": label}, picture


def read_with_webdataset(dataset: ConvertedDataset) -> Read:
    webdataset = pytest.importorskip("webdataset")
    urls = [str(dataset.shard_path(shard)) for shard in dataset.manifest.shards]
    for sample in webdataset.WebDataset(urls, shardshuffle=False):
        content = json.loads(sample["json"])
        assert (content["path"], content["width"], content["height"]) == (sample["__key__"], 40, 32)
        label = {"label": int(sample["cls"])} if "cls" in sample else {"target": content["target"]}
        yield int(sample["__key__"]), {**label, **content["fields"]}, sample["jpg"]


def read_tfrecords_with_dali(dataset: ConvertedDataset) -> Read:
    fn = pytest.importorskip("nvidia.dali").fn
    from nvidia.dali import Pipeline, tfrecord

    label = "image/class/label" if dataset.manifest.target == "class" else "target"
    integers = ["sample/id", label, "field/width", "field/tokens", "shape/corners"]
    features = {name: tfrecord.VarLenFeature(tfrecord.int64, 0) for name in integers}
    for name in ("field/score", "field/place", "field/corners"):
        features[name] = tfrecord.VarLenFeature(tfrecord.float32, 0.0)
    for name in ("field/caption", "image/encoded"):
        features[name] = tfrecord.FixedLenFeature((), tfrecord.string, "")
    shards = dataset.manifest.shards
    paths = [str(dataset.shard_path(shard)) for shard in shards]
    indices = [str(dataset.path / shard.files[1].name) for shard in shards]
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        outputs = fn.readers.tfrecord(path=paths, index_path=indices, features=features)
        pipeline.set_outputs(*outputs.values())
    pipeline.build()
    for _ in range(dataset.manifest.samples):
        values: dict[str, Any] = {
            name.removeprefix("field/").removeprefix("image/class/"): np.asarray(value[0])
            for name, value in zip(features, pipeline.run(), strict=True)
        }
        values["caption"] = values["caption"].tobytes().decode()
        sample_id = int(values.pop("sample/id")[0])
        picture = values.pop("image/encoded").tobytes()
        yield sample_id, values, picture


@pytest.mark.parametrize("target", ["class", "classes"])
@pytest.mark.parametrize(
    ("name", "read", "settings"),
    [
        ("shards", read_with_safetensors, {"fit": "crop", "size": 3}),  # labels start at an odd byte
        ("shards", read_with_safetensors, {"fit": "keep"}),
        ("webdataset", read_with_webdataset, {}),
        ("dali", read_tfrecords_with_dali, {}),
    ],
)
def test_other_readers_see_the_same_samples(
    target: str, name: str, read: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    recipe = Recipe(format=name, **{"size": 16, "shard_bytes": 8 * 16 * 16 * 3, **settings})
    convert(example_source(target), tmp_path / "out", recipe, workers=0)
    shapes = [np.shape(value) for value in FIELDS["corners"]]
    label = TARGETS["class"] if target == "class" else [-1] * SAMPLES
    expected = {**FIELDS, "shape/corners": shapes, "label": label, "target": TARGETS["classes"]}
    dataset = open_dataset(tmp_path / "out")
    contract.check_another_reader_sees_the_same(dataset, read(dataset), expected)


def test_read_picture_raises_if_the_open_shard_was_truncated(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    dataset, path = open_dataset(converted["shards"]), tmp_path / "x"
    path.write_bytes(dataset.shard_path(dataset.manifest.shards[0]).read_bytes())
    with ShardFile(path) as shard:
        os.truncate(path, DATA_START + shard.read_picture(0).nbytes + 100)
        shard.read_picture(0)
        with pytest.raises(DatasetError, check=lambda error: error.path == path and bool(error.remedy)):
            shard.read_picture(1)


def random_sample(name: str) -> Sample:
    """Make a sample of a random picture for the writer of a format."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = pixels if FORMATS[name].holds_pixels else encode_jpeg(pixels, 90)
    return Sample(7, 1, data, "a.jpg", (64, 64))


@pytest.mark.parametrize("name", FORMATS)
def test_writer_that_is_abandoned_leaves_no_file(name: str, tmp_path: Path) -> None:
    writer = FORMATS[name].writer(tmp_path / "train-00000", 2, None)
    writer.add(random_sample(name))
    writer.abandon()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("max_bytes", [1, 4096])  # of a file; 4,096 are enough for the index alone
@pytest.mark.parametrize("name", FORMATS)
def test_writer_that_cannot_finish_leaves_no_file(name: str, max_bytes: int, tmp_path: Path) -> None:
    writer = FORMATS[name].writer(tmp_path / "train-00000", 2, None)
    writer.add(random_sample(name))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.abandon()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("samples", [0, 1])
@pytest.mark.parametrize("size", [64, None])
@pytest.mark.parametrize("name", FORMATS)
def test_shard_of_fewer_samples_than_planned_is_read_once_published(
    name: str, size: Size | None, samples: int, tmp_path: Path
) -> None:
    writer = FORMATS[name].writer(tmp_path / "train-00000", 2, size)
    for _ in range(samples):
        writer.add(random_sample(name))
    files = writer.finish()
    assert not any(file.path.exists() for file in files)
    publish(files)
    assert [(s.id, s.label) for s in FORMATS[name].read_shard(files[0].path)] == [(7, 1)] * samples
    suffixes = {FORMATS[name].suffix, FORMATS[name].index_suffix} - {None}
    assert set(os.listdir(tmp_path)) == {f"train-00000{suffix}" for suffix in suffixes}

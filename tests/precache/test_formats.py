"""Every format keeps the contract, and other people's readers see what is in it."""

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
from precache.pictures.jpeg import encode_jpeg
from precache.pictures.sizes import Size
from precache.storage.output import publish
from tests import format_contract as contract
from tests.precache.sources.examples import FIELDS, SAMPLES, TARGETS, example_source

# Of JPEG at quality 95, 4:4:4, on the sample tree's noise. Pixels are exact.
WORST_PSNR = {"shards": math.inf, "webdataset": 34.0, "dali": 34.0}
Read = Iterator[tuple[int, dict[str, Any], Any]]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["", "keep-", "grey-"])
def test_a_format_holds_its_tree(
    name: str, kind: str, converted: dict[str, Path], shaped: dict[str, Path], raw_tree: Path
) -> None:
    dataset = open_dataset({**converted, **shaped}[kind + name])
    contract.check_holds_its_tree(dataset, raw_tree, WORST_PSNR[name])


def read_with_safetensors(dataset: ConvertedDataset) -> Read:
    """As the docstring of `precache.formats.shards` says."""
    for shard in dataset.manifest.shards:
        tensors = load_file(dataset.shard_path(shard))
        pictures = tensors["images"]
        if "offsets" in tensors:
            placed = zip(tensors["offsets"].tolist(), tensors["shapes"].tolist(), strict=True)
            pictures = [pictures[at : at + 3 * height * width].reshape(height, width, 3)
                        for at, (height, width) in placed]  # fmt: skip
        for sample_id, label, picture in zip(tensors["ids"], tensors["labels"], pictures, strict=True):
            yield int(sample_id), {"label": label}, picture


def read_with_webdataset(dataset: ConvertedDataset) -> Read:
    webdataset = pytest.importorskip("webdataset")
    urls = [str(dataset.shard_path(shard)) for shard in dataset.manifest.shards]
    for sample in webdataset.WebDataset(urls, shardshuffle=False):
        said = json.loads(sample["json"])
        assert (said["path"], said["width"], said["height"]) == (sample["__key__"], 40, 32)
        known = {"label": int(sample["cls"])} if "cls" in sample else {"target": said["target"]}
        yield int(sample["__key__"]), {**known, **said["fields"]}, sample["jpg"]


def read_tfrecords_with_dali(dataset: ConvertedDataset) -> Read:
    fn = pytest.importorskip("nvidia.dali").fn
    from nvidia.dali import Pipeline, tfrecord

    label = "image/class/label" if dataset.manifest.target == "class" else "target"
    whole = ["sample/id", label, "field/width", "field/tokens", "shape/corners"]
    features = {name: tfrecord.VarLenFeature(tfrecord.int64, 0) for name in whole}
    for name in ("field/score", "field/place", "field/corners"):
        features[name] = tfrecord.VarLenFeature(tfrecord.float32, 0.0)
    for name in ("field/caption", "image/encoded"):
        features[name] = tfrecord.FixedLenFeature((), tfrecord.string, "")
    shards = dataset.manifest.shards
    paths = [str(dataset.shard_path(shard)) for shard in shards]
    indices = [str(dataset.path / shard.files[1].name) for shard in shards]
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        read = fn.readers.tfrecord(path=paths, index_path=indices, features=features)
        pipeline.set_outputs(*read.values())
    pipeline.build()
    for _ in range(dataset.manifest.samples):
        known: dict[str, Any] = {
            name.removeprefix("field/").removeprefix("image/class/"): np.asarray(value[0])
            for name, value in zip(features, pipeline.run(), strict=True)
        }
        known["caption"] = known["caption"].tobytes().decode()
        sample_id = int(known.pop("sample/id")[0])
        yield sample_id, known, known.pop("image/encoded").tobytes()


@pytest.mark.parametrize("target", ["class", "classes"])
@pytest.mark.parametrize(
    ("name", "read", "settings"),
    [
        ("shards", read_with_safetensors, {"fit": "crop", "size": 3}),  # labels then start at any byte
        ("shards", read_with_safetensors, {"fit": "keep"}),
        ("webdataset", read_with_webdataset, {}),
        ("dali", read_tfrecords_with_dali, {}),
    ],
)
def test_another_reader_sees_the_same(
    target: str, name: str, read: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    recipe = Recipe(format=name, **{"size": 16, "shard_bytes": 8 * 16 * 16 * 3, **settings})
    convert(example_source(target), tmp_path / "out", recipe, workers=0)
    shapes = [np.shape(value) for value in FIELDS["corners"]]
    label = TARGETS["class"] if target == "class" else [-1] * SAMPLES
    known = {**FIELDS, "shape/corners": shapes, "label": label, "target": TARGETS["classes"]}
    dataset = open_dataset(tmp_path / "out")
    contract.check_another_reader_sees_the_same(dataset, read(dataset), known)


# What is particular to one format.


def test_a_shard_that_shrinks_is_named(converted: dict[str, Path], tmp_path: Path) -> None:
    dataset, path = open_dataset(converted["shards"]), tmp_path / "x"
    path.write_bytes(dataset.shard_path(dataset.manifest.shards[0]).read_bytes())
    with ShardFile(path) as shard:
        os.truncate(path, DATA_START + shard.read_picture(0).nbytes + 100)
        shard.read_picture(0)
        with pytest.raises(DatasetError, match=f"{path}: breaks off"):
            shard.read_picture(1)


@pytest.mark.parametrize("max_bytes", [1, 4096])  # of a file; the index alone has fewer than 4,096
@pytest.mark.parametrize("name", FORMATS)
def test_a_shard_that_is_given_up_leaves_nothing(name: str, max_bytes: int, tmp_path: Path) -> None:
    """Before its end, and where its files cannot be written."""
    form = FORMATS[name]
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    sample = Sample(0, 0, pixels if form.holds_pixels else encode_jpeg(pixels, 90), "a.jpg", (64, 64))
    writer = form.writer(tmp_path / "train-00000", 2, None)
    writer.add(sample)
    writer.abandon()
    assert os.listdir(tmp_path) == []
    writer = form.writer(tmp_path / "train-00000", 2, None)
    writer.add(sample)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.abandon()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", [8, None])
@pytest.mark.parametrize("name", FORMATS)
def test_a_shard_has_its_name_once_it_is_published(name: str, size: Size | None, tmp_path: Path) -> None:
    """Also of fewer samples than were announced; of none, it is an empty shard."""
    form = FORMATS[name]
    pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    sample = Sample(7, 1, pixels if form.holds_pixels else encode_jpeg(pixels, 90), "a.jpg", (8, 8))
    for base, samples in (("train-00000", [sample]), ("train-00001", [])):
        writer = form.writer(tmp_path / base, 2, size)
        for added in samples:
            writer.add(added)
        files = writer.finish()
        assert not any(file.path.exists() for file in files)
        publish(files)
        read = list(form.read_shard(files[0].path))
        assert [(stored.id, stored.label) for stored in read] == [(one.id, one.label) for one in samples]
    suffixes = [form.suffix, *([form.index_suffix] if form.index_suffix else [])]
    expected = {f"train-0000{number}{suffix}" for number in range(2) for suffix in suffixes}
    assert set(os.listdir(tmp_path)) == expected

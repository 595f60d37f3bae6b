import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from PIL import Image

from precache import convert, open_dataset
from precache.dataset.converted import ConvertedDataset
from precache.errors import DatasetError
from precache.formats import FORMATS
from precache.formats.shards import DATA_START, ShardFile
from precache.sources.tree import scan_tree
from precache.storage import atomic_write
from tests import format_contract as contract
from tests.conftest import STORED_SIZE, small_recipe

FORMAT_NAMES = sorted(FORMATS)
# Of JPEG at quality 95, 4:4:4, on the sample tree's noise. Pixels are exact.
WORST_PSNR = {"shards": math.inf, "webdataset": 34.0, "dali": 34.0}


@pytest.fixture(
    params=[*FORMAT_NAMES, *(f"{kind}-{name}" for kind in ("keep", "grey") for name in FORMAT_NAMES)]
)
def dataset(
    request: pytest.FixtureRequest, converted: dict[str, Path], shaped: dict[str, Path]
) -> ConvertedDataset:
    return open_dataset({**converted, **shaped}[request.param])


def test_holds_every_sample_once(dataset: ConvertedDataset, raw_tree: Path) -> None:
    contract.check_holds_every_sample_once(dataset, raw_tree)


def test_index_is_the_written_order(dataset: ConvertedDataset) -> None:
    contract.check_index_is_the_written_order(dataset)


def test_pixels_are_the_converters(dataset: ConvertedDataset, raw_tree: Path) -> None:
    contract.check_pixels_are_the_converters(dataset, raw_tree, WORST_PSNR[dataset.manifest.recipe.format])


@pytest.mark.parametrize(("name", "fit"), [("shards", "keep"), ("dali", "crop")])
def test_bytes_do_not_depend_on_workers(name: str, fit: str, raw_tree: Path, tmp_path: Path) -> None:
    def make(workers: int) -> Path:
        path = tmp_path / str(workers)
        convert(raw_tree, path, small_recipe(name, fit=fit), workers=workers)
        return path

    contract.check_bytes_do_not_depend_on_workers(make)


def test_all_formats_hold_the_same_samples_in_the_same_shards(converted: dict[str, Path]) -> None:
    held = []
    for name, path in converted.items():
        dataset = open_dataset(path)
        ids = {
            (shard.name, shard.split): [s.id for s in FORMATS[name].read_shard(dataset.shard_path(shard))]
            for shard in dataset.manifest.shards
        }
        held.append(ids)
    assert held[0] == held[1] == held[2]
    assert len(held[0]) == 6


# Somebody else's readers.


def read_varying_with_safetensors(dataset: ConvertedDataset) -> Iterator[tuple[int, int, Any]]:
    """As the docstring of `precache.formats.shards` says."""
    for shard in dataset.manifest.shards:
        with safetensors.safe_open(dataset.shard_path(shard), framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not iterable)
        assert tensors.keys() == {"images", "labels", "ids", "offsets", "shapes"}
        named = zip(*(tensors[name].tolist() for name in ("ids", "labels", "offsets", "shapes")), strict=True)
        for sample_id, label, offset, (height, width) in named:
            pixels = tensors["images"][offset:][: height * width * 3]
            yield sample_id, label, pixels.reshape(height, width, 3)


def read_with_safetensors(dataset: ConvertedDataset) -> Iterator[tuple[int, int, Any]]:
    from safetensors.torch import load_file

    for shard in dataset.manifest.shards:
        tensors = load_file(dataset.shard_path(shard))
        yield from zip(
            tensors["ids"].tolist(), tensors["labels"].tolist(), tensors["images"].numpy(), strict=True
        )


def read_with_webdataset(dataset: ConvertedDataset) -> Iterator[tuple[int, int, bytes]]:
    import webdataset

    urls = [str(dataset.shard_path(shard)) for shard in dataset.manifest.shards]
    for sample in webdataset.WebDataset(urls, shardshuffle=False):
        yield int(sample["__key__"]), int(sample["cls"]), sample["jpg"]


def dali_outputs(reader: Any, samples: int) -> Iterator[tuple[bytes, ...]]:
    """Run a DALI reader (a function that returns its outputs) over `samples` samples."""
    from nvidia.dali import Pipeline

    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None)
    with pipeline:
        pipeline.set_outputs(*reader())
    pipeline.build()
    for _ in range(samples):
        yield tuple(np.asarray(output.at(0)).tobytes() for output in pipeline.run())


def indexes(dataset: ConvertedDataset) -> dict[str, list[str]]:
    return {
        "paths": [str(dataset.shard_path(shard)) for shard in dataset.manifest.shards],
        "index_paths": [str(dataset.path / shard.files[1].name) for shard in dataset.manifest.shards],
    }


def read_tars_with_dali(dataset: ConvertedDataset) -> Iterator[tuple[int, int, bytes]]:
    from nvidia.dali import fn

    files = indexes(dataset)
    outputs = dali_outputs(
        lambda: fn.readers.webdataset(**files, ext=["jpg", "cls", "json"]), dataset.manifest.samples
    )
    ids = {o["path"]: o["id"] for o in contract.origins(dataset)}
    for jpeg, label, origin in outputs:
        yield ids[json.loads(origin)["path"]], int(label), jpeg


def read_tfrecords_with_dali(dataset: ConvertedDataset) -> Iterator[tuple[int, int, bytes]]:
    from nvidia.dali import fn, tfrecord

    files = indexes(dataset)
    features = {
        "image/encoded": tfrecord.FixedLenFeature((), tfrecord.string, ""),
        "image/class/label": tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
        "sample/id": tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
    }

    def reader() -> tuple[Any, ...]:
        read = fn.readers.tfrecord(path=files["paths"], index_path=files["index_paths"], features=features)
        return read["sample/id"], read["image/class/label"], read["image/encoded"]

    for sample_id, label, jpeg in dali_outputs(reader, dataset.manifest.samples):
        yield struct.unpack("<q", sample_id)[0], struct.unpack("<q", label)[0], jpeg


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("shards", read_with_safetensors),
        ("keep-shards", read_varying_with_safetensors),
        ("webdataset", read_with_webdataset),
        ("webdataset", read_tars_with_dali),
        ("dali", read_tfrecords_with_dali),
    ],
)
def test_another_reader_sees_the_same(
    name: str, read: Any, converted: dict[str, Path], shaped: dict[str, Path]
) -> None:
    if "dali" in read.__name__:
        pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")
    contract.check_another_reader_sees_the_same(open_dataset({**converted, **shaped}[name]), read)


# What is particular to one format.


def test_shard_pixels_start_on_a_page_and_are_shown_where_they_lie(converted: dict[str, Path]) -> None:
    dataset = open_dataset(converted["shards"])
    path = dataset.shard_path(dataset.manifest.shards[0])
    pictures = np.stack([sample.data for sample in FORMATS["shards"].read_shard(path)])
    assert DATA_START % 4096 == 0
    assert path.read_bytes()[DATA_START : DATA_START + pictures.nbytes] == pictures.tobytes()
    with ShardFile(path) as shard:
        shown = shard.picture(3)
    assert np.array_equal(shown, pictures[3])
    shown[:] = 0  # what would be written by mistake stays in this process
    assert path.read_bytes()[DATA_START : DATA_START + pictures.nbytes] == pictures.tobytes()


def test_what_is_shown_of_a_shard_stays_when_another_takes_its_name(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    dataset = open_dataset(converted["shards"])
    path = tmp_path / "shard.safetensors"
    path.write_bytes(dataset.shard_path(dataset.manifest.shards[0]).read_bytes())
    with ShardFile(path) as shard:
        shown = shard.picture(0)
        expected = shown.copy()
        with atomic_write(path) as file:
            file.write(b"another")
        assert np.array_equal(shown, expected)
    path.unlink()
    assert np.array_equal(shown, expected)


def test_a_shard_that_shrinks_or_cannot_be_read_any_more_is_named(
    converted: dict[str, Path], tmp_path: Path
) -> None:
    dataset = open_dataset(converted["shards"])
    path = tmp_path / "shard.safetensors"
    path.write_bytes(dataset.shard_path(dataset.manifest.shards[0]).read_bytes())
    with ShardFile(path) as shard:
        os.truncate(path, DATA_START + STORED_SIZE**2 * 3 + 100)
        shard.read_picture(0)
        with pytest.raises(DatasetError, match=f"{path}: breaks off at byte"):
            shard.read_picture(1)
        # the system refuses to read what is open for writing alone, as it does from a failing disk
        unreadable = os.open(tmp_path / "written", os.O_WRONLY | os.O_CREAT)
        os.dup2(unreadable, shard.descriptor)
        os.truncate(unreadable, 1_000_000)
        os.close(unreadable)
        for reading in (lambda: shard.read_picture(0), shard.read_ahead):
            with pytest.raises(DatasetError, match=f"{path}: cannot be read"):
                reading()


def test_shards_of_odd_size_are_valid_safetensors(raw_tree: Path, tmp_path: Path) -> None:
    """Labels then start at any byte: readers must not need them aligned."""
    convert(raw_tree, tmp_path / "odd", small_recipe("shards", size=3), workers=0)
    dataset = open_dataset(tmp_path / "odd")
    contract.check_another_reader_sees_the_same(dataset, read_with_safetensors)


def test_tar_origin_names_source_and_upright_size(converted: dict[str, Path], raw_tree: Path) -> None:
    samples = scan_tree(raw_tree).samples
    for origin in contract.origins(open_dataset(converted["webdataset"])):
        path = samples[origin["id"]].path
        assert origin["path"] == path
        with Image.open(raw_tree / path) as picture:
            stored = picture.size
            sideways = picture.getexif().get(0x0112, 1) >= 5
        assert (origin["width"], origin["height"]) == (stored[::-1] if sideways else stored)


def test_stored_jpegs_are_444_at_95_and_420_below(raw_tree: Path, tmp_path: Path) -> None:
    import simplejpeg

    for quality, subsampling in ((95, "444"), (94, "420")):
        path = tmp_path / str(quality)
        convert(raw_tree, path, small_recipe("webdataset", quality=quality), workers=0)
        _, sample = next(contract.stored(open_dataset(path)))
        assert isinstance(sample.data, bytes)
        assert simplejpeg.decode_jpeg_header(sample.data)[3] == subsampling


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_damaged_shard_names_its_file_and_a_remedy(
    name: str, converted: dict[str, Path], tmp_path: Path
) -> None:
    """What else may have happened to it: `tests/faults/folders.py`."""
    dataset = open_dataset(converted[name])
    original = dataset.shard_path(dataset.manifest.shards[0])
    damaged, content = tmp_path / original.name, original.read_bytes()
    for spoiled in (None, content[:-12_000], b"\xff" * 600 + content[600:]):
        if spoiled is not None:
            damaged.write_bytes(spoiled)
        with pytest.raises(DatasetError, match=str(damaged)) as caught:
            list(FORMATS[name].read_shard(damaged))
        assert "\n" not in str(caught.value)
        assert "precache verify" in str(caught.value)

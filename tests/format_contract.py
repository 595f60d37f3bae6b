"""Properties that every format keeps; `tests/precache/test_formats.py` runs them over all of them."""

import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from precache.dataset.converted import ConvertedDataset
from precache.formats import FORMATS, StoredSample
from precache.pictures import images
from precache.sources.tree import scan_tree


def stored(dataset: ConvertedDataset) -> Iterator[tuple[str, StoredSample]]:
    """(shard path, sample) of all samples, in written order, by our own reader."""
    read_shard = FORMATS[dataset.manifest.recipe.format].read_shard
    for shard in dataset.manifest.shards:
        path = dataset.shard_path(shard)
        for sample in read_shard(path):
            yield str(path), sample


def check_holds_every_sample_once(dataset: ConvertedDataset, raw_tree: Path) -> None:
    scan = scan_tree(raw_tree)
    rejected = {sample.id for sample in dataset.manifest.rejected}
    expected = [(s.id, s.label) for s in scan.samples if s.id not in rejected]
    held = [(sample.id, sample.label) for _, sample in stored(dataset)]
    assert sorted(held) == expected
    assert held != expected, "written in scan order, not shuffled"


def check_index_is_the_written_order(dataset: ConvertedDataset) -> None:
    index = dataset.read_index("train")
    assert [(sample.id, sample.label) for _, sample in stored(dataset)] == list(
        zip(index.ids.tolist(), index.labels.tolist(), strict=True)
    )


def check_pixels_are_the_converters(dataset: ConvertedDataset, raw_tree: Path, worst_psnr: float) -> None:
    """Exact where `worst_psnr` is infinite."""
    scan = scan_tree(raw_tree)
    how = dataset.manifest.recipe.rendering
    for path, sample in stored(dataset):
        file = f"{raw_tree}/{scan.samples[sample.id].path}"
        expected, _ = images.render(images.read_bytes(file), file, how)
        pixels = sample.pixels(path, images.CHANNELS[how.channels])
        assert pixels.shape == expected.shape
        error = np.square(pixels.astype(float) - expected).mean()
        assert error <= 255**2 / 10 ** (worst_psnr / 10), f"sample {sample.id}"


def check_another_reader_sees_the_same(
    dataset: ConvertedDataset, read: Callable[[ConvertedDataset], Iterator[tuple[int, int, Any]]]
) -> None:
    """`read` yields (id, label, JPEG bytes or pixels) in stored order, by somebody else's code."""
    ours = [(sample.id, sample.label, sample.data) for _, sample in stored(dataset)]
    theirs = list(read(dataset))
    assert [(id, label) for id, label, _ in theirs] == [(id, label) for id, label, _ in ours]
    for (_, _, their_data), (_, _, our_data) in zip(theirs, ours, strict=True):
        if isinstance(our_data, bytes):
            assert bytes(their_data) == our_data
        else:
            assert np.array_equal(their_data, our_data)


def check_bytes_do_not_depend_on_workers(make: Callable[[int], Path]) -> None:
    first, other = ({path.name: path.read_bytes() for path in make(workers).iterdir()} for workers in (0, 3))
    assert first == other


def origins(dataset: ConvertedDataset) -> Iterator[dict[str, Any]]:
    """The .json of every sample of a `webdataset` folder."""
    for shard in dataset.manifest.shards:
        with tarfile.open(dataset.shard_path(shard)) as tar:
            for member in tar:
                file = tar.extractfile(member)
                if member.name.endswith(".json") and file is not None:
                    yield {"id": int(member.name[:8]), **json.load(file)}

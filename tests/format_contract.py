"""Checks that every format has to pass; `tests/precache/test_formats.py` runs them over all formats."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from precache.dataset.converted import ConvertedDataset
from precache.formats import FORMATS, StoredSample
from precache.pictures import images
from precache.sources.tree import scan_tree
from precache.storage import read_regular_part


def stored_samples(dataset: ConvertedDataset) -> Iterator[tuple[str, StoredSample]]:
    """Yield shard path and sample of all samples, in stored order, read by the format's own reader."""
    read_shard = FORMATS[dataset.manifest.recipe.format].read_shard
    for shard in dataset.manifest.shards:
        path = dataset.shard_path(shard)
        for sample in read_shard(path):
            yield str(path), sample


def check_holds_its_tree(dataset: ConvertedDataset, raw_tree: Path, worst_psnr: float) -> None:
    """Check that a dataset holds every sample once, in the index's order, with the pixels of the converter.

    Args:
        worst_psnr: smallest allowed PSNR of a picture, in dB.
    """
    samples, rendering = scan_tree(raw_tree).samples, dataset.manifest.recipe.rendering
    rejected = {sample.id for sample in dataset.manifest.rejected}
    expected = [(sample.id, sample.label) for sample in samples if sample.id not in rejected]
    pairs = []
    for path, sample in stored_samples(dataset):
        pairs.append((sample.id, sample.label))
        file = f"{raw_tree}/{samples[sample.id].path}"
        rendered, _ = images.render(images.read_bytes(file), file, rendering)
        pixels = sample.pixels(path, images.CHANNELS[rendering.channels])
        assert pixels.shape == rendered.shape
        error = np.square(pixels.astype(float) - rendered).mean()
        assert error <= 255**2 / 10 ** (worst_psnr / 10), f"sample {sample.id}"
    assert sorted(pairs) == expected
    assert pairs != expected, "they are shuffled"
    index = dataset.read_index("train")
    assert pairs == list(zip(index.ids.tolist(), index.labels.tolist(), strict=True))
    check_byte_ranges(dataset)


def check_byte_ranges(dataset: ConvertedDataset) -> None:
    """Check that the index says where each sample lies, if the format has byte ranges."""
    form = FORMATS[dataset.manifest.recipe.format]
    if not form.has_byte_ranges:
        return
    ranges = dataset.read_index().byte_ranges[:].tolist()
    for (path, sample), (start, count) in zip(stored_samples(dataset), ranges, strict=True):
        alone = form.read_sample(read_regular_part(path, start, count))
        assert alone.id in (-1, sample.id)
        assert bytes(alone.data) == bytes(sample.data)


def check_hold_the_same_samples(datasets: Sequence[ConvertedDataset]) -> None:
    """Check that all hold the first one's samples: their ids, splits, labels, targets, fields and paths."""
    first, *others = datasets
    splits = {split: _described_samples(first, split) for split in first.manifest.samples_per_class}
    for other in others:
        assert other.manifest.samples_per_class == first.manifest.samples_per_class
        assert other.manifest.rejected == first.manifest.rejected
        for name in ("classes", "target", "fields"):
            assert getattr(other.manifest, name) == getattr(first.manifest, name)
        for split, samples in splits.items():
            assert _described_samples(other, split) == samples


def _described_samples(dataset: ConvertedDataset, split: str) -> dict[str, bytes]:
    """Return the columns of the split's index in the order of ids, but for those about stored bytes."""
    index = dataset.read_index(split)
    by_id = np.argsort(index.ids)
    names = set(index.names) - {"checksums", "shapes", "byte_ranges"}
    return {name: index[name].select(by_id).content() for name in names}


def check_another_reader_sees_the_same(
    dataset: ConvertedDataset, read: Iterator[tuple[int, dict[str, Any], Any]], known: dict[str, Any]
) -> None:
    """Check that another library's reader agrees with the format's own one.

    Args:
        read: id, values by name, and JPEG or pixels of each sample in stored order, of the other library.
        known: expected values of all samples, by name; lists may come without their shape.
    """
    for (_, sample), (sample_id, values, data) in zip(stored_samples(dataset), read, strict=True):
        assert sample_id == sample.id
        if isinstance(sample.data, bytes):
            assert data == sample.data
        else:
            assert np.array_equal(data, sample.data)
        for name, value in values.items():
            expected = known[name][sample_id]
            if isinstance(expected, str):
                assert value == expected
            else:
                assert np.allclose(np.ravel(value), np.ravel(np.asarray(expected, float)), rtol=1e-6), name

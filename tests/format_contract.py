"""Properties that every format keeps; `tests/precache/test_formats.py` runs them over all of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from precache.dataset.converted import ConvertedDataset
from precache.formats import FORMATS, StoredSample
from precache.pictures import images
from precache.sources.tree import scan_tree


def stored_samples(dataset: ConvertedDataset) -> Iterator[tuple[str, StoredSample]]:
    """(shard path, sample) of all samples, in written order, by our own reader."""
    read_shard = FORMATS[dataset.manifest.recipe.format].read_shard
    for shard in dataset.manifest.shards:
        path = dataset.shard_path(shard)
        for sample in read_shard(path):
            yield str(path), sample


def check_holds_its_tree(dataset: ConvertedDataset, raw_tree: Path, worst_psnr: float) -> None:
    """Every sample once, shuffled as the index says, with the converter's pixels: exactly, or as near."""
    samples, how = scan_tree(raw_tree).samples, dataset.manifest.recipe.rendering
    rejected = {sample.id for sample in dataset.manifest.rejected}
    expected = [(sample.id, sample.label) for sample in samples if sample.id not in rejected]
    held = []
    for path, sample in stored_samples(dataset):
        held.append((sample.id, sample.label))
        file = f"{raw_tree}/{samples[sample.id].path}"
        rendered, _ = images.render(images.read_bytes(file), file, how)
        pixels = sample.pixels(path, images.CHANNELS[how.channels])
        assert pixels.shape == rendered.shape
        error = np.square(pixels.astype(float) - rendered).mean()
        assert error <= 255**2 / 10 ** (worst_psnr / 10), f"sample {sample.id}"
    assert sorted(held) == expected != held
    index = dataset.read_index("train")
    assert held == list(zip(index.ids.tolist(), index.labels.tolist(), strict=True))


def check_another_reader_sees_the_same(
    dataset: ConvertedDataset, read: Iterator[tuple[int, dict[str, Any], Any]], known: dict[str, Any]
) -> None:
    """`read` gives (id, some of what is known of it, JPEG or pixels) in stored order, by others' code.

    `known` has the values of all samples, by name; lists may come without their shape.
    """
    for (_, ours), (sample_id, values, data) in zip(stored_samples(dataset), read, strict=True):
        assert sample_id == ours.id
        assert data == ours.data if isinstance(ours.data, bytes) else np.array_equal(data, ours.data)
        for name, value in values.items():
            expected = known[name][sample_id]
            if isinstance(expected, str):
                assert value == expected
            else:
                assert np.allclose(np.ravel(value), np.ravel(np.asarray(expected, float)), rtol=1e-6), name

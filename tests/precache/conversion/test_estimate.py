from pathlib import Path

import pytest

from precache import open_dataset
from precache.conversion.shard_writer import predict_bytes
from precache.sources.tree import scan_tree


@pytest.mark.parametrize(
    ("name", "error"),
    [("shards", 0.0), ("webdataset", 0.05), ("dali", 0.05), ("keep-shards", 0.1), ("rectangle-shards", 0.0)],
)
def test_the_bytes_of_each_format_are_foretold(
    name: str, error: float, raw_tree: Path, converted: dict[str, Path], shaped: dict[str, Path]
) -> None:
    dataset = open_dataset({**converted, **shaped}[name])
    written = sum(file.bytes for shard in dataset.manifest.shards for file in shard.files)
    assert predict_bytes(scan_tree(raw_tree), dataset.manifest.recipe) == pytest.approx(written, rel=error)

"""Datasets of Hugging Face's library as sources, and what it saves; skipped if it is not installed."""

from pathlib import Path
from typing import Any

import pytest

from precache import convert, open_dataset
from tests.conftest import small_recipe
from tests.precache.sources.objects import picture


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    library = pytest.importorskip("datasets", reason="Hugging Face's datasets are not installed")
    library.disable_progress_bars()
    return library


def make_dataset(datasets: Any) -> Any:
    """Make a dataset of 12 grey pictures, labelled a and b in turns; the picture of row 1 is missing."""
    columns = {
        "image": [None if row == 1 else picture(row * 20) for row in range(12)],
        "label": [row % 2 for row in range(12)],
        "caption": [f"n° {row}" for row in range(12)],
    }
    dataset = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    return dataset.cast_column("label", datasets.ClassLabel(names=["a", "b"]))


def test_hf_datasets_keep_splits_order_and_missing_pictures(datasets: Any, tmp_path: Path) -> None:
    whole = make_dataset(datasets).select([*range(5, 12), *range(5)])
    parts = datasets.DatasetDict({"train": whole.select(range(8)), "test": whole.select(range(8, 12))})
    parts.save_to_disk(tmp_path / "saved")
    for number, source in enumerate((parts, tmp_path / "saved")):
        recipe = small_recipe("webdataset", size=8)
        out = tmp_path / f"out{number}"
        done = convert(source, out, recipe, workers=0, max_rejects=0.5, fields=("caption",))
        index = open_dataset(out).read_index("test")
        (rejected,) = done.manifest.rejected
        assert rejected.id == 8, "row 1 before the rows were reordered"
        assert rejected.reason.startswith("has no picture")
        assert sorted(index.ids.tolist()) == [9, 10, 11]
        for row, sample_id in enumerate(index.ids.tolist()):
            assert index.labels[row] == whole[sample_id]["label"]
            assert index.fields["caption"].row_value(row) == whole[sample_id]["caption"]

"""Mean and standard deviation of what is stored: exact, whoever wrote which shard when."""

from pathlib import Path

import numpy as np
import pytest

from precache import convert, open_dataset
from precache.dataset.statistics import NO_PIXELS, PixelSums
from tests.conftest import small_recipe
from tests.format_contract import stored


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_sums_are_exact_of_the_brightest_picture_too(dtype: type[np.integer]) -> None:
    picture = np.full((200, 7, 4), np.iinfo(dtype).max, dtype)
    picture[:5] = np.random.default_rng(0).integers(0, 255, (5, 7, 4), dtype)
    sums = PixelSums.from_picture(picture)
    wide = picture.astype(object).reshape(-1, 4)
    assert sums == PixelSums(len(wide), tuple(wide.sum(0)), tuple((wide**2).sum(0)))
    assert sums + NO_PIXELS == NO_PIXELS + sums == sums


def test_statistics_are_those_of_the_stored_pixels(raw_tree: Path, tmp_path: Path) -> None:
    recipe = small_recipe("shards", splits="train=0.7,val=0.3")
    manifest = convert(raw_tree, tmp_path / "out", recipe, workers=0).manifest
    for split in ("train", "val"):
        pictures = [s.pixels("") for path, s in stored(open_dataset(tmp_path / "out")) if split in path]
        pixels, found = np.concatenate([*map(np.vstack, pictures)]) / 255, manifest.statistics[split]
        assert found.pixels == len(pixels)
        assert found.mean == pytest.approx(pixels.mean(axis=0), abs=1e-12)
        assert found.std == pytest.approx(pixels.std(axis=0), abs=1e-12)
    assert open_dataset(tmp_path / "out").manifest.statistics == manifest.statistics


def test_jpegs_have_those_of_the_pixels_before_them(converted: dict[str, Path]) -> None:
    of = {name: open_dataset(path).manifest.statistics for name, path in converted.items()}
    assert of["webdataset"] == of["dali"] == of["shards"]

"""Mean and standard deviation are those of the stored pixels, computed exactly."""

from pathlib import Path

import numpy as np
import pytest

from precache import convert, open_dataset
from precache.dataset.statistics import NO_PIXELS, PixelSums
from tests.conftest import small_recipe
from tests.format_contract import stored_samples


def test_pixel_sums_of_the_brightest_picture_do_not_overflow() -> None:
    picture = np.full((200, 7, 3), 255, np.uint8)
    picture[:5] = np.random.default_rng(0).integers(0, 255, (5, 7, 3), np.uint8)
    unbounded = picture.astype(object).reshape(-1, 3)
    expected = PixelSums(len(unbounded), tuple(unbounded.sum(0)), tuple((unbounded**2).sum(0)))
    assert PixelSums.from_picture(picture) == expected


def test_adding_no_pixels_keeps_pixel_sums() -> None:
    sums = PixelSums(2, (3,), (5,))
    assert sums + NO_PIXELS == NO_PIXELS + sums == sums


def test_statistics_are_those_of_the_stored_pixels(raw_tree: Path, tmp_path: Path) -> None:
    recipe = small_recipe("shards", splits="train=0.7,val=0.3")
    manifest = convert(raw_tree, tmp_path / "out", recipe, workers=0).manifest
    dataset = open_dataset(tmp_path / "out")
    for split in ("train", "val"):
        pictures = [sample.pixels("") for path, sample in stored_samples(dataset) if split in path]
        pixels, statistics = np.concatenate([*map(np.vstack, pictures)]) / 255, manifest.statistics[split]
        assert statistics.pixels == len(pixels)
        assert statistics.mean == pytest.approx(pixels.mean(axis=0), abs=1e-12)
        assert statistics.std == pytest.approx(pixels.std(axis=0), abs=1e-12)
    assert dataset.manifest.statistics == manifest.statistics


def test_statistics_of_jpegs_are_those_of_the_pixels_before_encoding(converted: dict[str, Path]) -> None:
    by_format = {name: open_dataset(path).manifest.statistics for name, path in converted.items()}
    assert by_format["webdataset"] == by_format["dali"] == by_format["shards"]

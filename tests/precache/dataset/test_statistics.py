"""Mean and standard deviation of what is stored: exact, whoever wrote which shard when."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from precache import convert, open_dataset, verify_deep
from precache.dataset.manifest import MANIFEST_NAME
from precache.dataset.statistics import NO_PIXELS, ChannelStatistics, PixelSums
from precache.errors import DatasetError
from precache.formats import FORMATS
from tests.command import run
from tests.conftest import small_recipe
from tests.damage import edit_manifest

SPLITS = {"splits": "train=0.7,val=0.3"}


def stored_pixels(path: Path, split: str) -> np.ndarray:
    dataset = open_dataset(path)
    read_shard = FORMATS[dataset.manifest.recipe.format].read_shard
    shards = dataset.manifest.split_shards(split)
    pictures = [s.pixels("") for shard in shards for s in read_shard(dataset.shard_path(shard))]
    return np.concatenate([picture.reshape(-1, picture.shape[-1]) for picture in pictures])


def edit_statistics(path: Path, split: str, name: str, value: object) -> None:
    """As a saboteur does it: the checksum fits."""
    content = json.loads((path / MANIFEST_NAME).read_text())["statistics"]
    content[split][name] = value
    edit_manifest(path, statistics=content)


@pytest.mark.parametrize("shape", [(1, 1, 3), (64, 48, 1), (65, 48, 3), (200, 7, 4)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_sums_are_exact(shape: tuple[int, ...], dtype: type[np.integer]) -> None:
    most = np.iinfo(dtype).max
    for picture in (
        np.full(shape, most, dtype),
        np.random.default_rng(0).integers(0, most + 1, shape, dtype=dtype),
    ):
        sums = PixelSums.of(picture)
        wide = picture.astype(object).reshape(-1, shape[2])
        assert sums == PixelSums(len(wide), tuple(wide.sum(0)), tuple((wide**2).sum(0)))
        assert sums + NO_PIXELS == NO_PIXELS + sums == sums


def test_statistics_are_those_of_the_stored_pixels(raw_tree: Path, tmp_path: Path) -> None:
    manifest = convert(raw_tree, tmp_path / "out", small_recipe("shards", **SPLITS), workers=0).manifest
    for split in ("train", "val"):
        pixels = stored_pixels(tmp_path / "out", split).astype(np.float64) / 255
        found = manifest.statistics[split]
        assert found.pixels == len(pixels)
        assert found.mean == pytest.approx(pixels.mean(axis=0), abs=1e-12)
        assert found.std == pytest.approx(pixels.std(axis=0), abs=1e-12)
    assert open_dataset(tmp_path / "out").manifest.statistics == manifest.statistics


def test_jpegs_have_those_of_the_pixels_before_them(converted: dict[str, Path]) -> None:
    of = {name: open_dataset(path).manifest.statistics for name, path in converted.items()}
    assert of["webdataset"] == of["dali"] == of["shards"]


def test_verify_deep_finds_wrong_statistics(
    converted: dict[str, Path], raw_tree: Path, tmp_path: Path
) -> None:
    for name in ("shards", "webdataset"):
        assert verify_deep(converted[name], raw_tree, workers=0).problems == ()
        path = Path(shutil.copytree(converted[name], tmp_path / name))
        edit_statistics(path, "train", "mean", [0.5, 0.25, 0.25])
        (problem,) = verify_deep(path, raw_tree, workers=0).problems
        assert "split train has mean" in problem
        assert "its manifest says mean 0.5000 0.2500 0.2500" in problem
        result = run("precache", "verify", path, raw_tree, "--deep", "--workers", 0, cwd=tmp_path)
        assert result.returncode == 1
        assert problem in result.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("mean", [2.0, 0.1, 0.1]), ("std", [float("nan")] * 3), ("std", []), ("mean", None), ("pixels", -1)],
)
def test_statistics_that_cannot_be_are_refused(
    converted: dict[str, Path], tmp_path: Path, name: str, value: object
) -> None:
    path = Path(shutil.copytree(converted["shards"], tmp_path / "out"))
    edit_statistics(path, "train", name, value)
    with pytest.raises(DatasetError, match=f"{MANIFEST_NAME}: not a manifest of this project"):
        open_dataset(path)


def test_the_sum_of_nothing_has_no_statistics() -> None:
    assert ChannelStatistics.of([]) is None
    assert ChannelStatistics.of([PixelSums.of(np.zeros((2, 2, 3), np.uint8)), NO_PIXELS]) is None
    flat = ChannelStatistics.of([PixelSums.of(np.full((9, 9, 1), 255, np.uint8))])
    assert flat == ChannelStatistics((1.0,), (0.0,), 81)

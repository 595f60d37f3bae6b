"""What floats are normalised with: ImageNet's figures, the dataset's own, the caller's, or nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loaders
from loaders.transfer import IMAGENET_MEAN, IMAGENET_STD
from precache import convert, open_dataset
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import small_recipe

MEAN, STD = (0.5, 0.25, 0.125), (0.5, 2.0, 0.25)


def served(path: Path, **settings: Any) -> torch.Tensor:
    with build_loader(path, shuffle=False, workers=1, batch_size=70, **settings) as loader:
        return torch.cat([batch.images for batch in loader])


@pytest.mark.parametrize(("splits", "of", "by"), [("train,val", "val", "train"), ("one,two", "two", "two")])
def test_every_split_is_normalised_as_the_training_split(
    splits: str, of: str, by: str, raw_tree: Path, tmp_path: Path
) -> None:
    shares = f"{splits.replace(',', '=0.7,')}=0.3"
    convert(raw_tree, tmp_path / "a", small_recipe("shards", splits=shares), workers=0)
    found = open_dataset(tmp_path / "a").manifest.statistics[by]
    pixels = served(tmp_path / "a", split=of)
    for normalize, mean, std in (
        ("dataset", found.mean, found.std),
        (None, [0.0], [1.0]),
        ((np.array(MEAN), list(STD)), MEAN, STD),
        ((0.5, 0.25), [0.5], [0.25]),
    ):
        floats = served(tmp_path / "a", dtype="float32", normalize=normalize, split=of)
        shift, scale = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 1) for part in (mean, std))
        assert torch.allclose(floats, (pixels / 255 - shift) / scale, atol=1e-4)


@pytest.mark.parametrize("kind", ["raw", "shards", "webdataset"])
def test_a_model_takes_what_is_served_by_default(
    kind: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    path = {"raw": raw_tree, **converted}[kind]
    with loaders.build(path, size=32, shuffle=False, reading=loaders.Reading(workers=0)) as loader:
        images, labels = next(iter(loader))
    assert torch.nn.Conv2d(3, 2, 3)(images).shape[:2] == (len(labels), 2)
    pixels = served(path, size=32, crop_ratio=0.875)[: len(labels)]
    shift, scale = (torch.tensor(part).view(-1, 1, 1) for part in (IMAGENET_MEAN, IMAGENET_STD))
    assert torch.allclose(images, (pixels / 255 - shift) / scale, atol=1e-5)


@pytest.mark.parametrize("normalize", ["imagnet", (MEAN,), (MEAN, (0.0, 1.0, 1.0)), (("a", "b", "c"), STD)])
def test_a_wrong_setting_says_what_would_do(converted: dict[str, Path], normalize: Any) -> None:
    with pytest.raises(SettingError, match=r"normalize.*('imagenet', 'dataset'|dataset, imagenet)"):
        build_loader(converted["shards"], normalize=normalize)


@pytest.mark.parametrize("normalize", ["dataset", (MEAN, STD), np.array([MEAN, STD])])
def test_integers_that_are_to_be_normalised_are_refused(converted: dict[str, Path], normalize: Any) -> None:
    with pytest.raises(SettingError, match="uint8"):
        build_loader(converted["shards"], dtype="uint8", normalize=normalize)
    build_loader(converted["shards"], dtype="uint8", normalize=None).close()

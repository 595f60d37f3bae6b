"""What floats are normalised with: ImageNet's figures, the dataset's own, the caller's, or nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from loaders.transfer import IMAGENET_MEAN, IMAGENET_STD
from precache import convert, open_dataset
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import small_recipe

MEAN, STD = (0.5, 0.25, 0.125), (0.5, 2.0, 0.25)


def served(path: Path, **settings: Any) -> torch.Tensor:
    with build_loader(path, shuffle=False, workers=1, batch_size=70, **settings) as loader:
        return torch.cat([batch.images for batch in loader])


def test_floats_are_normalised_with_what_is_asked_for(converted: dict[str, Path]) -> None:
    path = converted["shards"]
    found, pixels = open_dataset(path).manifest.statistics["train"], served(path)
    for normalize, mean, std in (
        ("imagenet", IMAGENET_MEAN, IMAGENET_STD),
        ("dataset", found.mean, found.std),
        ((MEAN, STD), MEAN, STD),
        ((np.array(MEAN), list(STD)), MEAN, STD),
        ((0.5, 0.25), [0.5] * 3, [0.25] * 3),
        (None, [0.0], [1.0]),
    ):
        shift, scale = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 1) for part in (mean, std))
        floats = served(path, dtype="float32", normalize=normalize)
        assert torch.allclose(floats, (pixels / 255 - shift) / scale, atol=1e-4)
        assert torch.equal(served(path, normalize=normalize), pixels), "integers never are"
    whole = served(path, dtype="float32", normalize="dataset", size=48).double()
    assert whole.mean(dim=(0, 2, 3)).abs().max() < 1e-5
    assert (whole.std(dim=(0, 2, 3), correction=0) - 1).abs().max() < 1e-5


@pytest.mark.parametrize(("splits", "of", "by"), [("train,val", "val", "train"), ("one,two", "two", "two")])
def test_every_split_is_normalised_as_the_training_split(
    splits: str, of: str, by: str, raw_tree: Path, tmp_path: Path
) -> None:
    shares = f"{splits.replace(',', '=0.7,')}=0.3"
    convert(raw_tree, tmp_path / "a", small_recipe("shards", splits=shares), workers=0)
    found = open_dataset(tmp_path / "a").manifest.statistics[by]
    pixels = served(tmp_path / "a", split=of)
    floats = served(tmp_path / "a", dtype="float32", normalize="dataset", split=of)
    mean, std = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 1) for part in (found.mean, found.std))
    assert torch.allclose(floats, (pixels / 255 - mean) / std, atol=1e-4)


def test_statistics_that_are_of_no_use_are_named(raw_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "tree/a").mkdir(parents=True)
    for shade in (10, 200):
        Image.new("RGB", (9, 9), (shade, 0, shade)).save(tmp_path / f"tree/a/{shade}.png")
    convert(tmp_path / "tree", tmp_path / "out", small_recipe("shards"), workers=0)
    for path, said in ((raw_tree, f"{raw_tree} .*; convert it"), (tmp_path / "out", "channel 1 of .*same")):
        with pytest.raises(SettingError, match=said):
            build_loader(path, dtype="float32", normalize="dataset")


@pytest.mark.parametrize(
    "normalize",
    [
        "imagnet", 0.5, (), (MEAN,), (MEAN, STD, STD), (MEAN, STD[:2]), (MEAN, (0.0, 1.0, 1.0)), (MEAN, -1),
        ((0.1, float("nan"), 0.1), STD), (("a", "b", "c"), STD), ((), ()), True,
    ],
)  # fmt: skip
def test_a_wrong_setting_says_what_would_do(converted: dict[str, Path], normalize: Any) -> None:
    for dtype in ("uint8", "float32"):
        with pytest.raises(SettingError, match=r"normalize.*('imagenet', 'dataset'|dataset, imagenet)"):
            build_loader(converted["shards"], dtype=dtype, normalize=normalize)

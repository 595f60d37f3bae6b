"""What floats are normalised with: ImageNet's figures, the dataset's own, the caller's, or nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loaders.transfer import IMAGENET_MEAN, IMAGENET_STD
from precache import convert, open_dataset
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import small_recipe

MEAN, STD = (0.5, 0.25, 0.125), (0.5, 2.0, 0.25)


def served(path: Path, **settings: Any) -> torch.Tensor:
    with build_loader(path, shuffle=False, workers=1, batch_size=70, **settings) as loader:
        return torch.cat([batch.images for batch in loader])


def check(path: Path, normalize: object, mean: Any, std: Any, **settings: Any) -> None:
    pixels = served(path, **settings)
    floats = served(path, dtype="float32", normalize=normalize, **settings)
    mean, std = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 1) for part in (mean, std))
    assert torch.allclose(floats, (pixels / 255 - mean) / std, atol=1e-4)


def test_floats_are_normalised_with_what_is_asked_for(converted: dict[str, Path], raw_tree: Path) -> None:
    for path in (converted["shards"], raw_tree):
        check(path, "imagenet", IMAGENET_MEAN, IMAGENET_STD)
        check(path, (MEAN, STD), MEAN, STD)
        check(path, (np.array(MEAN), list(STD)), MEAN, STD)
        check(path, (0.5, 0.25), [0.5] * 3, [0.25] * 3)
    found = open_dataset(converted["shards"]).manifest.statistics["train"]
    check(converted["shards"], "dataset", found.mean, found.std)


def test_without_normalising_floats_are_from_0_to_1(converted: dict[str, Path]) -> None:
    floats = served(converted["shards"], dtype="float32", normalize=None)
    assert torch.allclose(floats * 255, served(converted["shards"]).float(), atol=1e-4)
    assert floats.min() >= 0
    assert floats.max() <= 1


@pytest.mark.parametrize("normalize", ["imagenet", "dataset", (MEAN, STD), None])
def test_integers_are_never_normalised(converted: dict[str, Path], normalize: Any) -> None:
    plain, asked = served(converted["shards"]), served(converted["shards"], normalize=normalize)
    assert asked.dtype == torch.uint8
    assert torch.equal(plain, asked)


def test_every_split_is_normalised_as_the_training_split(raw_tree: Path, tmp_path: Path) -> None:
    convert(raw_tree, tmp_path / "a", small_recipe("shards", splits="train=0.7,val=0.3"), workers=0)
    convert(raw_tree, tmp_path / "b", small_recipe("shards", splits="one=0.7,two=0.3"), workers=0)
    train = open_dataset(tmp_path / "a").manifest.statistics["train"]
    check(tmp_path / "a", "dataset", train.mean, train.std, split="val")
    two = open_dataset(tmp_path / "b").manifest.statistics["two"]
    check(tmp_path / "b", "dataset", two.mean, two.std, split="two")


def test_a_whole_split_has_mean_0_and_deviation_1(converted: dict[str, Path]) -> None:
    floats = served(converted["shards"], dtype="float32", normalize="dataset", size=48).double()
    assert floats.mean(dim=(0, 2, 3)).abs().max() < 1e-5
    assert (floats.std(dim=(0, 2, 3), correction=0) - 1).abs().max() < 1e-5


def test_statistics_that_are_not_there_are_asked_for_in_vain(raw_tree: Path) -> None:
    remedy = "a raw tree, of which they are not known; convert it"
    with pytest.raises(SettingError, match=f"normalize 'dataset' needs mean.*{raw_tree} is {remedy}"):
        build_loader(raw_tree, dtype="float32", normalize="dataset")


def test_a_channel_without_deviation_is_named(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "tree/a").mkdir(parents=True)
    for shade in (10, 200):
        Image.new("RGB", (9, 9), (shade, 0, shade)).save(tmp_path / f"tree/a/{shade}.png")
    convert(tmp_path / "tree", tmp_path / "out", small_recipe("shards"), workers=0)
    with pytest.raises(SettingError, match=r"channel 1 of .* has the same value everywhere"):
        build_loader(tmp_path / "out", dtype="float32", normalize="dataset")


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


def test_numbers_for_other_channels_are_refused(converted: dict[str, Path]) -> None:
    with pytest.raises(SettingError, match=r"normalize has 2 numbers each, the channels of .* are 3"):
        build_loader(converted["shards"], dtype="float32", normalize=(MEAN[:2], STD[:2]))

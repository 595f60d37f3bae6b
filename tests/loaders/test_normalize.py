"""Normalising by ImageNet's mean and standard deviation, the dataset's own, the caller's, or none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loaders
from loaders.augment.applying import apply_to_batch
from loaders.augment.crops import LateAugmentation, View
from loaders.augment.policies import draw_augmentation
from loaders.transfer import IMAGENET_MEAN, IMAGENET_STD, normalise
from precache import convert, open_dataset
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import small_recipe

MEAN, STD = (0.5, 0.25, 0.125), (0.5, 2.0, 0.25)


def served(path: Any, **settings: Any) -> torch.Tensor:
    with build_loader(path, shuffle=False, workers=1, batch_size=70, **settings) as loader:
        return torch.cat([batch.images for batch in loader])


@pytest.mark.parametrize(
    ("shares", "split", "statistics_split"),
    [("train=0.7,val=0.3", "val", "train"), ("one=0.7,two=0.3", "two", "two")],
)
def test_every_split_is_normalised_as_the_training_split(
    shares: str, split: str, statistics_split: str, raw_tree: Path, tmp_path: Path
) -> None:
    convert(raw_tree, tmp_path / "a", small_recipe("shards", splits=shares), workers=0)
    statistics = open_dataset(tmp_path / "a").manifest.statistics[statistics_split]
    pixels = served(tmp_path / "a", split=split)
    for normalize, mean, std in (
        ("dataset", statistics.mean, statistics.std),
        (None, [0.0], [1.0]),
        ((np.array(MEAN), list(STD)), MEAN, STD),
        ((0.5, 0.25), [0.5], [0.25]),
    ):
        floats = served(tmp_path / "a", dtype="float32", normalize=normalize, split=split)
        shift, scale = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 1) for part in (mean, std))
        assert torch.allclose(floats, (pixels / 255 - shift) / scale, atol=1e-4)


@pytest.mark.parametrize("kind", ["raw", "shards", "webdataset"])
def test_default_batches_are_normalised_for_a_model(
    kind: str, raw_tree: Path, converted: dict[str, Path]
) -> None:
    path = {"raw": raw_tree, **converted}[kind]
    with loaders.build(path, size=32, shuffle=False, reading=loaders.Reading(workers=0)) as loader:
        images, labels = next(iter(loader))
    assert torch.nn.Conv2d(3, 2, 3)(images).shape[:2] == (len(labels), 2)
    pixels = served(path, size=32, crop_ratio=0.875)[: len(labels)]
    shift, scale = (torch.tensor(part).view(-1, 1, 1) for part in (IMAGENET_MEAN, IMAGENET_STD))
    assert torch.allclose(images, (pixels / 255 - shift) / scale, atol=1e-5)


@pytest.mark.parametrize("default", [torch.float64, "meta"], ids=str)
def test_torchs_default_dtype_and_device_change_no_value(
    converted: dict[str, Path], default: torch.dtype | str
) -> None:
    """Large models are built with another default; what a function does here stands for the work on a GPU."""
    jitter = loaders.RandomAugmentation(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
    late = LateAugmentation([View(32, loaders.RandomAugmentation())], 0, crops_here=True)

    def augment_late(images: torch.Tensor, ids: torch.Tensor, epoch: int) -> torch.Tensor:
        operations = draw_augmentation(jitter, 32, 32, 0, epoch, ids.numpy()).operations
        return apply_to_batch(late.apply(0, images, ids.numpy(), epoch), operations)

    paths = converted["shards"], converted["webdataset"]

    def serve() -> list[torch.Tensor]:
        augments = (None, "train", jitter, augment_late)
        settings: dict[str, Any] = {"size": 32, "dtype": "float32"}
        images = [served(path, augment=augment, **settings) for path in paths for augment in augments]
        pixels = torch.from_numpy(np.arange(192, dtype=np.uint8).reshape(1, 3, 8, 8))
        return [*images, normalise(pixels, torch.float32)]

    expected = serve()
    set_default = torch.set_default_dtype if isinstance(default, torch.dtype) else torch.set_default_device
    set_default(default)
    try:
        images = serve()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    for tensor, expected_tensor in zip(images, expected, strict=True):
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected_tensor)


@pytest.mark.parametrize("normalize", ["imagnet", (MEAN,), (MEAN, (0.0, 1.0, 1.0)), (("a", "b", "c"), STD)])
def test_a_wrong_normalize_lists_what_to_give(converted: dict[str, Path], normalize: Any) -> None:
    with pytest.raises(SettingError, match=r"normalize.*('imagenet', 'dataset'|dataset, imagenet)"):
        build_loader(converted["shards"], normalize=normalize)


@pytest.mark.parametrize("normalize", ["dataset", (MEAN, STD), np.array([MEAN, STD])])
def test_normalising_integers_is_refused(converted: dict[str, Path], normalize: Any) -> None:
    with pytest.raises(SettingError, match="uint8"):
        build_loader(converted["shards"], dtype="uint8", normalize=normalize)
    build_loader(converted["shards"], dtype="uint8", normalize=None).close()

"""MixUp, CutMix, RandAugment and RandomErasing are torchvision's and kornia's: they take our batches."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.transforms import v2

from loaders import Batch
from precache.errors import SettingError
from tests.building import build_loader

CLASSES = 5
TRAIN: dict[str, Any] = {"augment": "train", "size": 32, "batch_size": 16, "workers": 1}


@pytest.mark.parametrize("mix", [v2.MixUp(num_classes=CLASSES), v2.CutMix(num_classes=CLASSES)])
def test_torchvision_mixes_a_batch(converted: dict[str, Path], mix: v2.Transform) -> None:
    with build_loader(converted["shards"], dtype="float32", **TRAIN) as loader:
        for batch in loader:
            images, labels = mix(*batch)
            assert images.shape == batch.images.shape
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert labels.shape == (len(batch.ids), CLASSES)
            assert torch.allclose(labels.sum(dim=1), torch.ones(len(labels)))
            whole = mix(batch)
            assert isinstance(whole, Batch)
            assert torch.equal(whole.ids, batch.ids)
            assert whole.labels.shape == labels.shape


def test_torchvision_transforms_the_images_of_a_batch(converted: dict[str, Path]) -> None:
    with build_loader(converted["shards"], **TRAIN) as loader:
        batch = next(iter(loader))
    for transform in (v2.RandAugment(), v2.RandomErasing(1.0), v2.TrivialAugmentWide()):
        out = transform(batch.images)
        assert (out.shape, out.dtype) == (batch.images.shape, torch.uint8)


def test_soft_labels_come_through_augment(converted: dict[str, Path]) -> None:
    """CutMix in the thread that reads ahead: with seeds of its own it can be resumed."""
    mix = v2.CutMix(num_classes=CLASSES)

    def cut_and_mix(
        images: torch.Tensor, ids: torch.Tensor, epoch: int, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(epoch * 1_000_003 + int(ids[0]))
            mixed, soft = mix(images.permute(0, 3, 1, 2), labels)
        return mixed.permute(0, 2, 3, 1), soft

    settings: dict[str, Any] = {"augment": cut_and_mix, "batch_size": 16, "workers": 1}
    with build_loader(converted["shards"], **settings) as loader:
        loader.set_epoch(3)
        served = list(loader)
    with build_loader(converted["shards"], **settings) as again:
        again.set_epoch(3)
        for batch, expected in zip(again, served, strict=True):
            assert batch.labels.shape == (len(batch.ids), CLASSES)
            assert batch.labels.is_floating_point()
            assert torch.equal(batch.labels, expected.labels)
            assert torch.equal(batch.images, expected.images)
    assert any((batch.labels.max(dim=1).values < 1).any() for batch in served), "some are mixed"


def test_what_a_function_of_labels_returns_is_looked_at(converted: dict[str, Path]) -> None:
    flawed: tuple[tuple[Any, str], ...] = (
        (lambda images, labels: images, "it must return images and labels, got Tensor"),
        (lambda images, labels: (images, labels[1:]), r"must return labels \[16\] .*, got \[15\]"),
        (lambda images, labels: (images, None), r"must return labels \[16\] .*, got NoneType"),
        (lambda images, labels: (images[1:], labels), "return as many pictures as it was given"),
    )
    for returned, problem in flawed:
        function = partial(_of_labels, returned)
        with (
            build_loader(converted["shards"], augment=function, batch_size=16, workers=1) as loader,
            pytest.raises(SettingError, match=problem),
        ):
            list(loader)


def _of_labels(
    returned: Any, images: torch.Tensor, ids: torch.Tensor, epoch: int, labels: torch.Tensor
) -> Any:
    return returned(images, labels)


def test_kornia_draws_for_each_picture_on_its_device(converted: dict[str, Path]) -> None:
    augmentation = pytest.importorskip(
        "kornia.augmentation", reason="kornia is not installed: pip install kornia"
    )
    erase = augmentation.RandomErasing(p=1.0)
    jitter = augmentation.auto.RandAugment(n=2, m=10)
    mix = augmentation.RandomMixUpV2(data_keys=["input", "class"], p=1.0)
    with build_loader(converted["shards"], dtype="float32", normalize=None, **TRAIN) as loader:
        for images, labels in loader:
            assert erase(images).shape == jitter(images).shape == images.shape
            mixed, soft = mix(images, labels)
            assert mixed.shape == images.shape
            assert len(soft) == len(labels)

    def erased(images: torch.Tensor, ids: torch.Tensor, epoch: int) -> torch.Tensor:
        floats = erase(images.permute(0, 3, 1, 2) / 255)
        return (floats * 255).round().to(torch.uint8).permute(0, 2, 3, 1)

    with build_loader(converted["shards"], augment=erased, batch_size=16, workers=1) as loader:
        assert all((batch.images == 0).any() for batch in loader)

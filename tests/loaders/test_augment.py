"""Random crops: torchvision's distributions, seeded by sample, the same wherever they are made."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import transforms
from torchvision.transforms import RandomResizedCrop, v2

import loaders
from loaders.augment.draws import uniforms
from loaders.augment.functions import BatchFunction
from loaders.augment.geometry import random_boxes
from loaders.augment.policies import RandomAugmentation, draw_augmentation
from precache.errors import SettingError
from tests.building import build_loader
from tests.conftest import STORED_SIZE

SIDE, COUNT = 256, 40_000
DEFAULTS = RandomAugmentation()


def largest_gap(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference of the two distribution functions (Kolmogorov and Smirnov)."""
    points = np.unique(np.concatenate((a, b)))
    shares = [np.searchsorted(np.sort(values), points, side="right") / len(values) for values in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


def test_random_boxes_are_distributed_as_in_torchvision() -> None:
    """Two samples of 40,000 from one distribution lie within 0.0138 in 999 of 1,000 cases."""
    boxes = random_boxes(SIDE, uniforms(0, 0, np.arange(COUNT), 40), DEFAULTS.scale, DEFAULTS.ratio)
    torch.manual_seed(0)
    square = torch.empty(3, SIDE, SIDE)
    drawn = [RandomResizedCrop.get_params(square, DEFAULTS.scale, DEFAULTS.ratio) for _ in range(COUNT)]
    torchvisions = np.array([(left, top, width, height) for top, left, height, width in drawn], float)
    measures = (
        lambda b: b[:, 2] * b[:, 3],
        lambda b: b[:, 2] / b[:, 3],
        lambda b: b[:, 0],
        lambda b: b[:, 1],
        lambda b: b[:, 0] + b[:, 2],
    )
    for measure in measures:
        assert largest_gap(measure(boxes), measure(torchvisions)) < 0.0138
    left, top, width, height = boxes.T
    assert min(left.min(), top.min()) == 0
    assert (left + width).max() == (top + height).max() == SIDE


def test_draws_are_uniform_and_depend_on_seed_epoch_and_id_alone() -> None:
    draws = uniforms(3, 1, np.arange(COUNT), 8)
    assert largest_gap(draws.ravel(), np.linspace(0, 1, COUNT, endpoint=False)) < 0.01
    assert np.abs(np.corrcoef(draws.T) - np.eye(8)).max() < 0.03
    some = np.array([7, 2, 11])
    assert np.array_equal(uniforms(3, 1, some, 8), draws[some])
    assert not np.intersect1d(uniforms(3, 2, np.arange(100), 8), draws).size
    assert not np.array_equal(uniforms(1, 0, some, 8), uniforms(0, 1, some, 8))


def test_random_boxes_fall_back_as_in_torchvision_if_no_ratio_fits() -> None:
    for ratio in ((3.0, 4.0), (0.2, 0.25), (1.0, 1.0)):
        boxes = random_boxes(64, uniforms(0, 0, np.arange(50), 40), (1.0, 1.0), ratio)
        top, left, height, width = RandomResizedCrop.get_params(torch.empty(3, 64, 64), (1.0, 1.0), ratio)
        assert (boxes == [left, top, width, height]).all()


def by_id(served: Iterable[loaders.Batch]) -> dict[int, torch.Tensor]:
    return {int(i): image for batch in served for i, image in zip(batch.ids, batch.images, strict=True)}


def pictures(path: Path, **settings: object) -> dict[int, torch.Tensor]:
    with build_loader(path, **{"size": 32, "augment": "train", "workers": 1, **settings}) as loader:
        return by_id(loader)


def test_a_sample_is_augmented_alike_in_any_batch_rank_and_order(converted: dict[str, Path]) -> None:
    path, settings = converted["shards"], {"size": 32, "augment": "train", "workers": 1}
    with build_loader(path, batch_size=16, **settings) as loader:
        epochs = [by_id(loader) for _ in range(2)]
        loader.set_epoch(0)
        first_epoch_again = by_id(loader)
    ranks = [pictures(path, rank=rank, world_size=2) for rank in (0, 1)]
    others = [first_epoch_again, pictures(path, batch_size=7, shuffle=False), {**ranks[0], **ranks[1]}]
    for other in others:
        assert epochs[0].keys() == other.keys()
        assert all(torch.equal(image, other[i]) for i, image in epochs[0].items())
    for different in (epochs[1], pictures(path, augment="eval")):
        assert sum(torch.equal(image, different[i]) for i, image in epochs[0].items()) < 5


def test_a_random_augmentation_applies_its_settings(converted: dict[str, Path]) -> None:
    centre = pictures(converted["shards"], augment="eval", size=STORED_SIZE)
    whole = RandomAugmentation(scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=1.0)
    mirrored = pictures(converted["shards"], augment=whole, size=STORED_SIZE)
    assert all(torch.equal(mirrored[i], centre[i].flip(-1)) for i in centre)
    dark = RandomAugmentation(scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0, brightness=0.9)
    jittered = pictures(converted["shards"], augment=dark, size=STORED_SIZE)
    draws = draw_augmentation(dark, STORED_SIZE, STORED_SIZE, 0, 0, np.array(list(centre)))
    for i, factor in zip(centre, draws.operations.values[:, 0, 0], strict=True):
        expected = (centre[i].float() * factor).clamp(0, 255).round()
        assert (jittered[i].float() - expected).abs().max() <= 1


def test_augment_crop_serves_unresized_parts_of_pictures(converted: dict[str, Path]) -> None:
    whole = pictures(converted["shards"], augment="eval", size=STORED_SIZE)
    places: dict[int, tuple[int, int, int]] = {}
    for sample_id, image in pictures(converted["shards"], augment="crop").items():
        parts = whole[sample_id].unfold(1, 32, 1).unfold(2, 32, 1)  # [3, top, left, 32, 32]
        for is_flipped, crop in enumerate((image, image.flip(-1))):
            is_equal = (parts == crop[:, None, None]).all(dim=(0, 3, 4))
            if is_equal.any():
                top, left = is_equal.nonzero()[0].tolist()
                places[sample_id] = is_flipped, top, left
    assert places.keys() == whole.keys()
    assert len(set(places.values())) > 40


def test_an_augment_function_with_a_wrong_result_is_refused(converted: dict[str, Path]) -> None:
    def with_labels(
        images: torch.Tensor, ids: torch.Tensor, epoch: int, labels: torch.Tensor, function: Any
    ) -> Any:
        return function(images, labels)

    wrong: tuple[tuple[BatchFunction, str], ...] = (
        (lambda x, ids, e: x.permute(0, 3, 1, 2), "this is NCHW: return"),
        (lambda x, ids, e: x[:-1], "return as many pictures"),
        (lambda x, ids, e: x[..., :1], "return NHWC, with as many channels as"),
        (lambda x, ids, e: x / 255, "return uint8, 0-255, as it was given"),
        (lambda x, ids, e: x[:, :40], "return the size that the loader"),
        (lambda x, ids, e: x.to("meta"), "leave them on the device"),
        (lambda x, ids, e: None, "got NoneType; return a torch tensor"),
        (partial(with_labels, function=lambda x, y: x), "must return images and labels, got Tensor"),
        (partial(with_labels, function=lambda x, y: (x, y[1:])), r"labels \[16\] .*, got \[15\]"),
        (partial(with_labels, function=lambda x, y: (x[1:], y)), "return as many pictures"),
    )
    for function, fault in wrong:
        with pytest.raises(SettingError, match=f"augment function .*{fault}"):
            pictures(converted["shards"], augment=function, batch_size=16, size=STORED_SIZE)


@pytest.mark.parametrize(
    "function",
    [
        transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()]), v2.RandAugment(),
        v2.Compose([v2.RandomResizedCrop(32)]), torch.nn.Identity(), torch.nn.Sequential(v2.ColorJitter(0.1)),
        transforms.ToTensor, v2.RandAugment, v2.functional.resize,
        partial(v2.functional.gaussian_blur, kernel_size=3),
        lambda images: images, lambda images, labels: (images, labels),
    ],
)  # fmt: skip
def test_a_transform_of_one_picture_is_refused_at_once(function: Any, converted: dict[str, Path]) -> None:
    with pytest.raises(SettingError, match=r"function \(images, ids, epoch\).* takes \(") as caught:
        build_loader(converted["shards"], augment=function)
    assert "augment=loaders.per_picture(transform)" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("augment", "remedy"),
    [
        (v2.CutMix(num_classes=3), r"RandomAugmentation\(mixup=0.2, cutmix=1.0\)"),
        ("rand-m7", r"RandomAugmentation\(policy='rand-m7'\)"),
        ("dinov2", "did you mean 'dino'"),
        (3, "names: crop, eval"),
        (RandomAugmentation, "RandomAugmentation itself; call it"),
        (loaders.per_picture, "per_picture itself; call it"),
    ],
)
def test_what_is_no_augmentation_is_refused_with_one(augment: Any, remedy: str, raw_tree: Path) -> None:
    with pytest.raises(SettingError, match=remedy):
        build_loader(raw_tree, augment=augment)


class _Doubled(torch.nn.Module):
    def forward(self, images: torch.Tensor, ids: torch.Tensor, epoch: int) -> torch.Tensor:
        return images * 2


@pytest.mark.parametrize(
    "function",
    [_Doubled(), lambda *batch: batch[0] * 2, lambda x, *others, **more: x * 2, lambda x, ids, e, k=2: x * k],
    ids=["module", "any arguments", "more arguments", "a default"],
)
def test_a_function_that_takes_a_batch_in_any_way_is_called(
    function: Any, converted: dict[str, Path]
) -> None:
    plain = pictures(converted["shards"], augment=None, size=STORED_SIZE)
    doubled = pictures(converted["shards"], augment=function, size=STORED_SIZE)
    assert all(torch.equal(doubled[i], picture * 2) for i, picture in plain.items())


def test_an_augment_function_must_keep_the_size_of_its_first_batch(converted: dict[str, Path]) -> None:
    sides = iter((40, 41))
    with pytest.raises(SettingError, check=lambda error: "first batch" in error.remedy):
        pictures(converted["shards"], augment=lambda x, ids, e: x[:, : next(sides)], size=None)


def test_loader_size_is_that_of_an_augment_function(converted: dict[str, Path]) -> None:
    """Reading `size` before the first batch takes no batch away."""
    with build_loader(converted["shards"], augment=lambda x, ids, e: x[:, :31, :31], batch_size=35) as loader:
        for served_batches in (0, 1):
            loader.load_state_dict({**loader.state_dict(), "epoch": 3, "served_batches": served_batches})
            assert loader.size == 31
            assert loader.state_dict()["served_batches"] == served_batches
            assert [batch.images.shape[2:] for batch in loader] == [(31, 31)] * (2 - served_batches)

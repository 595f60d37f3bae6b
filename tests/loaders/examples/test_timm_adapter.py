"""timm's training script on our loaders; SCRIPT stands for it, since timm's package does not hold it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import loaders
from loaders.transfer import IMAGENET_MEAN
from precache import SettingError
from tests.loaders.examples.conftest import IMAGES, TRAINED

timm = pytest.importorskip("timm", reason="pip install 'precache[frameworks]'")
adapter = pytest.importorskip("loaders.examples.timm_adapter")
BATCH = 8
JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4}
SETTINGS = {"num_workers": 1, "device": torch.device("cpu"), "mean": (0.5,) * 3, "std": (0.5,) * 3}
SCRIPT = """
import json, sys, torch
from timm.data import FastCollateMixup, create_dataset, create_loader

root, mixup, version = sys.argv[1], float(sys.argv[2]), sys.argv[3]
more = {"batch_size": 8, "seed": 42, "repeats": 0}
train_dataset = create_dataset("", root=root, split="train", is_training=True, **more)
eval_dataset = create_dataset("", root=root, split="val", is_training=False, batch_size=8)
shared = {"input_size": (3, 32, 32), "batch_size": 8, "use_prefetcher": True, "device": torch.device("cpu")}
shared |= {"mean": (0.5,) * 3, "std": (0.5,) * 3, "num_workers": 1, "distributed": False}
erases = {"interpolation": "random", "re_prob": 0.5, "re_mode": "pixel"}
collate = FastCollateMixup(mixup_alpha=mixup, num_classes=5) if mixup else None
training = create_loader(train_dataset, is_training=True, collate_fn=collate, **erases, **shared)
validation = create_loader(eval_dataset, is_training=False, crop_pct=0.9, **shared)
for epoch in range(2):
    if version == "older":
        train_dataset.set_epoch(epoch)
    elif hasattr(training.batch_sampler, "set_epoch"):  # train.py of 2026
        training.batch_sampler.set_epoch(epoch)
    if epoch == 1 and training.mixup_enabled:
        training.mixup_enabled = False
    batches = [([*images.shape], target.tolist()) for images, target in training]
    assert len(batches) == len(training)
    print(json.dumps([batches, sum(len(images) for images, _ in validation)]))
"""


def create_training(path: Path, **options: Any) -> Any:
    """Create dataset and loader of a training as the script does, with more arguments of `create_loader`."""
    dataset = adapter.create_dataset("", root=str(path), split="train", seed=7)
    settings = {"batch_size": BATCH, "is_training": True, **SETTINGS, **options}
    return dataset, adapter.create_loader(dataset, (3, 24, 24), **settings)


@pytest.mark.parametrize(("mixup", "version"), [(0.0, "older"), (1.0, "today")])
def test_script_trains_and_validates_on_our_loaders(
    mixup: float,
    version: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The script turns MixUp off in its second epoch."""
    with loaders.build(data, batch_size=BATCH, seed=42, sampling=loaders.Sampling(last="drop")) as loader:
        labels = [[batch.labels.tolist() for batch in loader] for _ in range(2)]
    (tmp_path / "script.py").write_text(SCRIPT)
    for name in ("create_dataset", "create_loader", "create_naflex_loader"):
        monkeypatch.setattr(
            timm.data, name, getattr(timm.data, name, None), raising=False
        )  # put back at the end
    script = str(tmp_path / "script.py")
    monkeypatch.setattr(sys, "argv", ["timm_adapter", script, str(data), str(mixup), version])
    assert adapter.main() == 0
    epochs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {tuple(shape) for batches, _ in epochs for shape, _ in batches} == {(BATCH, 3, 32, 32)}
    assert [validated for _, validated in epochs] == [IMAGES - TRAINED] * 2
    targets = [[target for _, target in batches] for batches, _ in epochs]
    if mixup:
        assert any(sum(share > 0.1 for share in shares) > 1 for batch in targets[0] for shares in batch)
        assert all(max(shares) > 0.9 for batch in targets[1] for shares in batch)
        unmixed = [[shares.index(max(shares)) for shares in batch] for batch in targets[1]]
        assert unmixed == labels[1]
    else:
        assert targets == labels


def test_set_epoch_of_the_dataset_sets_the_epoch_of_the_loader(data: Path) -> None:
    dataset, training = create_training(data)
    served = [[labels.tolist() for _, labels in training] for _ in range(3)]
    dataset, training = create_training(data)
    dataset.set_epoch(2)
    assert [labels.tolist() for _, labels in training] == served[2] != served[0]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (
            {"scale": (0.5, 1.0), "ratio": (1.0, 1.0), "hflip": 0.0, "color_jitter": (0.1, 0, 0, 0.2)},
            {"scale": (0.5, 1.0), "ratio": (1.0, 1.0), "flip": 0.0, "brightness": 0.1, "hue": 0.2},
        ),
        ({"color_jitter": 0.4, "color_jitter_prob": 0.8}, {"jitter": 0.8, **JITTER}),
        ({"grayscale_prob": 0.2, "gaussian_blur_prob": 0.5}, {"grey": 0.2, "blur": 0.5, **JITTER}),
        ({"grayscale_prob": None, "gaussian_blur_prob": None}, JITTER),  # as train.py has them by default
        # RandAugment turns the jitter off in timm, and ThreeAugment does not
        ({"auto_augment": "rand-m9-mstd0.5-inc1"}, {"policy": "rand-m9-mstd0.5-inc1"}),
        ({"auto_augment": "3a"}, {"policy": "three", **JITTER}),
    ],
    ids=["crops", "jitter", "grey-blur", "none", "rand", "3a"],
)
def test_augmentation_is_that_of_the_arguments(options: dict[str, Any], settings: dict[str, Any]) -> None:
    assert adapter.make_augmentation(**options) == loaders.RandomAugmentation(**settings)


def test_pictures_are_normalised_with_mean_and_std_of_the_model(data: Path) -> None:
    _, plain = create_training(data, no_aug=True)
    _, other = create_training(data, no_aug=True, mean=(0.0,) * 3, std=(1.0,) * 3)
    for (images, _), (from_0_to_1, _) in zip(plain, other, strict=True):
        assert ((images + 1) / 2 - from_0_to_1).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("mean", "mode", "in_loader"),
    [(IMAGENET_MEAN, "const", True), (IMAGENET_MEAN, "rand", False), ((0.5,) * 3, "const", False)],
    ids=["mean", "colour", "other-mean"],
)
def test_random_erasing_blanks_a_part_of_each_batch(
    mean: tuple[float, ...], mode: str, in_loader: bool, data: Path
) -> None:
    _, erased = create_training(data, color_jitter=None, re_prob=1.0, re_mode=mode, mean=mean)
    assert (erased.erase is None) == in_loader
    if mode == "const":
        assert all((images.abs() < 0.005).all(dim=1).any() for images, _ in erased)


def test_loader_has_the_properties_of_timms_own_loader(data: Path) -> None:
    _, training = create_training(data)
    for name, value in vars(timm.data.loader.PrefetchLoader).items():
        if isinstance(value, property):
            getattr(training, name)
    assert len(training.batch_sampler) == len(training) == len(list(training.batch_sampler))


def test_without_augmentation_training_shows_all_of_the_shorter_side(data: Path) -> None:
    _, training = create_training(data, no_aug=True)
    assert training.loader.spec.serving.crop_ratio == 1.0


def test_validation_shows_the_share_of_crop_pct(data: Path) -> None:
    settings = {"split": "val", "size": 24, "shuffle": False, "batch_size": BATCH, "normalize": (0.5, 0.5)}
    with loaders.build(data, **settings, serving=loaders.Serving(crop_ratio=0.5)) as loader:
        due = [batch.images for batch in loader]
    dataset = adapter.create_dataset("", root=str(data), split="val")
    validation = adapter.create_loader(dataset, (3, 24, 24), BATCH, crop_pct=0.5, **SETTINGS)
    for expected, (images, _) in zip(due, validation, strict=True):
        assert torch.allclose(images, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"auto_augment": "augmix-m5"}, "--aa 'augmix-m5'"),
        ({"collate_fn": len}, "collate_fn"),
        ({"batch_size": 7, "collate_fn": adapter.FastCollateMixup()}, "--batch-size 7"),
        ({"num_aug_repeats": 3}, "--aug-repeats"),
        ({"num_batches": 5}, "--train-batches-per-epoch 5"),
        ({"crop_mode": "squash"}, "--crop-mode squash"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # objects in options print their address
)
def test_create_loader_refuses_options_without_a_counterpart(
    options: dict[str, Any], option: str, data: Path
) -> None:
    with pytest.raises(SettingError, match=option, check=lambda error: error.remedy != ""):
        create_training(data, **options)


@pytest.mark.parametrize(
    ("name", "options", "option"),
    [("hfds/a/b", {}, "--dataset hfds/a/b"), ("", {"class_map": "map.txt"}, "--class-map map.txt")],
)
def test_create_dataset_refuses_datasets_and_class_maps_of_timm(
    name: str, options: dict[str, Any], option: str, data: Path
) -> None:
    with pytest.raises(SettingError, match=option, check=lambda error: "--data-dir" in error.remedy):
        adapter.create_dataset(name, root=str(data), split="train", **options)


def test_pictures_of_other_channels_than_the_models_are_refused(data: Path) -> None:
    dataset = adapter.create_dataset("", root=str(data), split="train")
    with pytest.raises(SettingError, check=lambda error: "--in-chans 3" in error.remedy):
        next(iter(adapter.create_loader(dataset, (1, 24, 24), BATCH, **SETTINGS)))

"""Recognition of loaders that `loaders.build` can stand in for, which then serves what they serve."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import loaders
from bench.watch import transforms

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CROP = v1.RandomResizedCrop(16, scale=(0.5, 1.0))
SCALE = "augment=loaders.RandomAugmentation(scale=(0.5, 1.0), flip=0.0)"
PER_CLASS = 6


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tree of three classes; each picture has its own colour, and is brighter on the right."""
    root = tmp_path_factory.mktemp("photos")
    for label, name in enumerate(("ant", "bee", "cat")):
        (root / name).mkdir()
        for index in range(PER_CLASS):
            number = label * PER_CLASS + index
            down, right = np.mgrid[0 : 1 : (48 + number % 3 * 16) * 1j, 0:1:64j]
            pixels = colour(number) + (16 * right - 8 * down)[..., None]
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{index}.png")
    return root


def colour(number: int) -> np.ndarray[Any, Any]:
    return 40.0 + 60 * np.array([number % 4, number // 4 % 4, number // 16 % 4])


def describe(loader: Any) -> dict[str, Any]:
    return transforms.describe_build(transforms.describe_batches(loader), loader.dataset)


def samples(loader: Any, mean: Any, std: Any) -> list[tuple[int, int]]:
    """Labels of all samples of an epoch, with the number of the picture that has the colour of the image."""
    numbers = []
    for images, labels in loader:
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
        for image, label in zip(images, labels.tolist(), strict=True):
            mean_colour = 255 * (image.mean((1, 2)) * torch.as_tensor(std) + torch.as_tensor(mean)).numpy()
            distances = [np.abs(mean_colour - colour(number)).sum() for number in range(3 * PER_CLASS)]
            numbers.append((label, int(np.argmin(distances))))
    return sorted(numbers)


PLAIN: dict[str, tuple[list[Any], str]] = {
    "training": (
        [v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(*IMAGENET)],
        "size=16, augment='train'",
    ),
    "validation": (
        [v1.Resize(256), v1.CenterCrop(224), v1.ToTensor(), v1.Normalize(*IMAGENET)],
        "size=224",
    ),
    "another ratio": (
        [v1.Resize(20), v1.CenterCrop(16), v1.ToTensor()],
        "size=16, serving=loaders.Serving(crop_ratio=16 / 20), normalize=None",
    ),
    "no crop of what is resized": (
        [v1.Resize([24]), v1.CenterCrop((24, 24)), v1.ToTensor(), v1.Normalize((0.5,), (0.25,))],
        "size=24, serving=loaders.Serving(crop_ratio=24 / 24), normalize=(0.5, 0.25)",
    ),
    "another scale": ([CROP, v1.ToTensor()], f"size=16, {SCALE}, normalize=None"),
    "another ratio of sides": (
        [v1.RandomResizedCrop((16, 24), (0.5, 1), (1, 1.5)), v1.RandomHorizontalFlip(0.2), v1.ToTensor()],
        "size=(16, 24), augment=loaders.RandomAugmentation(scale=(0.5, 1), ratio=(1, 1.5), flip=0.2), "
        "normalize=None",
    ),
    "nested": (
        [v1.Compose([CROP]), v2.Compose([v1.Compose([v1.ToTensor()])])],
        f"size=16, {SCALE}, normalize=None",
    ),
    "another normalisation": (
        [v1.Resize(20), v1.CenterCrop(16), v1.ToTensor(), v1.Normalize([0.5, 0.4, 0.3], [0.2, 0.2, 0.25])],
        "size=16, serving=loaders.Serving(crop_ratio=16 / 20), normalize=((0.5, 0.4, 0.3), (0.2, 0.2, 0.25))",
    ),
    "tensors first": (
        [v1.PILToTensor(), v1.Resize(20), v1.CenterCrop(16), v1.ConvertImageDtype(torch.float32)],
        "size=16, serving=loaders.Serving(crop_ratio=16 / 20), normalize=None",
    ),
    "v2": (
        [
            v2.Compose([v2.ToImage(), v2.RandomResizedCrop(16), v2.RandomHorizontalFlip()]),
            *(v2.ToDtype(torch.float32, scale=True), v2.Normalize(*map(list, IMAGENET)), v2.ToPureTensor()),
        ],
        "size=16, augment='train'",
    ),
    "v2 in the middle": (
        [v2.Resize(20), v2.CenterCrop(16), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)],
        "size=16, serving=loaders.Serving(crop_ratio=16 / 20), normalize=None",
    ),
    "figures in tensors": (
        [CROP, v1.ToTensor(), v1.Normalize(torch.tensor(IMAGENET[0]), torch.tensor(IMAGENET[1]))],
        f"size=16, {SCALE}",
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_build_serves_the_pictures_that_plain_transforms_show(name: str, photos: Path) -> None:
    steps, expected = PLAIN[name]
    loader = DataLoader(ImageFolder(str(photos), v1.Compose(steps)), 4)
    build = describe(loader)
    given = ", ".join(f"{key}={value}" for key, value in build["arguments"].items())
    assert given == f"batch_size=4, shuffle=False, {expected}"
    mean, std = next(
        ((step.mean, step.std) for step in steps if type(step).__name__ == "Normalize"), ((0.0,), (1.0,))
    )
    line = f"loaders.build({str(photos)!r}, {given}, reading=loaders.Reading(workers=0))"
    with eval(line, {"loaders": loaders}) as own:  # the line that is given to be pasted
        assert samples(own, mean, std) == samples(loader, mean, std)
        if any("CenterCrop" in repr(step) for step in steps):  # what is shown is not random
            shown, served = (torch.cat([images for images, _ in batches]) for batches in (loader, own))
            assert ((shown - served) * torch.tensor(std).view(1, -1, 1, 1)).abs().max() <= 2 / 255


class Crop(v1.RandomResizedCrop):
    """Transform of a script that is derived from a plain one."""


NOT_PLAIN: dict[str, list[Any]] = {
    "no crop": [v1.ToTensor()],
    "no tensor": [CROP],
    "bytes": [CROP, v1.PILToTensor()],
    "stretched": [v1.Resize((16, 16)), v1.ToTensor()],
    "stretched and cut": [v1.Resize((16, 16)), v1.CenterCrop(16), v1.ToTensor()],
    "resized alone": [v1.Resize(16), v1.ToTensor()],
    "a limit of the longer side": [v1.Resize(16, max_size=24), v1.CenterCrop(16), v1.ToTensor()],
    "resized before a random crop": [v1.Resize(32), CROP, v1.ToTensor()],
    "cut after a random crop": [CROP, v1.CenterCrop(8), v1.ToTensor()],
    "cut before it is resized": [v1.CenterCrop(16), v1.Resize(16), v1.ToTensor()],
    "cut larger than it is": [v1.Resize(16), v1.CenterCrop(24), v1.ToTensor()],
    "cut to no square": [v1.Resize(32), v1.CenterCrop((16, 24)), v1.ToTensor()],
    "mirrored middle": [v1.Resize(20), v1.CenterCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()],
    "mirrored twice": [CROP, v1.RandomHorizontalFlip(), v1.RandomHorizontalFlip(), v1.ToTensor()],
    "nearest": [v1.RandomResizedCrop(16, interpolation=v1.InterpolationMode.NEAREST), v1.ToTensor()],
    "bicubic": [v2.Resize(20, interpolation=v2.InterpolationMode.BICUBIC), v1.CenterCrop(16), v1.ToTensor()],
    "not antialiased": [
        v1.PILToTensor(),
        v2.RandomResizedCrop(16, antialias=False),
        v2.ToDtype(torch.float32, scale=True),
    ],
    "crops larger than the picture": [v1.RandomResizedCrop(16, scale=(0.5, 1.5)), v1.ToTensor()],
    "floats up to 255": [CROP, v1.PILToTensor(), v2.ToDtype(torch.float32)],
    "halves": [CROP, v1.PILToTensor(), v2.ToDtype(torch.float16, scale=True)],
    "normalised twice": [CROP, v1.ToTensor(), v1.Normalize(0.5, 0.5), v1.Normalize(*IMAGENET)],
    "jitter before the crop": [v1.ColorJitter(0.4), CROP, v1.ToTensor()],
    "jitter of the middle": [v1.Resize(20), v1.CenterCrop(16), v1.ColorJitter(0.4), v1.ToTensor()],
    "jitter that is not symmetric": [CROP, v1.ColorJitter((0.5, 0.9)), v1.ToTensor()],
    "jitter of floats": [CROP, v1.ToTensor(), v1.ColorJitter(0.4)],
    "grey before jitter": [CROP, v1.RandomGrayscale(), v1.ColorJitter(0.4), v1.ToTensor()],
    "grey twice": [CROP, v1.RandomGrayscale(), v1.RandomGrayscale(), v1.ToTensor()],
    "a blur of its own": [CROP, v1.GaussianBlur(23, 1.0), v1.ToTensor()],
    "a blur that is cut off": [CROP, v1.GaussianBlur(3), v1.ToTensor()],
    "another threshold": [CROP, v1.RandomSolarize(100), v1.ToTensor()],
    "black boxes": [CROP, v1.ToTensor(), v1.RandomErasing()],
    "random boxes": [CROP, v1.ToTensor(), v1.Normalize(*IMAGENET), v1.RandomErasing(value="random")],
    "a policy that does not interpolate": [CROP, v1.TrivialAugmentWide(), v1.ToTensor()],
    "two at once": [CROP, v1.RandomApply([v1.ColorJitter(0.4), v1.RandomGrayscale()]), v1.ToTensor()],
    "a function": [CROP, v1.ToTensor(), lambda image: image],
    "an own class": [Crop(16), v1.ToTensor()],
    "an order of its own": [v1.RandomOrder([CROP]), v1.ToTensor()],
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_transforms_that_build_would_show_otherwise_are_not_plain(name: str, photos: Path) -> None:
    assert "reason" in describe(DataLoader(ImageFolder(str(photos), v1.Compose(NOT_PLAIN[name])), 4))


RANDOM: dict[str, tuple[list[Any], str]] = {
    "torchvision": (
        [v1.TrivialAugmentWide(interpolation=v1.InterpolationMode.BILINEAR)],
        "policy='trivial', erase=0.1",
    ),
    "jitter": ([v1.ColorJitter(0.4, 0, 1.5, 0.1)], "brightness=0.4, saturation=1.5, hue=0.1, erase=0.1"),
    "simclr": (
        [
            v1.RandomApply([v1.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
            *(v1.RandomGrayscale(0.2), v1.RandomApply([v1.GaussianBlur(23)]), v1.RandomSolarize(128, 0.2)),
        ],
        "brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, jitter=0.8, grey=0.2, blur=0.5, "
        "solarize=0.2, erase=0.1",
    ),
    "v2": (
        [v2.ColorJitter(0.3, 0.3, 0.3), v2.GaussianBlur(13)],
        "brightness=0.3, contrast=0.3, saturation=0.3, blur=1.0, erase=0.1",
    ),
}


@pytest.mark.parametrize("name", RANDOM)
def test_operations_on_a_random_crop_are_settings_of_augment(name: str, photos: Path) -> None:
    steps, expected = RANDOM[name]
    module = v2 if name == "v2" else v1
    ends = (v1.ToTensor(), v1.Normalize(*IMAGENET), module.RandomErasing(0.1))
    transform = v1.Compose([CROP, v1.RandomHorizontalFlip(), *steps, *ends])
    build = describe(DataLoader(ImageFolder(str(photos), transform), 4))
    augment = build["arguments"]["augment"]
    assert augment == f"loaders.RandomAugmentation(scale=(0.5, 1.0), {expected})"
    eval(augment, {"loaders": loaders})  # raises SettingError if a setting is not right


STEPS = v1.Compose(PLAIN["training"][0])


class Doubled(ImageFolder):
    """Dataset of a script that is derived from ImageFolder."""


class Wrapped(Dataset[Any]):
    """Dataset of a script around an ImageFolder."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return 18


class Own(DataLoader[Any]):
    """Loader of a script."""


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, Callable[[ImageFolder], Any]] = {
    "a subset": lambda data: DataLoader(Subset(data, range(9))),
    "two folders": lambda data: DataLoader(data + data),
    "a class around the folder": lambda data: DataLoader(Wrapped(data)),
    "a class derived from it": lambda data: DataLoader(Doubled(data.root, STEPS)),
    "a loader of its own": Own,
    "labels that change": lambda data: DataLoader(ImageFolder(data.root, STEPS, float)),
    "a reader of its own": lambda data: DataLoader(ImageFolder(data.root, STEPS, loader=Image.open)),
    "chosen files": lambda data: DataLoader(ImageFolder(data.root, STEPS, is_valid_file=lambda _: True)),
    "batches of its own": lambda data: DataLoader(data, collate_fn=list),
    "single samples": lambda data: DataLoader(data, batch_size=None),
    "a list of batches": lambda data: DataLoader(data, batch_sampler=[[1, 2], [3]]),
    "a generator": lambda data: DataLoader(data, shuffle=True, generator=generator()),
    "a sampler with a generator": lambda data: DataLoader(
        data, sampler=RandomSampler(data, generator=generator())
    ),
    "with replacement": lambda data: DataLoader(data, sampler=RandomSampler(data, replacement=True)),
    "fewer samples": lambda data: DataLoader(data, sampler=RandomSampler(data, num_samples=5)),
    "the first samples": lambda data: DataLoader(data, sampler=SequentialSampler(range(5))),
    "a random subset": lambda data: DataLoader(data, sampler=SubsetRandomSampler([1, 2])),
    "weights": lambda data: DataLoader(data, sampler=WeightedRandomSampler([1.0] * 18, 18)),
    "ranks that are none": lambda data: DataLoader(data, sampler=DistributedSampler(data, 2, 0)),
    "an order in the batch sampler": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(SubsetRandomSampler([1, 2]), 2, False)
    ),
    "no dataset of files": lambda _: DataLoader(torch.arange(9)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_that_choose_or_make_samples_otherwise_are_not_plain(name: str, photos: Path) -> None:
    assert "reason" in describe(LOADERS[name](ImageFolder(str(photos), STEPS)))


def test_settings_of_a_plain_loader_become_arguments(photos: Path) -> None:
    data = ImageFolder(str(photos), STEPS)
    build = describe(DataLoader(data, 5, shuffle=True, drop_last=True, num_workers=2, pin_memory=True))
    assert build["arguments"] == {
        "batch_size": "5",
        "sampling": "loaders.Sampling(last='drop')",
        "size": "16",
        "augment": "'train'",
    }
    assert build["samples"] == len(data)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)


@pytest.mark.usefixtures("two_ranks")
def test_ranks_are_those_that_build_finds_by_itself(photos: Path) -> None:
    data = ImageFolder(str(photos), STEPS)
    build = describe(DataLoader(data, 4, sampler=DistributedSampler(data)))
    assert build["arguments"] == {"batch_size": "4", "size": "16", "augment": "'train'"}
    for settings in ({"seed": 1}, {"shuffle": False}, {"drop_last": True}, {"num_replicas": 3}):
        assert "reason" in describe(DataLoader(data, 4, sampler=DistributedSampler(data, **settings)))  # type: ignore[arg-type]
    assert "reason" in describe(DataLoader(data, 4, shuffle=True))  # each rank reads everything

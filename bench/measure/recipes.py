"""torchvision's own transforms for each name of `augment`: what people have in a DataLoader today.

They take pictures of Pillow's, as ImageFolder gives them. Sources are those of
`loaders.augment.policies.AUGMENTATIONS`; timm's RandAugment is torchvision's with the same number of
operations and share of the magnitude.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from PIL import ImageFilter
from torch.utils.data import default_collate

from loaders.augment.geometry import resized_side
from loaders.augment.policies import AUGMENTATIONS
from loaders.settings import CROP_RATIO
from loaders.transfer import IMAGENET_MEAN, IMAGENET_STD

_FLIP_PROBABILITY = 0.5
_LOCAL_SIDE = 96 / 224  # side of DINO's local crops over that of its global ones


class _PillowBlur:
    """Gaussian blur by Pillow, as SimCLR's and DINO's own code has it: faster than torchvision's."""

    def __call__(self, picture: Any) -> Any:
        return picture.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))


class Views:
    """Transform that makes several views of a picture, each by a transform of its own."""

    def __init__(self, transforms: list[Callable[[Any], torch.Tensor]]) -> None:
        self._transforms = transforms

    def __call__(self, picture: Any) -> list[torch.Tensor]:
        return [transform(picture) for transform in self._transforms]


def make_transform(augment: str, size: int, *, floats: bool) -> Any:
    """Return the transform from a picture of Pillow's to a tensor [3, size, size], or to a list of views.

    Args:
        augment: name as of `loaders.build`. "train" and "eval" are `presets.ClassificationPresetTrain` with
            its default flips and `ClassificationPresetEval`, which resizes the shorter side to 256 for 224.
        floats: whether values are float32, normalised; else they are uint8.
    """
    from torchvision import transforms
    from torchvision.transforms import v2

    module: Any = transforms if augment in ("eval", "train") else v2  # as the presets do by default
    to_tensor = [module.PILToTensor()]
    if floats:
        to_tensor += [module.ConvertImageDtype(torch.float32), module.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    if augment == "torchvision":
        to_tensor.append(module.RandomErasing(0.1))
    views = [module.Compose([*steps, *to_tensor]) for steps in _RECIPES[augment](module, size)]
    return views[0] if len(views) == 1 else Views(views)


def _crop_and_flip(module: Any, side: int, scale: tuple[float, float] = (0.08, 1.0)) -> list[Any]:
    crop = module.RandomResizedCrop(
        side, scale, interpolation=module.InterpolationMode.BILINEAR, antialias=True
    )
    return [crop, module.RandomHorizontalFlip(_FLIP_PROBABILITY)]


def _eval(module: Any, size: int) -> list[list[Any]]:
    return [[module.Resize(resized_side(size, CROP_RATIO), antialias=True), module.CenterCrop(size)]]


def _train(module: Any, size: int) -> list[list[Any]]:
    return [_crop_and_flip(module, size)]


def _torchvision(module: Any, size: int) -> list[list[Any]]:
    policy = module.TrivialAugmentWide(interpolation=module.InterpolationMode.BILINEAR)
    return [[*_crop_and_flip(module, size), policy]]


def _timm(module: Any, size: int, *, magnitude: int) -> list[list[Any]]:
    policy = module.RandAugment(2, magnitude, interpolation=module.InterpolationMode.BILINEAR)
    return [[*_crop_and_flip(module, size), policy]]


def _deit3(module: Any, size: int) -> list[list[Any]]:
    three = module.RandomChoice([module.Grayscale(3), module.RandomSolarize(128, 1.0), _PillowBlur()])
    return [[*_crop_and_flip(module, size), three, module.ColorJitter(0.3, 0.3, 0.3)]]


def _simclr(module: Any, size: int) -> list[list[Any]]:
    jitter = module.RandomApply([module.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8)
    blur = module.RandomApply([_PillowBlur()], 0.5)
    return [[*_crop_and_flip(module, size), jitter, module.RandomGrayscale(0.2), blur]] * 2


def _dino(module: Any, size: int) -> list[list[Any]]:
    jitter = module.RandomApply([module.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8)
    colours = [jitter, module.RandomGrayscale(0.2)]
    large, small = (0.4, 1.0), (0.05, 0.4)
    blur, solarize = _PillowBlur(), module.RandomSolarize(128, 0.2)
    first = [*_crop_and_flip(module, size, large), *colours, blur]
    second = [*_crop_and_flip(module, size, large), *colours, module.RandomApply([blur], 0.1), solarize]
    local = [
        *_crop_and_flip(module, round(size * _LOCAL_SIDE), small),
        *colours,
        module.RandomApply([blur], 0.5),
    ]
    return [first, second, *[local] * 8]


_RECIPES: dict[str, Callable[[Any, int], list[list[Any]]]] = {
    "eval": _eval,
    "train": _train,
    "torchvision": _torchvision,
    # magnitudes are 0 to 10 in timm, and 0 to 30 in torchvision
    "timm-a1": partial(_timm, magnitude=21),
    "timm-a2": partial(_timm, magnitude=21),
    "timm-a3": partial(_timm, magnitude=18),
    "deit3": _deit3,
    "simclr": _simclr,
    "dino": _dino,
}
"""Function of torchvision's module and the size, that returns the transforms of each view's pictures."""


def mix_samples(mix: Any, samples: list[Any]) -> Any:
    """Collate samples, image and label first, and mix these, as torchvision's references do in workers."""
    images, labels, *others = default_collate(samples)
    return *mix(images, labels), *others


def make_mix(augment: str, classes: int) -> Any:
    """Return the transform that mixes images and labels of a batch as the recipe does; None: it does not."""
    from torchvision.transforms import v2

    settings = AUGMENTATIONS[augment]  # type: ignore[index]  # a checked name
    if settings is None or not settings.mixes:
        return None
    mixup = v2.MixUp(alpha=settings.mixup, num_classes=classes)
    cutmix = v2.CutMix(alpha=settings.cutmix, num_classes=classes)
    return v2.RandomChoice([mixup, cutmix])

"""torchvision's own transforms for each name of `augment`: what people have in a DataLoader today.

They take pictures of Pillow's, as ImageFolder gives them. Sources are those of
`loaders.augment.policies.AUGMENTATIONS`; timm's RandAugment is torchvision's with the same number of
operations and share of the magnitude.
"""

import random
from collections.abc import Callable
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
    if augment == "eval":
        resize = module.Resize(resized_side(size, CROP_RATIO), antialias=True)
        return module.Compose([resize, module.CenterCrop(size), *to_tensor])
    bilinear = module.InterpolationMode.BILINEAR
    blur, grey = _PillowBlur(), module.RandomGrayscale(0.2)

    def crop_and(*steps: Any, side: int = size, scale: tuple[float, float] = (0.08, 1.0)) -> Any:
        crop = module.RandomResizedCrop(side, scale, interpolation=bilinear, antialias=True)
        return module.Compose([crop, module.RandomHorizontalFlip(_FLIP_PROBABILITY), *steps])

    if augment == "torchvision":
        return crop_and(
            module.TrivialAugmentWide(interpolation=bilinear), *to_tensor, module.RandomErasing(0.1)
        )
    if augment.startswith("timm"):
        share = 0.6 if augment == "timm-a3" else 0.7
        return crop_and(module.RandAugment(2, round(share * 30), interpolation=bilinear), *to_tensor)
    if augment == "deit3":
        three = module.RandomChoice([module.Grayscale(3), module.RandomSolarize(128, 1.0), blur])
        return crop_and(three, module.ColorJitter(0.3, 0.3, 0.3), *to_tensor)
    if augment == "simclr":
        jitter = module.RandomApply([module.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8)
        return Views([crop_and(jitter, grey, module.RandomApply([blur], 0.5), *to_tensor)] * 2)
    if augment == "dino":
        colours = [module.RandomApply([module.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8), grey]
        second = [*colours, module.RandomApply([blur], 0.1), module.RandomSolarize(128, 0.2)]
        local = [*colours, module.RandomApply([blur], 0.5), *to_tensor]
        return Views(
            [
                crop_and(*colours, blur, *to_tensor, scale=(0.4, 1.0)),
                crop_and(*second, *to_tensor, scale=(0.4, 1.0)),
                *[crop_and(*local, side=round(size * _LOCAL_SIDE), scale=(0.05, 0.4))] * 8,
            ]
        )
    return crop_and(*to_tensor)


def mix_samples(mix: Any, samples: list[Any]) -> Any:
    """Collate samples, image and label first, and mix these, as torchvision's references do in the workers."""
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

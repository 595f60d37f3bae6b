"""Settings of augmentation, and what they draw for each picture."""

import math
from dataclasses import dataclass

import numpy as np

from loaders.augment.draws import Floats, Integers, uniforms
from loaders.augment.geometry import Mirrored, fixed_size_boxes, random_boxes
from loaders.settings import AugmentName
from precache.errors import SettingError, is_number
from precache.pictures.images import Size

_TRIES = 10  # draws for each crop, as in torchvision
_BOX_DRAWS = 4 * _TRIES
_DRAWS = _BOX_DRAWS + 1 + 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomAugmentation:
    """Random crop, flip and colour jitter; the defaults are those of `augment="train"`.

    Distributions are those of torchvision's `RandomResizedCrop`, `RandomHorizontalFlip` and `ColorJitter`
    with arguments of the same names. Jitter is applied in the order brightness, contrast, saturation, hue;
    torchvision draws the order.

    Attributes:
        scale: smallest and largest share of the stored picture's area that a crop has; None: a crop has the
            size that is served, and is not resized.
        ratio: smallest and largest width over height of a crop; unused if `scale` is None.
        flip: probability that a picture is mirrored.
        brightness: factors are drawn from 1 - value to 1 + value, at least 0.
        contrast: as brightness.
        saturation: as brightness.
        hue: shifts are drawn from -hue to hue, as a share of the circle; at most 0.5.
    """

    # the usual values for ImageNet: https://arxiv.org/abs/1409.4842, section 6
    scale: tuple[float, float] | None = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        for name, pair, high in (("scale", self.scale or (1.0, 1.0), 1.0), ("ratio", self.ratio, math.inf)):
            are_two = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(is_number, pair))
            if not (are_two and 0 < pair[0] <= pair[1] <= high):
                raise SettingError(f"{name} must be two numbers, 0 < low <= high <= {high}, got {pair!r}")
        for name in ("flip", "brightness", "contrast", "saturation", "hue"):
            value, high = getattr(self, name), {"flip": 1.0, "hue": 0.5}.get(name, math.inf)
            if not (is_number(value) and 0 <= value <= high):
                raise SettingError(f"{name} must be from 0 to {high}, got {value!r}")

    @property
    def jitters(self) -> bool:
        """Whether colours change."""
        return max(self.brightness, self.contrast, self.saturation, self.hue) > 0


def draw_augmentation(
    settings: RandomAugmentation, stored: Size | Integers, size: Size, seed: int, epoch: int, ids: Integers
) -> tuple[Integers, Mirrored, Floats]:
    """Draw crop, flip and jitter of the samples `ids` in `epoch`.

    Args:
        stored: size of all pictures, or int64 [n, 2], height and width of each.
        size: size that is served.

    Returns:
        int64 [n, 4], left, top, width and height of the crop, in pixels of the stored picture; bool [n],
        whether mirrored; float64 [n, 4], factors of brightness, contrast, saturation, and the shift of hue.
    """
    uniform = uniforms(seed, epoch, ids, _DRAWS)
    ranges = np.array([settings.brightness, settings.contrast, settings.saturation, settings.hue])
    neutral = np.array([1.0, 1.0, 1.0, 0.0])
    low, high = np.maximum(neutral - ranges, (0, 0, 0, -1)), neutral + ranges
    if settings.scale is None:
        boxes = fixed_size_boxes(stored, uniform[:, 2 * _TRIES : _BOX_DRAWS : _TRIES], size)
    else:
        boxes = random_boxes(stored, uniform[:, :_BOX_DRAWS], settings.scale, settings.ratio)
    colors = low + (high - low) * uniform[:, _BOX_DRAWS + 1 :]
    return boxes, uniform[:, _BOX_DRAWS] < settings.flip, colors


AUGMENTATIONS: dict[AugmentName, RandomAugmentation | None] = {
    "crop": RandomAugmentation(scale=None),
    "eval": None,
    "train": RandomAugmentation(),
}
"""Settings of each named augmentation; None: the middle of each picture."""

"""Random crops and flips of pre-resized pictures, batched, on the device that the batch is on.

`RandomResizedCrop` and `RandomHorizontalFlip` as torchvision has them: the same distributions of
area, aspect, place and side. What a sample gets depends on `(seed, epoch, sample id)` alone, not on its
batch, rank or backend, so that a resumed run augments as the uninterrupted one would have.

Pictures are resampled bilinearly. From 256 px to 224 px a crop shrinks by at most 1.14, where leaving
out antialiasing, which torchvision has, changes little.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import grid_sample

from precache.errors import SettingError, check_choice

Floats: TypeAlias = npt.NDArray[np.float64]
Augmentation: TypeAlias = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(images uint8 [n, side, side, 3] on the device, ids int64 [n] on the CPU, epoch) -> images, as many."""

NAMES = ("eval", "train")
# torchvision's defaults, with which ImageNet is trained: https://arxiv.org/abs/1409.4842, section 6
AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
_TRIES = 10
_DRAWS = 4 * _TRIES + 1
_CHUNK = 32  # pictures resampled at a time: their floats stay in the CPU's cache
_RATIO_TO_SERVED = 256 / 224


@dataclass(frozen=True, slots=True)
class RandomCrops:
    """`augment="train"`: a random crop resized to `size` x `size`, mirrored every other time."""

    size: int
    seed: int

    def __call__(self, images: torch.Tensor, ids: torch.Tensor, epoch: int) -> torch.Tensor:
        """uint8 [n, side, side, 3] to uint8 [n, size, size, 3]."""
        draws = uniforms(self.seed, epoch, ids.numpy(), _DRAWS)
        boxes = torch.from_numpy(crop_boxes(images.shape[1], draws[:, :-1])).to(images.device, torch.float32)
        mirrored = torch.from_numpy(draws[:, -1] < 0.5).to(images.device)
        out = torch.empty((len(images), self.size, self.size, 3), dtype=torch.uint8, device=images.device)
        for start in range(0, len(images), _CHUNK):
            part = slice(start, start + _CHUNK)
            out[part] = _resample(images[part], boxes[part], mirrored[part], self.size)
        return out


def make(augment: str | Augmentation | None, size: int, seed: int) -> Augmentation | None:
    """The augmentation that `loaders.build` was asked for; None changes nothing.

    Raises:
        SettingError: an unknown name.
    """
    if augment is None or callable(augment):
        return augment
    if not isinstance(augment, str):
        raise SettingError(f"augment must be a name, a function or None, got {augment!r}")
    check_choice("augment", augment, NAMES)
    return RandomCrops(size, seed) if augment == "train" else None


def source_size(size: int) -> int:
    """The side that a raw tree is resized to, so that crops of it are served as `size`."""
    return round(size * _RATIO_TO_SERVED)


def crop_boxes(side: int, draws: Floats) -> Floats:
    """Boxes of random crops of a square, as `torchvision.transforms.RandomResizedCrop.get_params`.

    Args:
        side: of the square in pixels.
        draws: [n, 4 * tries], uniform in [0, 1).

    Returns:
        [n, 4]: left, top, width, height in whole pixels.
    """
    area_draw, aspect_draw, left_draw, top_draw = np.split(draws, 4, axis=1)
    area = side * side * (AREA[0] + (AREA[1] - AREA[0]) * area_draw)
    low, high = np.log(ASPECT)
    aspect = np.exp(low + (high - low) * aspect_draw)
    width, height = np.round(np.sqrt(area * aspect)), np.round(np.sqrt(area / aspect))
    fits = (width > 0) & (width <= side) & (height > 0) & (height <= side)
    first = fits.argmax(axis=1)  # the first try that fits; a square of the whole side where none does
    rows = np.arange(len(draws))
    found = fits[rows, first]
    width = np.where(found, width[rows, first], side)
    height = np.where(found, height[rows, first], side)
    left = np.floor(left_draw[rows, first] * (side - width + 1))
    top = np.floor(top_draw[rows, first] * (side - height + 1))
    return np.stack((left, top, width, height), axis=1)


def uniforms(seed: int, epoch: int, ids: npt.NDArray[np.int64], count: int) -> Floats:
    """[n, count] uniform in [0, 1): a hash of seed, epoch, sample id and number of the draw.

    SplitMix64, whose output for counters is the random sequence: https://doi.org/10.1145/2660193.2660195
    """
    with np.errstate(over="ignore"):  # 64-bit arithmetic that wraps is the point
        start = _mix(_mix(np.uint64(seed % 2**64)) + np.uint64(epoch))
        state = (
            _mix(start + ids.astype(np.uint64))[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        )
        draws: Floats = (_mix(state) >> np.uint64(11)) * 2.0**-53
        return draws


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(state: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    mixed: npt.NDArray[np.uint64] = np.asarray(state) + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed


def _resample(images: torch.Tensor, boxes: torch.Tensor, mirrored: torch.Tensor, size: int) -> torch.Tensor:
    """uint8 [n, size, size, 3] of the boxes of uint8 [n, side, side, 3]."""
    side = images.shape[1]
    centres = (torch.arange(size, device=images.device, dtype=torch.float32) + 0.5) / size
    left, top, width, height = boxes.T[:, :, None]
    across = torch.where(mirrored[:, None], 1 - centres, centres)
    # grid_sample counts from -1, the picture's left or top edge, to 1
    x = (left + across * width) * (2 / side) - 1
    y = (top + centres * height) * (2 / side) - 1
    grid = torch.stack((x[:, None, :].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)), dim=-1)
    floats = images.permute(0, 3, 1, 2).to(torch.float32)
    sampled = grid_sample(floats, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return sampled.round_().to(torch.uint8).permute(0, 2, 3, 1)

"""Rule for what is served of each stored picture, and its work on a device."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from loaders.augment.colour import color_jitter
from loaders.augment.draws import Floats, Integers, draw_keys
from loaders.augment.geometry import Boxes, Mirrored, centre_boxes, crop_and_resize
from loaders.augment.operations import Operation, Operations
from loaders.augment.policies import RandomAugmentation, draw_augmentation
from loaders.device import upload
from precache.pictures.images import Size, as_size, sides

_centre_box = lru_cache(centre_boxes)  # of pictures of one size: computed once, not for each batch


@dataclass(frozen=True, slots=True)
class Crops:
    """Rule for the part of each stored picture that is served.

    Attributes:
        stored: size of the stored pictures; None: each has its own.
        size: size that is served.
        random: settings of random crops and flips; None: the middle of each picture.
        seed: seed of the random draws.
        views: how many times each picture is drawn.
        crop_ratio: share of the shorter side that is served of the middle.
    """

    stored: Size | None
    size: Size
    random: RandomAugmentation | None = None
    seed: int = 0
    views: int = 1
    crop_ratio: float = 1.0

    def boxes_and_flips(
        self, epoch: int, ids: Integers, shapes: Integers | None = None, places: Integers | None = None
    ) -> tuple[Boxes, Mirrored]:
        """Return the boxes to serve, [n, 4], and which pictures to mirror, bool [n].

        Those of several views are one view behind the other: [views * n].

        Args:
            shapes: int64 [n, 2], height and width of each picture; needed if each has its own size.
            places: see `loaders.batch.Request`.
        """
        stored = shapes if self.stored is None else self.stored
        assert stored is not None
        if self.random is not None:
            keys = np.concatenate([draw_keys(ids, view, places) for view in range(self.views)])
            if isinstance(stored, np.ndarray):
                stored = np.tile(stored, (self.views, 1))
            draws = draw_augmentation(self.random, stored, self.size, self.seed, epoch, keys)
            return draws.boxes, draws.mirrored
        if self.stored is None:
            boxes: Boxes = centre_boxes(stored, self.size, self.crop_ratio)
        else:
            boxes = _centre_box(self.stored, self.size, self.crop_ratio)
        return np.broadcast_to(boxes, (len(ids), 4)), np.zeros(len(ids), bool)


def _jitter_factors(operations: Operations) -> Floats:
    """Return float64 [n, 4], factors of brightness, contrast and saturation, and the shift of hue."""
    factors = np.tile([1.0, 1.0, 1.0, 0.0], (len(operations.codes), 1))
    jittered = (Operation.BRIGHTNESS, Operation.CONTRAST, Operation.SATURATION, Operation.HUE)
    for column, operation in enumerate(jittered):
        pictures, steps = np.nonzero(operations.codes == operation)
        factors[pictures, column] = operations.values[pictures, steps, 0]
    return factors


_CHUNK = 32  # pictures at a time: bounds the memory of their float copies


def augment_batch(
    settings: RandomAugmentation,
    seed: int,
    size: Size | None,
    images: torch.Tensor,
    ids: torch.Tensor,
    epoch: int,
) -> torch.Tensor:
    """Augment a batch on its device as drawn for its ids, and return it as uint8.

    Args:
        size: size to crop and resize to; None: the images are cropped already, only colours are changed.
        images: uint8 [n, height, width, channels].
        ids: int64 [n], on the CPU; ids of the samples, or keys of `draw_keys`.
    """
    served = as_size(*images.shape[1:3]) if size is None else size
    draws = draw_augmentation(settings, as_size(*images.shape[1:3]), served, seed, epoch, ids.numpy())
    colors = _jitter_factors(draws.operations)
    columns = np.column_stack((draws.boxes, draws.mirrored, colors)).astype(np.float32)
    on_device = upload(torch.from_numpy(columns), images.device)  # all in one copy
    boxes, mirrored, colors = on_device[:, :4], on_device[:, 4] > 0, on_device[:, 5:]
    shape = (len(images), *sides(served), images.shape[3])
    out = torch.empty(shape, dtype=images.dtype, device=images.device)
    for start in range(0, len(images), _CHUNK):
        part = slice(start, start + _CHUNK)
        floats = images[part].permute(0, 3, 1, 2).to(torch.float32)
        if size is not None:
            floats = crop_and_resize(floats, boxes[part], mirrored[part], size)
        if settings.jitters:
            floats = color_jitter(floats, colors[part], shifts_hue=settings.hue > 0)
        out[part] = floats.round_().to(images.dtype).permute(0, 2, 3, 1)
    return out

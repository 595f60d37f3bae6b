"""What is served of each stored picture: the part of it, and what is done to that, here or on a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from loaders.augment.applying import apply_to_batch, apply_to_pictures
from loaders.augment.draws import Integers, draw_keys
from loaders.augment.functions import PerPicture
from loaders.augment.geometry import centre_boxes, crop_and_resize
from loaders.augment.operations import Operations
from loaders.augment.policies import Draws, RandomAugmentation, draw_augmentation
from loaders.device import upload
from precache.pictures.images import Size, as_size, sides

_CHUNK = 32  # pictures at a time: bounds the memory of their float copies
_centre_box = lru_cache(centre_boxes)  # of pictures of one size: computed once, not for each batch


@dataclass(frozen=True, slots=True)
class View:
    """One of the views that are served of each picture.

    Attributes:
        size: size that is served.
        random: what is drawn for it; None: the middle of each picture.
    """

    size: Size
    random: RandomAugmentation | None = None


@dataclass(frozen=True, slots=True)
class Crops:
    """Rule for what a backend serves of each stored picture.

    Attributes:
        stored: size of the stored pictures; None: each has its own.
        views: the views of each picture, at least one.
        seed: seed of the random draws.
        crop_ratio: share of the shorter side that is served of the middle.
        operates: whether the backend does the operations behind crop and flip, too.
        per_picture: function of the caller that makes what is served of the whole picture; then `views` only
            say how much memory is expected.
    """

    stored: Size | None
    views: tuple[View, ...]
    seed: int = 0
    crop_ratio: float = 1.0
    operates: bool = False
    per_picture: PerPicture | None = None

    @property
    def pixels(self) -> int:
        """Pixels of all views of a picture."""
        return sum(rows * columns for rows, columns in (sides(view.size) for view in self.views))

    def draw(
        self, epoch: int, ids: Integers, shapes: Integers | None = None, places: Integers | None = None
    ) -> list[Draws]:
        """Draw what is served of samples in each view.

        Args:
            shapes: int64 [n, 2], height and width of each picture; needed if each has its own size.
            places: see `loaders.batch.Request`.
        """
        stored = shapes if self.stored is None else self.stored
        assert stored is not None
        draws = []
        for number, view in enumerate(self.views):
            if view.random is not None:
                keys = draw_keys(ids, number, places)
                draws.append(draw_augmentation(view.random, stored, view.size, self.seed, epoch, keys))
                continue
            if self.stored is None:
                boxes = centre_boxes(stored, view.size, self.crop_ratio)
            else:
                boxes = _centre_box(self.stored, view.size, self.crop_ratio)
            boxes = np.broadcast_to(boxes, (len(ids), 4))
            draws.append(Draws(boxes, np.zeros(len(ids), bool), Operations.none(len(ids))))
        return draws


def make_views(settings: RandomAugmentation, served: Size) -> tuple[View, ...]:
    """Return the views that settings ask for; those without a size have that which the loader serves."""
    return tuple(View(view.size or served, view) for view in settings.view_settings)


def carve(memory: torch.Tensor, samples: int, views: Sequence[View], channels: int) -> list[torch.Tensor]:
    """Return the parts of a batch's memory in which its views lie, uint8 [samples, height, width, channels].

    Args:
        memory: uint8 [bytes].
    """
    parts, start = [], 0
    for view in views:
        shape = (samples, *sides(view.size), channels)
        stop = start + int(np.prod(shape))
        parts.append(memory[start:stop].view(shape))
        start = stop
    return parts


class LateAugmentation:
    """Augmentation of whole batches, on the device, behind a backend that serves what is stored or cropped.

    Args:
        views: the views to make of each picture.
        crops_here: whether the crops are cut out here, of pictures that are stored in one size.
    """

    def __init__(self, views: Sequence[View], seed: int, *, crops_here: bool) -> None:
        self.views, self._seed, self._crops_here = views, seed, crops_here

    def apply(self, number: int, images: torch.Tensor, keys: Integers, epoch: int) -> torch.Tensor:
        """Return view `number` of a batch.

        Args:
            images: uint8 [n, height, width, channels].
            keys: int64 [n], see `draw_keys`.
        """
        view = self.views[number]
        if view.random is None:
            return images
        stored = as_size(*images.shape[1:3])
        draws = draw_augmentation(view.random, stored, view.size, self._seed, epoch, keys)
        if self._crops_here:
            images = _crop_batch(images, draws, view.size)
        apply = apply_to_pictures if images.device.type == "cpu" else apply_to_batch
        return apply(images, draws.operations)


def _crop_batch(images: torch.Tensor, draws: Draws, size: Size) -> torch.Tensor:
    """Return the drawn part of each picture, resized and mirrored, uint8 [n, *size, channels]."""
    columns = np.column_stack((draws.boxes, draws.mirrored)).astype(np.float32)
    on_device = upload(torch.from_numpy(columns), images.device)  # all in one copy
    boxes, mirrored = on_device[:, :4], on_device[:, 4] > 0
    out = images.new_empty((len(images), *sides(size), images.shape[3]))
    for start in range(0, len(images), _CHUNK):
        part = slice(start, start + _CHUNK)
        floats = images[part].permute(0, 3, 1, 2).to(torch.float32)
        floats = crop_and_resize(floats, boxes[part], mirrored[part], size)
        out[part] = floats.round_().to(images.dtype).permute(0, 2, 3, 1)
    return out

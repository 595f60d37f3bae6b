"""Which part of each stored picture is served, and how it gets into its place on the CPU."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.nn.functional import interpolate

from loaders.augment.draw import RandomAugmentation, draw, draw_keys, shown_boxes
from precache.pictures import depth
from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import Size, sides

Boxes: TypeAlias = npt.NDArray[Any]
"""int64 or float64 [n, 4]: left, top, width and height in pixels of the stored picture.

Of integers, a crop, which is resized for itself where it is not of the served size; it may reach out of the
picture, which is black there. Of floats, a part of the picture, which is resized with what lies around it."""

_BYTE: np.dtype[Any] = np.dtype(np.uint8)
_MOST_SURPLUS = 4  # how many times what is kept may be resized; of longer pictures Pillow resizes the part
_COLORS = (3, 4)  # channels for which torch's kernel works on pixels as they lie


@dataclass(frozen=True, slots=True)
class Crops:
    """What is served of stored pictures.

    Attributes:
        stored: their size; None: each has its own.
        size: of what is served; None: all of each picture, as it is.
        random: draws crops and flips; None: the middle.
        seed: of the draws.
        views: how many times each picture is drawn.
        crop_ratio: of the middle: how much of the shorter side is served.
    """

    stored: Size | None
    size: Size | None
    random: RandomAugmentation | None = None
    seed: int = 0
    views: int = 1
    crop_ratio: float = 1.0

    @property
    def whole(self) -> "Crops":
        """All of each picture, as it is stored."""
        return Crops(self.stored, self.stored)

    def of(
        self,
        epoch: int,
        ids: npt.NDArray[np.int64],
        shapes: npt.NDArray[np.int64] | None = None,
        places: npt.NDArray[np.int64] | None = None,
    ) -> tuple[Boxes, npt.NDArray[np.bool_]]:
        """Boxes [n, 4] and whether mirrored, bool [n].

        Args:
            shapes: int64 [n, 2], height and width of each, where each has its own.
            places: as of `loaders.batch.Request`.

        Of several views, one behind the other: [views * n].
        """
        stored = shapes if self.stored is None else self.stored
        assert stored is not None
        if self.random is not None and self.size is not None:
            keys = np.concatenate([draw_keys(ids, view, places) for view in range(self.views)])
            if isinstance(stored, np.ndarray):
                stored = np.tile(stored, (self.views, 1))
            draws = draw(self.random, stored, self.size, self.seed, epoch, keys)
            return draws.boxes, draws.mirrored
        boxes: Boxes
        if self.size is None:
            assert shapes is not None
            boxes = np.concatenate((np.zeros_like(shapes), shapes[:, ::-1]), axis=1)
        else:
            boxes = shown_boxes(stored, self.size, self.crop_ratio)
            if (boxes[:, :1:-1] == sides(self.size)).all():
                boxes = boxes.astype(np.int64)
        return np.broadcast_to(boxes, (len(ids), 4)), np.zeros(len(ids), bool)


def place(
    picture: Pixels, box: list[int] | list[float], mirrored: bool, out: Pixels, dtype: np.dtype[Any] = _BYTE
) -> None:
    """Put `box`, as of `Boxes`, of `picture` into `out`.

    Args:
        picture: uint8 [height, width, bytes], of values of `dtype`.
        out: uint8 [height, width, bytes].
    """
    left, top, width, height = box
    if (part := _as_stored(picture, box, out.shape)) is not None:
        np.copyto(out, part)
    elif not isinstance(left, int):
        out[:] = _resized_part(picture.view(dtype), box, out.shape[:2]).view(np.uint8)
    else:
        part = picture[max(top, 0) : top + height, max(left, 0) : left + width]
        if part.shape[:2] == (height, width):
            resize(part.view(dtype), out.view(dtype))
        else:  # it reaches out of a small picture
            out[:] = 0
            out[max(-top, 0) : max(-top, 0) + len(part), max(-left, 0) :][:, : part.shape[1]] = part
    if mirrored:
        mirror(out)


def place_all(
    pictures: list[Pixels],
    boxes: list[Any],
    mirrored: list[bool],
    out: Pixels | list[Pixels],
    dtype: np.dtype[Any] = _BYTE,
) -> None:
    """Put a box of each picture into its place in `out`, as `place` does.

    What is copied into one array goes there by one call: threads that ask for the interpreter's lock again
    for each picture wait for each other longer than copying takes.
    """
    if isinstance(out, np.ndarray):
        shape = out.shape[1:]
        parts = [_as_stored(*both, shape) for both in zip(pictures, boxes, strict=True)]
        if parts and all(part is not None for part in parts):
            cv2.vconcat(parts, dst=out.reshape(-1, *shape[1:]))
            for number, turned in enumerate(mirrored):
                if turned:
                    mirror(out[number])
            return
    for each in zip(pictures, boxes, mirrored, out, strict=True):
        place(*each, dtype)


def _as_stored(picture: Pixels, box: list[int] | list[float], shape: tuple[int, ...]) -> Pixels | None:
    """What `box` shows, if it is served as it is stored, as `shape`, all of it inside of the picture."""
    left, top, width, height = box
    if (height, width) != shape[:2] or left < 0 or top < 0:
        return None
    x, y = int(left), int(top)
    part = picture[y : y + shape[0], x : x + shape[1]]
    return part if part.shape == shape else None


def resize(part: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Put all of `part` into `out`, uint8 or uint16 [height, width, channels], antialiased where it shrinks.

    Each value is that of Pillow's `resize(..., BILINEAR)` give or take one or two.
    """
    if part.shape[0] <= out.shape[0] and part.shape[1] <= out.shape[1]:
        # where nothing shrinks, two pixels are all that an antialiased kernel looks at, too
        cv2.resize(part, out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)
    elif out.dtype == np.uint8 and out.shape[2] in _COLORS and torch_is_fast():
        # what `interpolate` calls, but it writes where it is told: fresh memory costs a fifth of the time
        torch.ops.aten._upsample_bilinear2d_aa.out(
            _planes(part), [*out.shape[:2]], False, None, None, out=_planes(out)
        )
    else:
        out[:] = _by_pillow(part, (0, 0, part.shape[1], part.shape[0]), out.shape[:2])


def mirror(picture: Pixels) -> None:
    """Swap left and right of uint8 [height, width, bytes], in place."""
    cv2.flip(picture, 1, dst=picture)


def torch_is_fast() -> bool:
    """Whether torch's antialiased kernel for bytes is the fastest: it is with the AVX2 of x86 processors.

    https://pytorch.org/vision/stable/transforms.html#performance-considerations
    """
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _resized_part(
    picture: npt.NDArray[Any], box: list[int] | list[float], shape: tuple[int, int]
) -> npt.NDArray[Any]:
    """The part `box` of `picture`, resized to `shape` with what lies around it; antialiased."""
    left, top, width, height = box
    rows, columns = (
        round(side * n / of) for side, n, of in zip(picture.shape[:2], shape, (height, width), strict=True)
    )
    if (
        picture.dtype == np.uint8
        and picture.shape[2] in _COLORS
        and torch_is_fast()
        and rows * columns <= _MOST_SURPLUS * shape[0] * shape[1]
    ):
        resized = interpolate(_planes(picture), (rows, columns), mode="bilinear", antialias=True)
        x, y = round(left * shape[1] / width), round(top * shape[0] / height)
        return resized[0, :, y : y + shape[0], x : x + shape[1]].permute(1, 2, 0).numpy()
    return _by_pillow(picture, (left, top, left + width, top + height), shape)


def _planes(picture: npt.NDArray[Any]) -> torch.Tensor:
    """[1, channels, height, width] of the same memory."""
    # with this stride of a batch of one torch takes it for channels-last, in which it is twice as fast
    return torch.from_numpy(picture)[None].permute(0, 3, 1, 2)


def _by_pillow(
    picture: npt.NDArray[Any], box: tuple[float, float, float, float], shape: tuple[int, int]
) -> npt.NDArray[Any]:
    if picture.dtype != np.uint8 or picture.shape[2] not in (1, 3):
        return depth.resize(picture, shape[::-1], box, Image.Resampling.BILINEAR)
    image = Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture)
    return np.asarray(image.resize(shape[::-1], Image.Resampling.BILINEAR, box)).reshape(*shape, -1)

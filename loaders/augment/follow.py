"""What masks and boxes become where their picture is cropped, resized and mirrored."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import Size, sides

Floats: TypeAlias = npt.NDArray[np.float64]


def follow_mask(mask: Pixels, crop: npt.NDArray[Any], mirrored: bool, out: Pixels) -> None:
    """Put the part `crop` (left, top, width, height) of a mask, uint8 [height, width], into `out`.

    Each pixel is that on which its centre lies: nearest neighbour, without values between two labels. What
    lies outside of the mask is 0.
    """
    left, top, width, height = crop.tolist()
    rows, inside_rows = _nearest(top, height, out.shape[0], mask.shape[0])
    columns, inside_columns = _nearest(left, width, out.shape[1], mask.shape[1])
    out[:] = mask[rows[:, None], columns] * (inside_rows[:, None] & inside_columns)
    if mirrored:
        out[:] = out[:, ::-1].copy()


def _nearest(
    start: float, length: float, count: int, side: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Which of `side` pixels each of `count` lies on, and whether it does; else the nearest one."""
    places = np.floor(start + (np.arange(count) + 0.5) * (length / count)).astype(np.int64)
    return places.clip(0, side - 1), (places >= 0) & (places < side)


def follow_boxes(
    boxes: npt.NDArray[Any], crop: npt.NDArray[Any], mirrored: bool, size: Size
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Boxes in the part `crop` (left, top, width, height) of their picture, resized to `size`.

    Args:
        boxes: [k, 4]: left, top, right, bottom in pixels of the stored picture.

    Returns:
        float64 [m, 4], those of which a part is inside, cut off at the edges; and int64 [m], their numbers.
    """
    left, top, width, height = crop.tolist()
    rows, columns = sides(size)
    moved = (boxes - (left, top, left, top)) * np.array([columns / width, rows / height] * 2)
    if mirrored:
        moved[:, [0, 2]] = columns - moved[:, [2, 0]]
    cut = np.clip(moved, 0, (columns, rows, columns, rows))
    kept = np.flatnonzero((cut[:, 2] > cut[:, 0]) & (cut[:, 3] > cut[:, 1]))
    return cut[kept], kept

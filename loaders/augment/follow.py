"""What masks and boxes become where their picture is cropped, resized and mirrored."""

from typing import Any, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt

from loaders.augment.cpu import frame, mirror
from precache.jpeg import Pixels
from precache.pictures.sizes import Size, sides

Floats: TypeAlias = npt.NDArray[np.float64]


def follow_mask(mask: Pixels, crop: npt.NDArray[np.int64], mirrored: bool, out: Pixels) -> None:
    """Put the part `crop` (left, top, width, height) of a mask, uint8 [height, width], into `out`.

    Each pixel is that on which its centre lies: nearest neighbour, without values between two labels. A crop
    that reaches out of the mask is not resized; what lies outside is 0.
    """
    left, top, width, height = crop.tolist()
    part = mask[max(top, 0) : top + height, max(left, 0) : left + width]
    if part.shape != (height, width):
        frame(part, max(-left, 0), max(-top, 0), mirrored, out)
        return
    # not INTER_NEAREST, which takes the pixel at the left and upper edge
    cv2.resize(part, out.shape[::-1], dst=out, interpolation=cv2.INTER_NEAREST_EXACT)
    if mirrored:
        mirror(out)


def follow_boxes(
    boxes: npt.NDArray[Any], crop: npt.NDArray[np.int64], mirrored: bool, size: Size
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

"""What masks and boxes become where their picture is cropped, resized and mirrored. Pure: NumPy only."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from precache.jpeg import Pixels
from precache.sizes import Size, sides

Floats: TypeAlias = npt.NDArray[np.float64]


def follow_mask(mask: Pixels, crop: npt.NDArray[np.int64], mirrored: bool, out: Pixels) -> None:
    """Put the part `crop` (left, top, width, height) of a mask, uint8 [height, width], into `out`.

    Each pixel is that on which the centre of the picture's pixel lies: nearest neighbour, without values
    between two labels. What lies outside of the mask is 0.
    """
    left, top, width, height = crop.tolist()
    rows = top + (np.arange(out.shape[0]) + 0.5) * (height / out.shape[0])
    columns = left + (np.arange(out.shape[1]) + 0.5) * (width / out.shape[1])
    if mirrored:
        columns = columns[::-1]
    rows, columns = np.floor(rows).astype(np.int64), np.floor(columns).astype(np.int64)
    inside_rows = (rows >= 0) & (rows < mask.shape[0])
    inside_columns = (columns >= 0) & (columns < mask.shape[1])
    if inside_rows.all() and inside_columns.all():
        np.take(mask[rows], columns, axis=1, out=out, mode="clip")
        return
    out[:] = 0
    out[np.ix_(inside_rows, inside_columns)] = mask[np.ix_(rows[inside_rows], columns[inside_columns])]


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

"""Boxes: a field of `[k, 4]` for each picture, left, top, right and bottom in pixels of the upright picture.

They are stored as they are, and follow their picture when it is served.
"""

from collections.abc import Mapping

import numpy as np

from precache.dataset.columns import Column
from precache.dataset.index import Sizes
from precache.errors import SettingError
from precache.pictures.images import Rendering, centre_offset, crop_box, fitted_size, inner_size


def check(boxes: str | None, fields: Mapping[str, Column], *, masks: bool) -> None:
    """Raise SettingError unless the field `boxes` holds some, and no field has a name that is taken."""
    if masks and "mask" in fields:
        raise SettingError(
            "field 'mask': this name is taken, the masks are served under it; rename the field"
        )
    if boxes is None:
        return
    if boxes not in fields:
        known = ", ".join(sorted(fields)) or "there are none"
        raise SettingError(f"boxes {boxes!r} is not one of the fields ({known}); name it with --field, too")
    if f"{boxes}_kept" in fields:
        raise SettingError(
            f"field '{boxes}_kept': this name is taken, it says which boxes are served; rename the field"
        )
    column = fields[boxes]
    if column.kind != "ragged" or (len(column.values) and column.values.shape[1:] != (4,)):
        numbers = [*column.values.shape[1:]] if column.kind in ("ragged", "vector") else column.kind
        raise SettingError(
            f"boxes {boxes!r} must be lists of [left, top, right, bottom] for each picture, got {numbers}"
        )


def scale_and_offset(width: int, height: int, how: Rendering) -> tuple[float, float, float, float]:
    """Where `pictures.images.fit` puts a picture of `width` x `height` pixels in what is stored of it.

    Returns:
        The scales of x and y, and what is added then: the point x, y lies at x * scale + added.
    """
    stored_width, stored_height = fitted_size(width, height, how)
    if how.fit == "crop":
        left, top, right, bottom = crop_box(width, height, how.size)
        x_scale, y_scale = stored_width / (right - left), stored_height / (bottom - top)
        return x_scale, y_scale, -left * x_scale, -top * y_scale
    if how.fit == "pad":
        inner_width, inner_height = inner_size(width, height, how.size)
        x, y = centre_offset(stored_width, inner_width), centre_offset(stored_height, inner_height)
        return inner_width / width, inner_height / height, x, y
    return stored_width / width, stored_height / height, 0.0, 0.0


def fit_boxes(boxes: Column, sizes: Sizes, how: Rendering, *, cut: bool = False) -> Column:
    """Boxes on pictures of these `sizes`, int32 [n, 2], as they lie on what is stored of them.

    Args:
        cut: at the edges of the picture, so that none reaches into what is black around it.
    """
    if boxes.ends is None or not len(boxes.values):
        return boxes
    of_each = np.array([scale_and_offset(width, height, how) for width, height in sizes.tolist()])
    of_box = np.repeat(of_each, np.diff(boxes.ends, prepend=0), axis=0)
    lie = boxes.values * of_box[:, [0, 1, 0, 1]] + of_box[:, [2, 3, 2, 3]]
    if cut:
        stored = np.array([fitted_size(width, height, how) for width, height in sizes.tolist()])
        first = np.maximum(of_each[:, 2:], 0)
        last = np.minimum(sizes * of_each[:, :2] + of_each[:, 2:], stored)
        edges = np.repeat(np.hstack((first, last)), np.diff(boxes.ends, prepend=0), axis=0)
        lie = np.clip(lie, edges[:, [0, 1, 0, 1]], edges[:, [2, 3, 2, 3]])
    return Column(lie, boxes.ends)

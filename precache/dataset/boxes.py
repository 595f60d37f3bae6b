"""Bounding boxes: a field of `[k, 4]` per picture: left, top, right, bottom in the upright picture's pixels.

They are stored unchanged, and are resized and cropped with their picture when it is served.
"""

from collections.abc import Mapping

import numpy as np

from precache.dataset.columns import Column
from precache.dataset.index import Sizes
from precache.errors import SettingError
from precache.pictures.images import Rendering, centre_offset, crop_box, fitted_size, inner_size


def check(boxes: str | None, fields: Mapping[str, Column], *, masks: bool) -> None:
    """Raise SettingError unless the field `boxes` holds boxes and no field has a reserved name.

    Args:
        boxes: name of the field with the boxes; None if there are none.
        fields: columns of the source, by name.
        masks: whether the pictures have masks.
    """
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


def scale_and_offset(width: int, height: int, rendering: Rendering) -> tuple[float, float, float, float]:
    """Scales of x and y, then offsets of x and y, that map points of a picture to the stored picture.

    The point x, y of a picture of `width` x `height` pixels lies at x * x_scale + x_offset, and so on, in
    the picture that `precache.pictures.images.fit` makes of it.
    """
    stored_width, stored_height = fitted_size(width, height, rendering)
    if rendering.fit == "crop":
        left, top, right, bottom = crop_box(width, height, rendering.size)
        x_scale, y_scale = stored_width / (right - left), stored_height / (bottom - top)
        return x_scale, y_scale, -left * x_scale, -top * y_scale
    if rendering.fit == "pad":
        inner_width, inner_height = inner_size(width, height, rendering.size)
        x, y = centre_offset(stored_width, inner_width), centre_offset(stored_height, inner_height)
        return inner_width / width, inner_height / height, x, y
    return stored_width / width, stored_height / height, 0.0, 0.0


def fit_boxes(boxes: Column, sizes: Sizes, rendering: Rendering, *, clip: bool = False) -> Column:
    """Transform boxes from pixels of the source pictures to pixels of the stored pictures.

    Args:
        boxes: column of the boxes of n pictures.
        sizes: int32 [n, 2], width and height of each upright source picture.
        rendering: settings that the pictures are stored with.
        clip: cut boxes at the edges of the picture, so that none reaches into the padding around it.
    """
    if boxes.ends is None or not len(boxes.values):
        return boxes
    boxes_per_picture = np.diff(boxes.ends, prepend=0)
    by_picture = np.array([scale_and_offset(width, height, rendering) for width, height in sizes.tolist()])
    by_box = np.repeat(by_picture, boxes_per_picture, axis=0)
    fitted = boxes.values * by_box[:, [0, 1, 0, 1]] + by_box[:, [2, 3, 2, 3]]
    if clip:
        stored = np.array([fitted_size(width, height, rendering) for width, height in sizes.tolist()])
        top_left = np.maximum(by_picture[:, 2:], 0)
        bottom_right = np.minimum(sizes * by_picture[:, :2] + by_picture[:, 2:], stored)
        edges = np.repeat(np.hstack((top_left, bottom_right)), boxes_per_picture, axis=0)
        fitted = np.clip(fitted, edges[:, [0, 1, 0, 1]], edges[:, [2, 3, 2, 3]])
    return Column(fitted, boxes.ends)

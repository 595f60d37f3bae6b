"""Crop, resize, mirror and warp pictures: which part, and the work on the CPU and on a device."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.nn.functional import grid_sample, interpolate

from loaders.augment.draws import Floats, Integers
from loaders.augment.operations import Codes, Operation
from precache.pictures.images import Size, as_size, sides
from precache.pictures.jpeg import Pixels

Mirrored: TypeAlias = npt.NDArray[np.bool_]
Boxes: TypeAlias = npt.NDArray[Any]
"""int64 or float64 [n, 4]: left, top, width and height in pixels of the stored picture.

A box of integers is a crop: its pixels alone are resized, unless it has the served size already; it may reach
out of the picture, and is black there. A box of floats is a part of the picture, resized together with the
pixels around it."""
_MAX_SURPLUS = 4  # resized pixels per pixel kept; above that Pillow, which resizes the part alone, is faster
_COLOR = 3  # channels; for pictures of one, torch's kernel is not the fastest


def random_boxes(
    stored: Size | Integers, draws: Floats, scale: tuple[float, float], ratio: tuple[float, float]
) -> Integers:
    """Return random crops as torchvision's `RandomResizedCrop.get_params` draws them.

    Args:
        stored: size of all pictures, or int64 [n, 2], height and width of each.
        draws: [n, 4 * tries], uniform in [0, 1).
        scale: smallest and largest share of the picture's area.
        ratio: smallest and largest width over height.

    Returns:
        int64 [n, 4]: left, top, width and height in pixels of the stored picture.
    """
    area_draws, ratio_draws, left_draws, top_draws = np.split(draws, 4, axis=1)
    picture_height, picture_width = _columns(stored)
    area = picture_height * picture_width * (scale[0] + (scale[1] - scale[0]) * area_draws)
    low, high = np.log(ratio)
    aspect = np.exp(low + (high - low) * ratio_draws)
    width, height = np.round(np.sqrt(area * aspect)), np.round(np.sqrt(area / aspect))
    fits = (width > 0) & (width <= picture_width) & (height > 0) & (height <= picture_height)
    first = fits.argmax(axis=1)  # the first try that fits
    rows = np.arange(len(draws))
    any_fits = fits[rows, first]
    picture_height, picture_width = picture_height[:, 0], picture_width[:, 0]
    # if none fits: the largest centred box of the nearest ratio
    max_width = np.clip(np.round(picture_height * ratio[1]), 1, picture_width)
    max_height = np.clip(np.round(picture_width / ratio[0]), 1, picture_height)
    width = np.where(any_fits, width[rows, first], max_width)
    height = np.where(any_fits, height[rows, first], max_height)
    left_room, top_room = picture_width - width, picture_height - height
    left = np.where(any_fits, np.floor(left_draws[rows, first] * (left_room + 1)), left_room // 2)
    top = np.where(any_fits, np.floor(top_draws[rows, first] * (top_room + 1)), top_room // 2)
    return np.stack((left, top, width, height), axis=1).astype(np.int64)


def fixed_size_boxes(stored: Size | Integers, draws: Floats, size: Size) -> Integers:
    """Return random crops of `size` as torchvision's `RandomCrop` draws them.

    A picture that is smaller lies in the middle of its box, which reaches out of it.

    Args:
        stored: size of all pictures, or int64 [n, 2], height and width of each.
        draws: [n, 2], uniform in [0, 1), for left and top.

    Returns:
        int64 [n, 4]: left, top, width and height in pixels of the stored picture.
    """
    height, width = sides(size)
    room = np.concatenate(_columns(stored)[::-1], axis=1) - (width, height)
    corners = np.where(room < 0, -(-room // 2), np.floor(draws * (room + 1))).astype(np.int64)
    return np.concatenate((corners, np.broadcast_to((width, height), corners.shape)), axis=1)


def centre_boxes(stored: Size | Integers, size: Size, crop_ratio: float) -> Boxes:
    """Return the part that torchvision's `Resize(size / crop_ratio)` and `CenterCrop(size)` show.

    Sizes and offsets round as in torchvision 0.29 (`_compute_resized_output_size`, `center_crop`).

    Args:
        stored: size of all pictures, or int64 [n, 2], height and width of each.

    Returns:
        [n, 4], or [1, 4] for one size: integers if no picture is resized.
    """
    rows, columns = sides(resized_side(size, crop_ratio))
    height, width = _columns(stored)
    fills_width = columns * height >= rows * width
    resized_width = np.where(fills_width, columns, np.floor(rows * width / height))
    resized_height = np.where(fills_width, np.floor(columns * height / width), rows)
    resized, window = np.hstack((resized_width, resized_height)), sides(size)[::-1]
    scale = np.hstack((width, height)) / resized
    boxes = np.hstack((np.round((resized - window) / 2) * scale, window * scale))
    return boxes.astype(np.int64) if (boxes[:, 2:] == window).all() else boxes


def resized_side(size: Size, crop_ratio: float) -> Size:
    """Return the size that a picture is resized to cover before `size` is cut out of its middle.

    It is rounded down, as timm does with its crop_pct.
    """
    # a ratio such as 224 / 235 is itself rounded: without the small number it could give 234
    return as_size(*(math.floor(side / crop_ratio + 1e-9) for side in sides(size)))


def _columns(stored: Size | Integers) -> tuple[Integers, Integers]:
    """Return height and width of pictures, each int64 [n, 1], or [1, 1] for one size."""
    shapes = stored if isinstance(stored, np.ndarray) else np.array([sides(stored)], np.int64)
    return shapes[:, :1], shapes[:, 1:]


def crop_all_into(
    pictures: Sequence[Pixels], boxes: Sequence[Any], mirrored: Sequence[bool], out: Pixels
) -> None:
    """Crop several pictures, see `crop_into`; crops that are not resized are copied by one call.

    Threads that took the interpreter's lock again for each picture would wait for each other longer than the
    copies take.

    Args:
        out: uint8 [n, height, width, channels].
    """
    crops = []
    for picture, box in zip(pictures, boxes, strict=True):
        crop = _unresized_crop(picture, box, out.shape[1:])
        if crop is None:
            break
        crops.append(crop)
    if len(crops) < len(pictures):
        for picture, box, is_mirrored, space in zip(pictures, boxes, mirrored, out, strict=True):
            crop_into(picture, box, is_mirrored, space)
        return
    cv2.vconcat(crops, dst=out.reshape(-1, *out.shape[2:]))
    for slot, is_mirrored in enumerate(mirrored):
        if is_mirrored:
            cv2.flip(out[slot], 1, dst=out[slot])


def crop_into(picture: Pixels, box: list[int] | list[float], mirrored: bool, out: Pixels) -> None:
    """Crop a picture to its box, resize and mirror it, and put it into `out`.

    Args:
        picture: uint8 [height, width, channels].
        box: see `Boxes`.
        out: uint8 [height, width, channels].
    """
    crop = _unresized_crop(picture, box, out.shape)
    if crop is not None:  # it is copied once
        if mirrored:
            cv2.flip(crop, 1, dst=out)
        else:
            cv2.copyTo(crop, None, dst=out)
        return
    left, top, width, height = box
    if not isinstance(left, (int, np.integer)):
        out[:] = _resized_part(picture, box, out.shape[:2])
    else:
        inside = picture[max(top, 0) : top + height, max(left, 0) : left + width]
        if inside.shape[:2] == (height, width):
            resize(inside, out)
        else:  # the box reaches out of a small picture
            out[:] = 0
            around = out[max(-top, 0) :, max(-left, 0) :]
            around[: len(inside), : inside.shape[1]] = inside
    if mirrored:
        cv2.flip(out, 1, dst=out)


def _unresized_crop(picture: Pixels, box: list[int] | list[float], shape: tuple[int, ...]) -> Pixels | None:
    """Return the crop `box` if it has `shape` as it is stored and lies inside of the picture, else None."""
    left, top, width, height = box
    if (height, width) != shape[:2] or left < 0 or top < 0:
        return None
    x, y = int(left), int(top)
    part = picture[y : y + shape[0], x : x + shape[1]]
    return part if part.shape == shape else None


def resize(part: Pixels, out: Pixels) -> None:
    """Resize `part` into `out`, both uint8 [height, width, channels], antialiased where it shrinks.

    Values differ from those of Pillow's `resize(..., BILINEAR)` by at most one or two.
    """
    if part.shape[0] <= out.shape[0] and part.shape[1] <= out.shape[1]:
        # where nothing shrinks, an antialiased kernel reads two pixels only, as this one does
        cv2.resize(part, out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)
    elif out.shape[2] == _COLOR and torch_is_fast():
        # what `interpolate` calls, with `out`: fresh memory would cost a fifth of the time
        torch._C._nn._upsample_bilinear2d_aa(  # type: ignore[call-arg]
            _planes(part), out.shape[:2], False, None, None, out=_planes(out)
        )
    else:
        out[:] = _by_pillow(part, (0, 0, part.shape[1], part.shape[0]), out.shape[:2])


def torch_is_fast() -> bool:
    """Return whether torch's antialiased kernel for bytes is the fastest: it is on x86 processors with AVX2.

    https://pytorch.org/vision/stable/transforms.html#performance-considerations
    """
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _resized_part(picture: Pixels, box: list[int] | list[float], shape: tuple[int, int]) -> Pixels:
    """Return the part `box` of `picture` as `shape`, resized with the pixels around it, antialiased."""
    left, top, width, height = box
    # the size of the whole picture, resized as its part is
    rows = round(picture.shape[0] * shape[0] / height)
    columns = round(picture.shape[1] * shape[1] / width)
    if (
        picture.shape[2] == _COLOR
        and torch_is_fast()
        and rows * columns <= _MAX_SURPLUS * shape[0] * shape[1]
    ):
        resized = interpolate(_planes(picture), (rows, columns), mode="bilinear", antialias=True)
        x, y = round(left * shape[1] / width), round(top * shape[0] / height)
        part: Pixels = resized[0, :, y : y + shape[0], x : x + shape[1]].permute(1, 2, 0).numpy()
        return part
    return _by_pillow(picture, (left, top, left + width, top + height), shape)


def _planes(picture: Pixels) -> torch.Tensor:
    """Return `picture` as a tensor [1, channels, height, width] of the same memory."""
    if not picture.flags.writeable:  # torch would warn, though nothing is written to a mapped picture
        picture = picture.view()
        picture.flags.writeable = True
    # the stride of this batch of one makes torch treat it as channels-last, which is twice as fast;
    # NumPy makes the views in half of torch's time
    return torch.from_numpy(picture.reshape(1, *picture.shape).transpose(0, 3, 1, 2))


def _by_pillow(picture: Pixels, box: tuple[float, float, float, float], shape: tuple[int, int]) -> Pixels:
    image = Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture)
    return np.asarray(image.resize(shape[::-1], Image.Resampling.BILINEAR, box)).reshape(*shape, -1)


def crop_and_resize(
    images: torch.Tensor, boxes: torch.Tensor, mirrored: torch.Tensor, size: Size
) -> torch.Tensor:
    """Crop each picture to its box, resize it to `size`, antialiased and bilinear, and mirror it.

    Two products with matrices of weights, whose shapes depend on no value, so that no thread waits for the
    device. Values are those of `resize`.

    Args:
        images: float [n, channels, height, width].
        boxes: float [n, 4], left, top, width and height.
        mirrored: bool [n].

    Returns:
        float [n, channels, *size].
    """
    rows, columns = sides(size)
    left, top, width, height = boxes.T
    row_weights = _resize_weights(top, height, images.shape[2], rows)
    column_weights = _resize_weights(left, width, images.shape[3], columns)
    column_weights = torch.where(mirrored[:, None, None], column_weights.flip(1), column_weights)
    return row_weights[:, None] @ images @ column_weights[:, None].transpose(2, 3)


def _resize_weights(start: torch.Tensor, length: torch.Tensor, side: int, count: int) -> torch.Tensor:
    """Return float [n, count, side]: the weight of each of `side` pixels in each of `count` resized ones.

    A triangle as wide as two pixels of the coarser side, over `length` pixels from `start` on, floats [n],
    without the pixels around them: Pillow's bilinear filter, see
    https://github.com/python-pillow/Pillow/blob/main/src/libImaging/Resample.c
    """
    scale = (length / count)[:, None, None]
    # float32 also if torch's default dtype is another
    pixels = torch.arange(side, device=start.device, dtype=torch.float32)
    steps = torch.arange(count, device=start.device, dtype=torch.float32)
    centres = start[:, None, None] + (steps[:, None] + 0.5) * scale
    weights = (1 - (pixels + 0.5 - centres).abs() / scale.clamp(min=1)).clamp_(min=0)
    first, last = start[:, None, None], (start + length)[:, None, None]
    weights = weights * ((pixels >= first) & (pixels < last))
    # a pixel outside of the picture has no weights at all, and gets black
    return weights / weights.sum(dim=2, keepdim=True).clamp_(min=torch.finfo(weights.dtype).tiny)


def inverse_affine(codes: Codes, values: Floats, shape: tuple[int, int]) -> Floats:
    """Return the matrices of shears, translations and rotations, as torchvision's AutoAugment makes them.

    A shear leaves the top or the left edge where it is, a rotation the centre; a translation is cut to whole
    pixels. See `_AutoAugmentBase._apply_image_or_video_transform` in torchvision/transforms/v2.

    Args:
        codes: int8 [n].
        values: float64 [n, 4], see `loaders.augment.operations`.
        shape: height and width of the pictures, pixels.

    Returns:
        float64 [n, 2, 3]: matrices that map an output pixel (column, row, 1) to column and row of the input;
        the identity for operations that are not geometric.
    """

    def amounts(operation: Operation) -> Floats:
        return np.where(codes == operation, values[:, 0], 0.0)

    # at most one of these changes a picture, so one formula holds for all
    shear_x, shear_y = amounts(Operation.SHEAR_X), amounts(Operation.SHEAR_Y)
    right, down = np.trunc(amounts(Operation.TRANSLATE_X)), np.trunc(amounts(Operation.TRANSLATE_Y))
    angle = np.radians(amounts(Operation.ROTATE))
    cosine, sine = np.cos(angle), np.sin(angle)
    x, y = (shape[1] - 1) / 2, (shape[0] - 1) / 2  # centre
    # the edges of the picture are half a pixel before the centres of its first pixels
    columns = (cosine, shear_x - sine, x - cosine * x + sine * y + shear_x / 2 - right)
    rows = (shear_y + sine, cosine, y - sine * x - cosine * y + shear_y / 2 - down)
    return np.stack(columns + rows, axis=1).reshape(-1, 2, 3)


def warp(picture: Pixels, matrix: Floats, fill: tuple[int, ...]) -> None:
    """Move the pixels of a picture, in place, bilinear.

    A pixel at the border is blended with `fill` by the share of it that lies outside. torchvision does the
    same with black where its fill is None. Where it is given one, it blends with black and then with the
    fill, so that borders are too dark: inside**2 * picture + (1 - inside) * fill.

    Args:
        picture: uint8 [height, width, channels], with 1 or 3 channels.
        matrix: float64 [2, 3], see `inverse_affine`.
        fill: value of each channel, 0-255, outside of the picture.

    Note:
        OpenCV 5 works at it with threads of its own, as many as `cv2.setNumThreads` allows, for one caller at
        a time. OpenCV 4 counts in 1/32 of a pixel, and is a few levels off.
    """
    height, width, channels = picture.shape
    (xx, xy, x), (yx, yy, y) = matrix.tolist()
    is_shift = (xx, xy, yx, yy) == (1, 0, 0, 1) and x.is_integer() and y.is_integer()
    if is_shift and abs(x) < width and abs(y) < height:
        _shift(picture, -int(x), -int(y), fill)
        return
    settings: dict[str, Any] = {
        "dsize": (width, height),
        "flags": cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        "borderMode": cv2.BORDER_CONSTANT,
        "borderValue": fill,
    }
    if channels == _COLOR:
        # OpenCV 5.0 takes half as long for four channels as for three, and this copies the picture as well
        warped = cv2.warpAffine(cv2.cvtColor(picture, cv2.COLOR_RGB2RGBA), matrix, **settings)
        cv2.cvtColor(warped, cv2.COLOR_RGBA2RGB, dst=picture)
    else:
        cv2.warpAffine(picture.copy(), matrix, dst=picture, **settings)


def _shift(picture: Pixels, right: int, down: int, fill: tuple[int, ...]) -> None:
    """Move the pixels of a picture, in place, by less than its width and height."""
    height, width, _ = picture.shape
    left, top = max(right, 0), max(down, 0)
    rows, columns = height - abs(down), width - abs(right)
    y, x = top - down, left - right
    part = picture[y : y + rows, x : x + columns].copy()
    cv2.copyMakeBorder(
        part,
        top,
        height - rows - top,
        left,
        width - columns - left,
        cv2.BORDER_CONSTANT,
        dst=picture,
        value=fill,
    )


def warp_batch(images: torch.Tensor, matrices: torch.Tensor, fill: tuple[int, ...]) -> torch.Tensor:
    """Move the pixels of each picture as `warp` does.

    No thread waits for the device, and no product of matrices is rounded to TF32, which would move pixels.

    Args:
        images: float32 [n, channels, height, width], 0-255.
        matrices: float32 [n, 2, 3], on the same device, see `inverse_affine`.
        fill: value of each channel, 0-255, outside of the pictures.

    Returns:
        float32 [n, channels, height, width], whole numbers 0-255.
    """
    height, width = images.shape[2:]
    columns = torch.arange(width, device=images.device, dtype=torch.float32)
    rows = torch.arange(height, device=images.device, dtype=torch.float32)[:, None]
    xx, xy, x, yx, yy, y = matrices.reshape(-1, 6, 1, 1).unbind(1)
    # pixels as grid_sample counts them, from -1 at the left or upper edge to 1 at the other one
    grid = torch.stack(
        (
            (2 * (xx * columns + xy * rows + x) + 1) / width - 1,
            (2 * (yx * columns + yy * rows + y) + 1) / height - 1,
        ),
        dim=3,
    )
    outside = torch.cat(
        [torch.full((1, 1, 1, 1), value, device=images.device, dtype=torch.float32) for value in fill], dim=1
    )
    warped = grid_sample(images - outside, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return warped.add_(outside).round_()

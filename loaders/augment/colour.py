"""Operations on colours, each for a picture on the CPU and for a batch on a device.

    form      pixels                                     works by
    CPU       uint8 [height, width, channels], in place  OpenCV, on bytes
    batch     float32 [n, channels, height, width]       torch, without a wait for the device

Pixels of both forms are whole numbers, 0-255, RGB or grey. Results are those of `torchvision.transforms.v2`
for bytes, which cuts fractions off in most operations. They differ by one at most, if factors are at most 2.
https://github.com/pytorch/vision/blob/main/torchvision/transforms/v2/functional/_color.py
"""

import math
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import conv2d

from loaders.augment.draws import Floats
from loaders.augment.operations import Codes, Operation
from precache.pictures.jpeg import Pixels

Float32: TypeAlias = npt.NDArray[np.float32]

_LUMA = (0.2989, 0.587, 0.114)  # ITU-R BT.601, as in torchvision
# Added to a value that is rounded later, so that its fraction is cut off instead. It is a little more than
# minus a half, so that whole numbers stay: by one bit of the fractions of `cv2.transform`, which have ten.
_CUT = -0.5 + 1 / 1024
# after a shift of hue, torchvision multiplies values from 0 to 1 by 255.999 and cuts fractions off
_HUE_SCALE = 255.999 / 255
_IDENTITY = np.eye(3, 4)
_GREY_MATRIX = np.array([[*_LUMA, _CUT]] * 3)
# torchvision cuts the grey value off before it mixes it in: by a half, on average
_SATURATION_0 = np.array([[*_LUMA, _CUT - 0.5]] * 3)
_SATURATION_SLOPE = _IDENTITY - np.array([[*_LUMA, -0.5]] * 3)
_LEVELS = np.arange(256, dtype=np.float32)


# --- what the operations do, for several pictures: the mathematics of both forms ---


def linear_matrices(codes: Codes, values: Floats) -> Float32:
    """Return the matrices M of SATURATION and GREY, float32 [n, 3, 4]; the identity for other operations.

    The new colour is M[:, :3] @ rgb + M[:, 3], rounded.

    Args:
        codes: int8 [n].
        values: float64 [n, 4], see `operations`.
    """
    matrices = np.tile(_IDENTITY, (len(codes), 1, 1))
    matrices[codes == Operation.GREY] = _GREY_MATRIX
    saturations = codes == Operation.SATURATION
    matrices[saturations] = _saturation_matrix(values[saturations, :1, None])
    return matrices.astype(np.float32)


def _saturation_matrix(factor: Any) -> Floats:
    """Return float64 [3, 4] for a factor, or [n, 3, 4] for factors [n, 1, 1]."""
    matrix: Floats = _SATURATION_0 + factor * _SATURATION_SLOPE
    return matrix


def tables(codes: Codes, values: Floats) -> Pixels:
    """Return the new values of 0 to 255, uint8 [n, 256], by the operations in `_TABLES`; others change none.

    Args:
        codes: int8 [n].
        values: float64 [n, 4], see `operations`.
    """
    result = np.tile(_LEVELS.astype(np.uint8), (len(codes), 1))
    for code, table in _TABLES.items():
        rows = codes == code
        # float32, as torchvision computes
        result[rows] = table(values[rows, :1].astype(np.float32)).clip(0, 255).astype(np.uint8)
    return result


_TABLES: dict[int, Callable[[Float32], Float32]] = {
    Operation.BRIGHTNESS: lambda factors: _LEVELS * factors,
    Operation.POSTERIZE: lambda bits: _LEVELS - _LEVELS % 2 ** (8 - bits),
    Operation.SOLARIZE: lambda thresholds: np.where(thresholds <= _LEVELS, 255 - _LEVELS, _LEVELS),
    Operation.SOLARIZE_ADD: lambda addends: np.where(_LEVELS < 128, _LEVELS + addends, _LEVELS),
    Operation.INVERT: lambda _: 255 - _LEVELS,
}
"""New values, [n, 256] or [256], of 0 to 255, by an operation's first value, float32 [n, 1]."""


def blur_kernels(sigmas: Floats) -> Float32:
    """Return float32 [n, size], Gaussians by which rows, then columns are weighted; their sum is 1.

    Each is zero beyond the smallest odd size that holds three sigmas on each side; `size` is the largest.

    Args:
        sigmas: float64 [n], pixels.
    """
    radii = np.ceil(3 * sigmas)[:, None]
    radius = int(radii.max(initial=0))
    steps = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (steps / np.maximum(sigmas, 1e-3)[:, None]) ** 2) * (np.abs(steps) <= radii)
    kernels: Float32 = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return kernels


# --- a picture, on the CPU ---


def recolour(picture: Pixels, code: int, value: float) -> None:
    """Change the colours of a picture in place, by an operation on colours; threads may call it at once.

    Args:
        picture: uint8 [height, width, channels], contiguous, RGB or grey.
        code: number of the operation.
        value: its first value, see `operations`.
    """
    if picture.shape[2] == 3 or code not in _OF_RGB_ONLY:
        _RECOLOURINGS[code](picture, value)


def _saturate(picture: Pixels, factor: float) -> None:
    cv2.transform(picture, _saturation_matrix(factor), dst=picture)


def _turn_grey(picture: Pixels, _: float) -> None:
    cv2.transform(picture, _GREY_MATRIX, dst=picture)


def _brighten(picture: Pixels, factor: float) -> None:
    cv2.convertScaleAbs(picture, dst=picture, alpha=factor, beta=_CUT)


def _posterize(picture: Pixels, bits: float) -> None:
    np.bitwise_and(picture, np.uint8(256 - 2 ** (8 - int(bits))), out=picture)


def _solarize(picture: Pixels, threshold: float) -> None:
    _, mask = cv2.threshold(picture, math.ceil(threshold) - 1, 255, cv2.THRESH_BINARY)
    cv2.bitwise_xor(picture, mask, dst=picture)


def _solarize_add(picture: Pixels, addend: float) -> None:
    _, addends = cv2.threshold(picture, 127, addend, cv2.THRESH_BINARY_INV)
    cv2.add(picture, addends, dst=picture)


def _invert(picture: Pixels, _: float) -> None:
    cv2.bitwise_not(picture, dst=picture)


def _change_contrast(picture: Pixels, factor: float) -> None:
    means = cv2.mean(picture)
    # torchvision cuts the grey values off: by a half, on average
    mean = np.dot(_LUMA, means[:3]) - 0.5 if picture.shape[2] == 3 else means[0]
    # the second weight is zero: this multiplies by a number and adds one, faster than `cv2.LUT`
    cv2.addWeighted(picture, factor, picture, 0, (1 - factor) * mean + _CUT, dst=picture)


def _stretch_contrast(picture: Pixels, _: float) -> None:
    lows, highs = picture.min(axis=0).min(axis=0).tolist(), picture.max(axis=0).max(axis=0).tolist()
    channels = len(lows)
    matrix = np.eye(channels, channels + 1)
    for channel, (low, high) in enumerate(zip(lows, highs, strict=True)):
        if low < high:
            matrix[channel, channel] = 255 / (high - low)
            matrix[channel, channels] = -low * 255 / (high - low) + _CUT
    cv2.transform(picture, matrix, dst=picture)


def _equalize(picture: Pixels, _: float) -> None:
    channels = range(picture.shape[2])
    counts = [cv2.calcHist([picture], [channel], None, [256], [0, 256]) for channel in channels]
    histogram = np.reshape(counts, (-1, 256)).T.astype(np.int64)  # [256, channels]
    # as in Pillow: https://github.com/python-pillow/Pillow/blob/main/src/PIL/ImageOps.py
    sums = histogram.cumsum(axis=0)
    highest = sums.argmax(axis=0)  # the highest value that occurs
    steps = (sums[-1] - histogram[highest, channels]) // 255
    table = np.zeros_like(sums)
    table[1:] = (sums[:-1] + steps // 2) // np.maximum(steps, 1)
    table = np.where(steps == 0, np.arange(256)[:, None], table).clip(0, 255)
    cv2.LUT(picture, table.astype(np.uint8)[None], dst=picture)


def _sharpen(picture: Pixels, factor: float) -> None:
    if min(picture.shape[:2]) <= 2:
        return
    # torchvision mixes in a mean of nine pixels in which the middle one has five times the weight
    share = (1 - factor) * 9 / 13
    mixed = cv2.blur(picture, (3, 3)).reshape(picture.shape)
    cv2.addWeighted(picture, 1 - share, mixed, share, _CUT, dst=mixed)
    picture[1:-1, 1:-1] = mixed[1:-1, 1:-1]


def _shift_hue(picture: Pixels, shift: float) -> None:
    colors, hsv = _float_pictures(picture.shape)
    np.copyto(colors, picture)
    cv2.cvtColor(colors, cv2.COLOR_RGB2HSV, dst=hsv)
    hsv[..., 0] += 360 * (shift % 1)  # OpenCV does not take hues below 0
    cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=colors)
    cv2.convertScaleAbs(colors, dst=picture, alpha=_HUE_SCALE, beta=-0.5)


_of_thread = threading.local()


def _float_pictures(shape: tuple[int, ...]) -> Float32:
    """Return float32 [2, *shape], memory that this thread uses again.

    Fresh memory of this size would be given back to the system each time, which takes longer than the work.
    """
    pictures: Float32 | None = getattr(_of_thread, "pictures", None)
    if pictures is None or pictures.shape[1:] != shape:
        pictures = _of_thread.pictures = np.empty((2, *shape), np.float32)
    return pictures


def _blur(picture: Pixels, sigma: float) -> None:
    kernel = cv2.getGaussianKernel(2 * math.ceil(3 * sigma) + 1, sigma)
    # twice as fast as `cv2.GaussianBlur`, and nearer to torchvision
    cv2.sepFilter2D(picture, -1, kernel, kernel, dst=picture, borderType=cv2.BORDER_REFLECT_101)


_RECOLOURINGS: dict[int, Callable[[Pixels, float], None]] = {
    Operation.SATURATION: _saturate,
    Operation.GREY: _turn_grey,
    Operation.BRIGHTNESS: _brighten,
    Operation.POSTERIZE: _posterize,
    Operation.SOLARIZE: _solarize,
    Operation.SOLARIZE_ADD: _solarize_add,
    Operation.INVERT: _invert,
    Operation.CONTRAST: _change_contrast,
    Operation.AUTOCONTRAST: _stretch_contrast,
    Operation.EQUALIZE: _equalize,
    Operation.SHARPNESS: _sharpen,
    Operation.HUE: _shift_hue,
    Operation.BLUR: _blur,
}
_OF_RGB_ONLY = (Operation.SATURATION, Operation.GREY, Operation.HUE)  # grey pictures stay as they are


# --- a batch, on a device ---


def recolour_linear(images: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Return the images with each colour multiplied by its picture's matrix.

    Args:
        images: float32 [n, channels, height, width].
        matrices: float32 [n, 3, 4], see `linear_matrices`.
    """
    if images.shape[1] == 1:
        return images
    colors = torch.baddbmm(matrices[:, :, 3:], matrices[:, :, :3], images.flatten(2))
    return colors.round_().clamp_(0, 255).view(images.shape)


def apply_tables(images: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Return the images with each value replaced by that of its picture's table.

    Args:
        images: float32 [n, channels, height, width].
        tables: [n, 256], see `tables`.
    """
    return _look_up(images, tables[:, None])


def _look_up(images: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Replace the values by those of tables, [n, 1 or channels, 256]."""
    index = images.flatten(2).long()
    values = tables.to(images.dtype).expand(-1, images.shape[1], -1).gather(2, index)
    return values.view(images.shape)


def contrast(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the images with their contrast multiplied by `factors`, float32 [n].

    Args:
        images: float32 [n, channels, height, width].
    """
    mean = _grey(images).floor().mean(dim=(1, 2, 3), keepdim=True)
    return _blend(images, mean, factors[:, None, None, None]).floor_()


def autocontrast(images: torch.Tensor) -> torch.Tensor:
    """Return the images with each channel stretched to 0-255; one of a single value stays.

    Args:
        images: float32 [n, channels, height, width].
    """
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    is_flat = low == high
    scale = ((high - low) * (1 / 255)).masked_fill_(is_flat, 1.0)
    stretched = (images - low.masked_fill_(is_flat, 0.0)) / scale
    return stretched.clamp_(0, 255).floor_()


def equalize(images: torch.Tensor) -> torch.Tensor:
    """Return the images with all values of each channel about equally frequent.

    Args:
        images: float32 [n, channels, height, width].
    """
    index = images.flatten(2).long()
    histogram = torch.zeros((*index.shape[:2], 256), dtype=torch.int32, device=images.device)
    histogram.scatter_add_(2, index, histogram.new_ones(1).expand_as(index))
    # see `_equalize`
    sums = histogram.cumsum(dim=2, dtype=torch.int32)
    highest = sums.argmax(dim=2, keepdim=True)
    steps = (index.shape[2] - histogram.gather(2, highest)) // 255
    table = (sums - histogram + steps // 2) // steps.clamp(min=1)
    table = torch.where(steps == 0, torch.arange(256, device=images.device), table).clamp_(0, 255)
    return _look_up(images, table)


def sharpen(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the images with their sharpness multiplied by `factors`, float32 [n]; pixels at the border stay.

    Args:
        images: float32 [n, channels, height, width].
    """
    if min(images.shape[2:]) <= 2:
        return images
    inner = images[:, :, 1:-1, 1:-1]
    sums = images[:, :, :-2] + images[:, :, 1:-1] + images[:, :, 2:]
    sums = sums[..., :-2] + sums[..., 1:-1] + sums[..., 2:]
    smooth = ((sums + 4 * inner) / 13).round_()  # see `_sharpen`
    sharpened = images.clone()
    sharpened[:, :, 1:-1, 1:-1] += (smooth - inner) * (1 - factors)[:, None, None, None]
    return sharpened.clamp_(0, 255).floor_()


def shift_hue(images: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Return the images with their hue shifted by `shifts`, float32 [n], shares of the circle.

    Args:
        images: float32 [n, channels, height, width].
    """
    if images.shape[1] == 1:
        return images
    return _turn_hue(images, shifts[:, None, None]).mul_(_HUE_SCALE).floor_()


def blur(images: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """Return the images blurred, each by its own Gaussian.

    Args:
        images: float32 [n, channels, height, width].
        kernels: float32 [n, size], see `blur_kernels`.
    """
    count, channels, height, width = images.shape
    radius = kernels.shape[1] // 2
    weights = kernels[:, None].expand(-1, channels, -1).reshape(count * channels, 1, 1, -1)
    # each channel of each picture is a channel of one picture: a convolution has no weights by picture
    planes = images.reshape(1, count * channels, height, width)
    planes = planes.index_select(3, _reflected(width, radius, images.device))
    planes = conv2d(planes, weights, groups=count * channels)
    planes = planes.index_select(2, _reflected(height, radius, images.device))
    planes = conv2d(planes, weights.transpose(2, 3), groups=count * channels)
    return planes.round_().view(images.shape)


def _reflected(side: int, radius: int, device: torch.device) -> torch.Tensor:
    """Return the numbers of the pixels along a side with reflected borders, int64 [side + 2 * radius]."""
    period = max(2 * side - 2, 1)
    steps = torch.arange(-radius, side + radius, device=device) % period
    return torch.minimum(steps, period - steps)


def _blend(images: torch.Tensor, other: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (images * factor + other * (1 - factor)).clamp_(0, 255)


def _grey(images: torch.Tensor) -> torch.Tensor:
    """Return the luma, as torchvision's `rgb_to_grayscale`, whose import takes a second."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue


def _turn_hue(images: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Shift the hue, through HSV and back, by `shift` [n, 1, 1], a share of the circle."""
    high, low = images.max(dim=1).values, images.min(dim=1).values
    span = high - low
    red, green, blue = images.unbind(1)
    divisor = torch.where(span == 0, torch.ones_like(span), span)
    sector = torch.where(
        high == red,
        (green - blue) / divisor,
        torch.where(high == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    sector = (sector + 6 * shift) % 6
    # each channel falls from `high` to `low` and rises back, a third of the circle apart
    # https://en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative
    channels = []
    for number in (5, 3, 1):
        k = (number + sector) % 6
        channels.append(high - span * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)

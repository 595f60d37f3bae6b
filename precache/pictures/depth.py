"""Pictures of 16 bits: kept so in grey (`--dtype uint16`), or made 8 bits.

Kept, values stay those of the file, and those of a picture of 8 bits are multiplied by 257, so that white is
white. Each channel is resized by Pillow in 32-bit floating point and rounded once: the distance from exact
arithmetic is 0.5, and less than 0.01 of floating point.

Made 8 bits, a value keeps its upper 8, as Pillow converts it. But 16 bits of a file often hold fewer, from
cameras and scanners 10, 12 or 14. Where the file says so, its brightest value is that many ones, and becomes
255. Where it says nothing and its values suggest it, the picture would become nearly black: a warning says
so, once.
"""

import logging
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from precache.pictures.jpeg import Pixels

Grey16 = npt.NDArray[Any]
"""uint16 [height, width, 1]."""

_LOGGER = logging.getLogger(__name__)

_FULL_BITS = 16
_DARK_BITS = 14  # where no value has more, the picture has less than a quarter of the brightness
_TIFF_BITS, _TIFF_MAXIMA = 258, (281, 341)  # BitsPerSample; MaxSampleValue, SMaxSampleValue
# Set once the user was warned: workers are forks, and share this page with the process that they work for.
_warned = mmap.mmap(-1, 1)


def grey_of_16_bits(image: Image.Image) -> Grey16 | None:
    """The upright picture, what is transparent in white, where it is of mode I or I;16; None for other modes.

    Raises:
        ValueError: its values are not within 0 to 65,535.
    """
    if image.mode != "I" and not image.mode.startswith("I;16"):
        return None
    upright = ImageOps.exif_transpose(image)
    grey, shown = np.asarray(upright), shown_pixels(upright)
    if grey.min() < 0 or grey.max() >= 1 << _FULL_BITS:
        raise ValueError(f"mode {image.mode} has values that are not within 0 to 65,535")
    if shown is not None:
        grey = np.where(shown, grey, (1 << _FULL_BITS) - 1)
    return grey.astype(np.uint16)[..., None]


def shown_pixels(image: Image.Image) -> npt.NDArray[np.bool_] | None:
    """bool [height, width]: where an image of mode I or I;16 is not of its transparent value, if it has one.

    PNG's tRNS chunk (11.3.2.1) names that value, which Pillow leaves for its reader to apply.
    """
    value = image.info.get("transparency")
    return np.asarray(image) != value if isinstance(value, int) else None


def grey_from_8_bits(image: Image.Image) -> Grey16:
    """Of a picture of mode L."""
    grey: Grey16 = np.multiply(np.asarray(image)[..., None], 257, dtype=np.uint16)
    return grey


def resize(
    picture: npt.NDArray[Any],
    size: tuple[int, int],
    box: tuple[float, float, float, float],
    resample: Image.Resampling,
) -> npt.NDArray[Any]:
    """The part `box` of a picture, resized; each channel by itself.

    Args:
        picture: unsigned integers, [height, width, channels]; the result is of the same dtype.
        size: (width, height) of the result.
        box: (left, top, right, bottom).
    """
    resized = [
        np.asarray(Image.fromarray(picture[..., channel].astype(np.float32)).resize(size, resample, box))
        for channel in range(picture.shape[2])
    ]
    brightest = np.iinfo(picture.dtype).max
    rounded: npt.NDArray[Any] = np.stack(resized, axis=-1).round().clip(0, brightest).astype(picture.dtype)
    return rounded


def grey_to_8_bits(image: Image.Image, opened: Image.Image, data: bytes, path: str) -> Pixels:
    """uint8 [height, width] of an image of mode I or I;16, that is `opened` turned upright; from `data`.

    Raises:
        ValueError: its values are not within 0 to 65,535.
    """
    grey = np.asarray(image)
    top = int(grey.max())
    if image.mode == "F" or grey.min() < 0 or top >= 1 << _FULL_BITS:
        raise ValueError(f"mode {image.mode} has no defined range of 0 to 65,535")
    bits = _stated_bits(opened, data)
    if bits is not None and bits < _FULL_BITS and top < 1 << bits and not _fills_upper_bits(grey, bits):
        brightest = (1 << bits) - 1
        values = np.arange(brightest + 1)
        scaled: Pixels = ((values * 255 * 2 + brightest) // (2 * brightest)).astype(np.uint8)[grey]
        return scaled
    if bits is None:
        warn_if_dark(top, path, "scale them, or let them say so (TIFF MaxSampleValue, PNG sBIT)")
    return (grey >> 8).astype(np.uint8)


def warn_if_dark(top: int, path: str, remedy: str) -> None:
    """Say once that a file of 16 bits whose brightest value is `top` may hold fewer."""
    if 0 < top < 1 << _DARK_BITS and not _warned[0]:
        _warned[0] = 1
        _LOGGER.warning(
            "%r: its values have 16 bits, but none is above %s of 65,535, so it becomes nearly black; if "
            "such files hold fewer bits, %s. Others like it are not reported",
            path,
            f"{top:,}",
            remedy,
        )


def is_deep_colour(image: Image.Image, data: bytes) -> bool:
    """Whether Pillow makes 8 bits of 16 for each channel of a colour picture."""
    if image.format == "PNG":
        return data[24:25] == b"\x10" and image.mode in ("RGB", "RGBA", "LA")
    tags = getattr(image, "tag_v2", None) if image.format == "TIFF" else None
    return tags is not None and image.mode in ("RGB", "RGBA") and max(_numbers(tags.get(_TIFF_BITS))) == 16


def brightest_colour(image: Image.Image) -> int:
    """The most that a value of a deep colour picture can have been; Pillow keeps the upper 8 bits."""
    bands = image.getextrema()[: 3 if image.mode.startswith("RGB") else 1]
    return max(int(high) << 8 | 0xFF for _, high in bands)  # type: ignore[misc]  # a pair for each band


def _stated_bits(image: Image.Image, data: bytes) -> int | None:
    """How many bits the file says that its values have; None if it says nothing."""
    if image.format == "PNG":
        return _png_significant_bits(data)
    tags = getattr(image, "tag_v2", None)
    if tags is None:
        return _FULL_BITS  # PPM and JPEG 2000 say what they hold, and Pillow has scaled them
    if 8 < (bits := max(_numbers(tags.get(_TIFF_BITS)))) < _FULL_BITS:
        return int(bits)
    for tag in _TIFF_MAXIMA:
        if 0 < (maximum := max(_numbers(tags.get(tag)))) < 1 << _FULL_BITS:
            return max(8, int(maximum).bit_length())
    return None


def _numbers(value: object) -> tuple[float, ...]:
    """What a TIFF tag holds, whatever type the writer chose; 0 if it is not a number."""
    values = value if isinstance(value, tuple) else (value,)
    return tuple(float(v) for v in values if isinstance(v, (int, float))) or (0.0,)


def _png_significant_bits(data: bytes) -> int | None:
    """What the sBIT chunk says (PNG, 11.3.2.7); it stands before the palette and the image data."""
    position = 8
    while (kind := data[position + 4 : position + 8]) and kind != b"IDAT":
        if kind == b"sBIT":
            return max(data[position + 8 : position + 9], default=0) or None
        position += 12 + int.from_bytes(data[position : position + 4], "big")
    return None


def _fills_upper_bits(grey: npt.NDArray[np.integer], bits: int) -> bool:
    """Whether values below 2**bits are those of a dark picture, scaled to 16 bits as PNG asks for.

    Writers differ in whether they do. Scaled values are multiples of 2**(16 - bits), give or take one.
    """
    shift = _FULL_BITS - bits
    original = grey >> shift
    linear = (original * np.int64((1 << _FULL_BITS) - 1) * 2 + (1 << bits) - 1) // (2 * ((1 << bits) - 1))
    return bool(((grey == original << shift) | (grey == linear)).all())

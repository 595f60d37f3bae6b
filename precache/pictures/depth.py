"""Reduce pictures of 16 bits per channel to 8 bits.

A value keeps its upper 8 bits, as Pillow converts it. But files of 16 bits often use fewer, such as the 10,
12 or 14 bits of cameras and scanners. If the file says how many, the greatest value of that many bits becomes
255. If it does not, and none of its values uses the upper bits, the picture becomes nearly black: a warning
says so, once.
"""

import logging
import mmap

import numpy as np
import numpy.typing as npt

from precache.pictures.own_pillow import Image

_LOGGER = logging.getLogger(__name__)

_FULL_BITS = 16
_DARK_BITS = 14  # if no value has more bits, the picture has less than a quarter of the brightness
_TIFF_BITS, _TIFF_MAXIMA = 258, (281, 341)  # BitsPerSample; MaxSampleValue, SMaxSampleValue
# 1 once the user was warned; shared with processes that are forks
_warned = mmap.mmap(-1, 1)


def _is_first(record: logging.LogRecord) -> bool:
    """Let one warning pass, whether it is of this process or comes from a worker of it."""
    is_first = not _warned[0]
    _warned[0] = 1
    return is_first


_LOGGER.addFilter(_is_first)


def grey_to_8_bits(image: Image.Image, opened: Image.Image, data: bytes, path: str) -> Image.Image:
    """Convert an image of mode I or I;16 to L, or to LA if it has transparent pixels.

    PNG's tRNS chunk (11.3.2.1) names a transparent value, which Pillow does not apply itself.

    Args:
        image: the upright image.
        opened: the image as it was opened, with the file's tags.
        data: bytes of the file.
        path: path of the file, for a warning.

    Raises:
        ValueError: its values are not within 0 to 65,535.
    """
    grey = np.asarray(image)
    top = int(grey.max())
    if image.mode == "F" or grey.min() < 0 or top >= 1 << _FULL_BITS:
        raise ValueError(f"mode {image.mode} has no defined range of 0 to 65,535")
    bits = _stated_bits(opened, data)
    if bits is not None and bits < _FULL_BITS and top < 1 << bits and not _is_scaled_to_16_bits(grey, bits):
        brightest = (1 << bits) - 1
        values = np.arange(brightest + 1)
        reduced = ((values * 255 * 2 + brightest) // (2 * brightest)).astype(np.uint8)[grey]
    else:
        if bits is None:
            _warn_if_dark(top, path, "scale them, or let them say so (TIFF MaxSampleValue, PNG sBIT)")
        reduced = (grey >> 8).astype(np.uint8)
    picture = Image.fromarray(reduced)
    transparent = image.info.get("transparency")
    if not isinstance(transparent, int):
        return picture
    opacity = Image.fromarray((grey != transparent).astype(np.uint8) * 255)
    return Image.merge("LA", (picture, opacity))


def warn_if_dark_colour(image: Image.Image, data: bytes, path: str) -> None:
    """Warn, once, if a file of colour in 16 bits per channel may use fewer; Pillow has kept the upper 8.

    Args:
        image: the image as it was opened.
        data: bytes of the file.
        path: path of the file.
    """
    if _is_deep_colour(image, data):
        bands = image.getextrema()[: 3 if image.mode.startswith("RGB") else 1]
        top = max(int(high) << 8 | 0xFF for _, high in bands)  # type: ignore[misc]  # a pair for each band
        _warn_if_dark(top, path, "scale them")


def _is_deep_colour(image: Image.Image, data: bytes) -> bool:
    """Whether Pillow has reduced the channels of a colour picture from 16 bits to 8."""
    if image.format == "PNG":
        return data[24:25] == b"\x10" and image.mode in ("RGB", "RGBA", "LA")
    tags = getattr(image, "tag_v2", None) if image.format == "TIFF" else None
    return tags is not None and image.mode in ("RGB", "RGBA") and _tag_maximum(tags.get(_TIFF_BITS)) == 16


def _warn_if_dark(top: int, path: str, remedy: str) -> None:
    """Warn, once, that a file of 16 bits whose greatest value is `top` may use fewer bits."""
    if 0 < top < 1 << _DARK_BITS:
        _LOGGER.warning(
            "%r: its values have 16 bits, but none is above %s of 65,535, so it becomes nearly black; if "
            "such files hold fewer bits, %s. Others like it are not reported",
            path,
            f"{top:,}",
            remedy,
        )


def _stated_bits(image: Image.Image, data: bytes) -> int | None:
    """Number of bits that the file says its values use; None if it says nothing."""
    if image.format == "PNG":
        return _png_significant_bits(data)
    tags = getattr(image, "tag_v2", None)
    if tags is None:
        return _FULL_BITS  # PPM and JPEG 2000 state their depth, and Pillow has scaled the values
    bits = _tag_maximum(tags.get(_TIFF_BITS))
    if 8 < bits < _FULL_BITS:
        return int(bits)
    for tag in _TIFF_MAXIMA:
        maximum = _tag_maximum(tags.get(tag))
        if 0 < maximum < 1 << _FULL_BITS:
            return max(8, int(maximum).bit_length())
    return None


def _tag_maximum(value: object) -> float:
    """Greatest number in the value of a TIFF tag, of whatever type that is; 0 if it holds no number."""
    values = value if isinstance(value, tuple) else (value,)
    return max((float(number) for number in values if isinstance(number, (int, float))), default=0.0)


def _png_significant_bits(data: bytes) -> int | None:
    """Value of a PNG's sBIT chunk (11.3.2.7), which precedes palette and image data; None without one."""
    position = 8
    while (kind := data[position + 4 : position + 8]) and kind != b"IDAT":
        if kind == b"sBIT":
            return max(data[position + 8 : position + 9], default=0) or None
        position += 12 + int.from_bytes(data[position : position + 4], "big")
    return None


def _is_scaled_to_16_bits(grey: npt.NDArray[np.integer], bits: int) -> bool:
    """Whether values below 2**bits have been scaled from `bits` to 16 bits, as PNG asks for.

    Then the picture is dark, although its values look like those of a file of `bits` bits.
    Not all writers scale the values. Scaled values are multiples of 2**(16 - bits), give or take one.
    """
    shift = _FULL_BITS - bits
    original = grey >> shift
    linear = (original * np.int64((1 << _FULL_BITS) - 1) * 2 + (1 << bits) - 1) // (2 * ((1 << bits) - 1))
    return bool(((grey == original << shift) | (grey == linear)).all())

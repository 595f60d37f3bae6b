"""JPEG by libjpeg-turbo, through simplejpeg: decode, encode, and what the markers say."""

import io
import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import ExifTags, Image

from precache.errors import ImageError
from precache.pictures.pillow import quiet_pillow

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""uint8 [height, width, channels], 0-255: grey, RGB, or RGB and alpha."""

START = b"\xff\xd8\xff"
MAX_EXPANSION = 2048
"""Bytes of pixels for each byte of a JPEG, at most: a block of 64 values takes a bit or more, and at most 10
blocks stand for 32 x 16 pixels."""
_BASELINE, _PROGRESSIVE, _SCAN = 0xC0, 0xC2, 0xDA
_END = b"\xff\xd9"
# Headers that may hold an orientation.
XMP = b"http://ns.adobe.com/xap/"
_ORIENTATION_MARKS = (b"Exif\0\0", XMP)
# What libjpeg says of scan data that breaks off or is invalid; it fills the rest with grey and goes on.
# Extra bytes, in contrast, are found in many pictures that look right.
_DAMAGE = ("premature end", "bad huffman code", "instead of rst")


def encode_jpeg(pixels: Pixels, quality: int) -> bytes:
    """JPEG bytes of `pixels`, grey or RGB, colour in full resolution from quality 95 on, else 4:2:0."""
    grey = pixels.shape[2] == 1
    subsampling = "Gray" if grey else "444" if quality >= 95 else "420"
    encoded: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels),
        quality=quality,
        colorspace="GRAY" if grey else "RGB",
        colorsubsampling=subsampling,
    )
    return encoded


def decode_jpeg(data: bytes, path: str, channels: int = 3) -> Pixels:
    """Pixels, grey or RGB, of a JPEG that `encode_jpeg` wrote; ImageError names `path` if it is damaged."""
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        if height * width * channels > len(data) * MAX_EXPANSION:
            raise ValueError(f"{width:,} x {height:,} pixels in {len(data):,} bytes")
        pixels: Pixels = simplejpeg.decode_jpeg(data, colorspace="GRAY" if channels == 1 else "RGB")
    except ValueError as error:
        raise ImageError(path, f"cannot be decoded ({error})") from error
    return pixels


def decode_strictly(data: bytes, colorspace: str, reduction: int = 1) -> Pixels | None:
    """The pixels of a JPEG, uint8 [height, width, channels]; None where Pillow decides what it is.

    Args:
        colorspace: `RGB`, `RGBX` or `GRAY`.
        reduction: 1, 2, 4 or 8: decode every so many-th row and column, averaged.

    Raises:
        ValueError: data is missing or invalid.
    """
    try:
        return decode_leniently(data, colorspace, reduction, strict=True)
    except ValueError as error:  # strict: it also refuses what libjpeg only warns about
        if not any(words in str(error).lower() for words in _DAMAGE):
            return None
        raise ValueError(f"truncated or damaged: {error}") from error


def decode_leniently(data: bytes, colorspace: str, reduction: int = 1, *, strict: bool = False) -> Pixels:
    """As `decode_strictly`, with grey where data is missing; if `strict`, ValueError for any complaint."""
    options: dict[str, float] = {}
    if reduction > 1:
        height, width, *_ = simplejpeg.decode_jpeg_header(data, strict=False)
        options = {
            "min_height": math.ceil(height / reduction),
            "min_width": math.ceil(width / reduction),
            "min_factor": reduction,
        }
    pixels: Pixels = simplejpeg.decode_jpeg(data, colorspace=colorspace, strict=strict, **options)
    return pixels


def psnr(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """Peak signal-to-noise ratio in dB of two pictures of one dtype; infinite if they are equal."""
    error = float(np.square(one.astype(np.float32) - other).mean())
    return math.inf if error == 0 else 10 * math.log10(np.iinfo(one.dtype).max ** 2 / error)


def is_plain(data: bytes) -> bool:
    """Whether the JPEG `data` is baseline or progressive, and ends with its own end, the first after a scan.

    In YCbCr or grey, all decoders make the same pixels of these; GPU ones differ by 1 of 255 at most. Neither
    the scan data nor the orientation is looked at.
    """
    # scan data has no such bytes; a JPEG with such bytes in tables between two scans is taken for not plain
    ends_at = data.find(_END, _scan(data))
    return ends_at == len(data) - len(_END) and _frame_marker(data) in (_BASELINE, _PROGRESSIVE)


def orientation(data: bytes) -> int:
    """EXIF orientation of a JPEG, 1 to 8; from XMP where EXIF has none; 0 if it is damaged.

    Of a damaged one decoders disagree: what Pillow takes for upright, DALI may turn.
    """
    head = data[: _scan(data)]  # no decoder looks behind it, and searching the rest would take long
    if not any(mark in head for mark in _ORIENTATION_MARKS):
        return 1
    # Pillow warns of a damaged one, each time that it is served
    with quiet_pillow(0), Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
        exif = image.info.get("exif", b"")
        damaged = any(ExifTags.Base.Orientation.to_bytes(2, order) in exif for order in ("big", "little"))
        found: int = image.getexif().get(ExifTags.Base.Orientation, 0 if damaged else 1)
        return found


def is_truncated(data: bytes) -> bool:
    """Whether a JPEG has no end after its first scan begins. The scan data is not looked at."""
    return data.rfind(_END) < _scan(data)


def _scan(data: bytes) -> int:
    """Where the first scan begins; the length of `data` if none does."""
    return next((position for marker, position in _markers(data) if marker == _SCAN), len(data))


def _frame_marker(data: bytes) -> int | None:
    """The second byte of a JPEG's start-of-frame marker: 0xC0 baseline, 0xC2 progressive (T.81, B.1.1.3)."""
    no_frame = (0xC4, 0xC8, 0xCC)  # Huffman tables, reserved, arithmetic
    return next((m for m, _ in _markers(data) if 0xC0 <= m <= 0xCF and m not in no_frame), None)


def _markers(data: bytes) -> Iterator[tuple[int, int]]:
    """The second byte of each marker up to the first scan, and where it stands."""
    position, marker = len(START) - 1, 0
    while marker != _SCAN and data[position : position + 1] == b"\xff" and position + 4 <= len(data):
        marker = data[position + 1]
        yield marker, position
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")

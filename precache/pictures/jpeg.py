"""JPEG files: decoding and encoding by libjpeg-turbo, through simplejpeg, and reading of their markers."""

import io
import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import ExifTags

from precache.errors import ImageError
from precache.pictures.own_pillow import Image

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""Pixels of a picture, uint8 [height, width, channels], 0-255: grey or RGB."""

START = b"\xff\xd8\xff"
MAX_EXPANSION = 2048
"""Maximal number of bytes of pixels per byte of a JPEG.

A block of 64 values takes at least a bit, and at most 10 blocks stand for 32 x 16 pixels.
"""
_BASELINE, _PROGRESSIVE, _SCAN = 0xC0, 0xC2, 0xDA
_END = b"\xff\xd9"
XMP = b"http://ns.adobe.com/xap/"
_ORIENTATION_MARKS = (b"Exif\0\0", XMP)  # starts of the headers that may hold an orientation
# Parts of libjpeg's warnings for scan data that breaks off or is invalid, of which the rest becomes grey. Its
# other warnings, as of extra bytes, are no reason to reject a picture: many that look right have these.
_DAMAGE_WARNINGS = ("premature end", "bad huffman code", "instead of rst")


def encode_jpeg(pixels: Pixels, quality: int) -> bytes:
    """Encode `pixels`, grey or RGB, as JPEG; colour has full resolution from quality 95 on, else 4:2:0."""
    if pixels.shape[2] == 1:
        colorspace, subsampling = "GRAY", "Gray"
    else:
        colorspace, subsampling = "RGB", "444" if quality >= 95 else "420"
    content: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels),
        quality=quality,
        colorspace=colorspace,
        colorsubsampling=subsampling,
    )
    return content


def decode_jpeg(data: bytes, path: str, channels: int = 3) -> Pixels:
    """Decode a JPEG of `encode_jpeg` to grey or RGB; ImageError names `path` if it is damaged."""
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        if height * width * channels > len(data) * MAX_EXPANSION:
            raise ValueError(f"{width:,} x {height:,} pixels in {len(data):,} bytes")
        pixels: Pixels = simplejpeg.decode_jpeg(data, colorspace="GRAY" if channels == 1 else "RGB")
    except ValueError as error:
        raise ImageError(path, f"cannot be decoded ({error})") from error
    return pixels


def decode_strictly(data: bytes, colorspace: str, reduction: int = 1) -> Pixels | None:
    """Decode an intact JPEG; None for one that libjpeg warns about but that Pillow may accept.

    Args:
        data: bytes of the JPEG.
        colorspace: colour space of the result: `RGB`, `RGBX` or `GRAY`.
        reduction: 1, 2, 4 or 8: average that many rows and columns into one.

    Raises:
        ValueError: data is missing or invalid.
    """
    try:
        return decode_leniently(data, colorspace, reduction, strict=True)
    except ValueError as error:
        if not any(words in str(error).lower() for words in _DAMAGE_WARNINGS):
            return None
        raise ValueError(f"truncated or damaged: {error}") from error


def decode_leniently(data: bytes, colorspace: str, reduction: int = 1, *, strict: bool = False) -> Pixels:
    """Decode a JPEG, with grey where data is missing; arguments as of `decode_strictly`.

    If `strict`, raise ValueError for any warning of libjpeg.
    """
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


def psnr(picture: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """Peak signal-to-noise ratio in dB of two pictures of one dtype; infinite if they are equal."""
    error = float(np.square(picture.astype(np.float32) - other).mean())
    return math.inf if error == 0 else 10 * math.log10(np.iinfo(picture.dtype).max ** 2 / error)


def is_plain(data: bytes) -> bool:
    """Whether a JPEG is baseline or progressive, and its first end-of-image marker is the end of `data`.

    In YCbCr or grey, all decoders make the same pixels of such a JPEG; those of GPUs differ by 1 of 255 at
    most. Neither the scan data nor the orientation is checked.
    """
    # The marker's bytes are not in scan data; if they are in a table between two scans, the answer is False.
    end = data.find(_END, _scan_start(data))
    return end == len(data) - len(_END) and _frame_marker(data) in (_BASELINE, _PROGRESSIVE)


def orientation(data: bytes) -> int:
    """EXIF orientation of a JPEG, 1 to 8; from XMP where EXIF has none; 0 if it is damaged.

    Decoders disagree about a damaged orientation: what Pillow takes for upright, DALI may turn.
    """
    head = data[
        : _scan_start(data)
    ]  # decoders look no further, and searching all of the data would take long
    if not any(mark in head for mark in _ORIENTATION_MARKS):
        return 1
    with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
        exif = image.info.get("exif", b"")
        has_tag = any(ExifTags.Base.Orientation.to_bytes(2, order) in exif for order in ("big", "little"))
        value: int = image.getexif().get(ExifTags.Base.Orientation, 0 if has_tag else 1)
        return value


def is_truncated(data: bytes) -> bool:
    """Whether a JPEG has no end-of-image marker after its first scan begins; scan data is not checked."""
    return data.rfind(_END) < _scan_start(data)


def _scan_start(data: bytes) -> int:
    """Position of the first scan's marker; the length of `data` if there is none."""
    for marker, position in _markers(data):
        if marker == _SCAN:
            return position
    return len(data)


def _frame_marker(data: bytes) -> int | None:
    """The second byte of a JPEG's start-of-frame marker: 0xC0 baseline, 0xC2 progressive (T.81, B.1.1.3)."""
    other_markers = (0xC4, 0xC8, 0xCC)  # Huffman tables, reserved, arithmetic
    for marker, _ in _markers(data):
        if 0xC0 <= marker <= 0xCF and marker not in other_markers:
            return marker
    return None


def _markers(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the second byte of each marker up to that of the first scan, and the marker's position."""
    position, marker = len(START) - 1, 0
    while marker != _SCAN and data[position : position + 1] == b"\xff" and position + 4 <= len(data):
        marker = data[position + 1]
        yield marker, position
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")

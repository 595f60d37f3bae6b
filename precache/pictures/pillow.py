"""Decoding by Pillow, for all pictures but plain JPEGs: to upright grey or RGB of 8 bits.

Only files of the kinds in `precache.pictures.kinds` are opened, which excludes those for which Pillow runs
another program, and only if their header says that the picture is not too large.
"""

import io
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from PIL import ExifTags

from precache.pictures import depth, kinds
from precache.pictures.large_pictures import LARGE_PIXELS, large_picture_lock
from precache.pictures.own_pillow import Image, ImageOps, UnidentifiedImageError, adopt

_BAND_PIXELS = 1 << 22  # pixels that are blended at a time
_TIFF_SIZE, _TIFF_TILE = (256, 257), (322, 323)  # ImageWidth, ImageLength; TileWidth, TileLength
_FEW_BITS_OF_GREY = (b"\2\0", b"\4\0")  # bit depth and colour type of a PNG (11.2.1)
_PNG = b"\x89PNG\r\n\x1a\n"
_Pixels = tuple[int, int]  # width and height


def decode(
    data: bytes,
    path: str,
    background: tuple[int, int, int],
    max_pixels: int,
    locks: ExitStack | None,
) -> Image.Image:
    """Decode a picture to an upright image of mode L or RGB.

    Args:
        data: bytes of the picture.
        path: path of the picture, whose extension says what it is if its bytes do not; and for a warning.
        background: RGB that transparent pixels are composited on.
        max_pixels: maximal number of pixels.
        locks: holder of the lock that is acquired before a large picture is decoded; None: none is.

    Raises:
        TooLargeError: the picture has more than `max_pixels`.
        Exception: anything that a decoder raises for damaged bytes.
    """
    with open_picture(data, path, max_pixels, locks) as image:
        return upright(image, background, path, data)


@contextmanager
def open_picture(data: bytes, path: str, max_pixels: int, locks: ExitStack | None) -> Iterator[Image.Image]:
    """Open a picture without decoding it; arguments and errors as of `decode`."""
    for size in _sizes_before_opening(data):
        _check_and_lock(*size, max_pixels, locks)
    with _open(data, path) as image:
        for size in _sizes_when_opened(image):
            _check_and_lock(*size, max_pixels, locks)
        if image.format == "PNG" and "transparency" in image.info and data[24:26] in _FEW_BITS_OF_GREY:
            # Pillow scales the pixels to 0-255, but not the transparent value
            brightest = (1 << data[24]) - 1
            image.info["transparency"] = (image.info["transparency"] & brightest) * 255 // brightest
        yield image


def _check_and_lock(width: int, height: int, max_pixels: int, locks: ExitStack | None) -> None:
    if width * height > max_pixels:
        raise TooLargeError(width, height, max_pixels)
    if locks is not None and width * height > LARGE_PIXELS:
        locks.enter_context(large_picture_lock())


def stored_size(image: Image.Image) -> _Pixels:
    """Width and height of an open picture as its file states them; Pillow's `size` of a TIFF is upright."""
    if image.format == "TIFF":
        tags = image.tag_v2  # type: ignore[attr-defined]  # a TiffImageFile has them
        return tags[_TIFF_SIZE[0]], tags[_TIFF_SIZE[1]]
    return image.size


def _open(data: bytes, path: str) -> Image.Image:
    formats = kinds.decoder_kinds(data, path)
    try:
        return Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        if kind := kinds.undecodable_kind(data):
            raise ValueError(kinds.no_decoder_reason(kind)) from None
        if kind := kinds.drawing_kind(data):
            raise ValueError(f"{kind}: {kinds.DRAWING}") from None
        raise ValueError("not a known image format") from None


def upright(image: Any, background: tuple[int, int, int], path: str, data: bytes = b"") -> Image.Image:
    """Decode an open picture and turn it upright, as `decode` does.

    Args:
        image: the open picture.
        background: as of `decode`.
        path: path of the picture, for a warning.
        data: bytes that it was opened from; empty if unknown.
    """
    if isinstance(image, Image.Image):
        image.load()
    else:  # of Pillow itself, or of a plugin
        image = adopt(image)
    turned = image
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        turned = ImageOps.exif_transpose(image)
    if turned.mode in ("I", "F") or turned.mode.startswith("I;16"):
        turned = depth.grey_to_8_bits(turned, image, data, path)
    else:
        depth.warn_if_dark_colour(image, data, path)
    return _without_transparency(turned, background)


def _without_transparency(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Convert to L or RGB on `background`, a few rows at a time to save memory.

    A picture that is transparent everywhere was written by a program that fills in no opacity, as screenshots
    are: its colours are those of the picture.
    """
    if not ("A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info):
        mode = "L" if image.mode in ("1", "L") else "RGB"
        return image if image.mode == mode else image.convert(mode)
    width, height = image.size
    is_visible = False
    rows = max(1, _BAND_PIXELS // width)
    result = Image.new("RGB", image.size)
    below = Image.new("RGBA", (width, min(rows, height)), (*background, 255))
    for top in range(0, height, rows):
        box = (0, top, width, min(top + rows, height))
        rgba = image.crop(box).convert("RGBA")
        is_visible = is_visible or rgba.getchannel("A").getextrema() != (0, 0)
        backdrop = below if rgba.height == below.height else below.crop((0, 0, width, rgba.height))
        result.paste(Image.alpha_composite(backdrop, rgba).convert("RGB"), box)
    return result if is_visible else image.convert("RGB")


class TooLargeError(ValueError):
    """A picture of this width and height, in pixels, has more pixels than this maximum."""

    def __str__(self) -> str:
        width, height, max_pixels = self.args
        return (
            f"is too large ({width:,}x{height:,} is {width * height:,} pixels, --max-pixels allows "
            f"{max_pixels:,})"
        )


def _sizes_before_opening(data: bytes) -> Iterator[_Pixels]:
    """Yield sizes in pixels of all images that Pillow allocates, or decodes, when it opens a picture."""
    if kinds.content_kind(data[: kinds.PREFIX_BYTES]) == "WEBP":
        yield from _webp_sizes(data)
    elif data.startswith(b"\0\0\1\0"):
        yield from _icon_sizes(data)


def _sizes_when_opened(image: Image.Image) -> Iterator[_Pixels]:
    """Yield sizes in pixels of all images that Pillow allocates when an open picture is decoded."""
    yield image.size
    tags = getattr(image, "tag_v2", None)
    if image.format == "TIFF" and tags is not None:
        width, height = (tags.get(tag) for tag in _TIFF_TILE)
        if isinstance(width, int) and isinstance(height, int):
            yield width, height  # a tile may be larger than its picture, and is decoded whole


def _webp_sizes(data: bytes) -> Iterator[_Pixels]:
    """Yield the size of a WebP's canvas, or of its first frame without a canvas (RFC 9649, 2.5 to 2.7)."""
    kind, body = data[12:16], data[20:30]
    if kind == b"VP8X" and len(body) >= 10:
        yield 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    elif kind == b"VP8L" and len(body) >= 5:
        bits = int.from_bytes(body[1:5], "little")
        yield 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 " and len(body) >= 10:
        width, height = struct.unpack("<HH", body[6:10])
        yield width & 0x3FFF, height & 0x3FFF


def _icon_sizes(data: bytes) -> Iterator[_Pixels]:
    """Yield the sizes of all pictures in an icon by their own headers, which may exceed its directory's."""
    (count,) = struct.unpack_from("<H", data.ljust(6, b"\0"), 4)
    for entry in range(min(count, (len(data) - 6) // 16)):
        (start,) = struct.unpack_from("<I", data, 6 + 16 * entry + 12)
        head = data[start : start + 24].ljust(24, b"\0")
        if head.startswith(_PNG):
            yield struct.unpack(">II", head[16:24])
        else:
            width, height = struct.unpack("<ii", head[4:12])
            yield abs(width), abs(height) // 2  # a bitmap's height counts picture and mask

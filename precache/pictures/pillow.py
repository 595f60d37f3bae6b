"""A picture of any kind but a plain JPEG, by Pillow: upright, 8 bits, grey, RGB or RGBA.

Only the kinds of `precache.pictures.kinds` are opened, none that makes Pillow run another program, and only
after the header has said that the picture is not too large.
"""

import io
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from precache.pictures import depth, kinds
from precache.pictures.large_pictures import LargePictureLock

_ANY_SIZE = 1 << 63
_BAND_PIXELS = 1 << 22  # that are blended at a time
_TIFF_SIZE, _TIFF_TILE = (256, 257), (322, 323)  # ImageWidth, ImageLength; TileWidth, TileLength
_FEW_BITS_OF_GREY = (b"\2\0", b"\4\0")  # bit depth and colour type of a PNG (11.2.1)
_PNG = b"\x89PNG\r\n\x1a\n"
_Pixels = tuple[int, int]  # width and height


def decode(
    data: bytes,
    path: str,
    background: tuple[int, int, int] | None,
    max_pixels: int,
    turn: LargePictureLock | None,
) -> Image.Image:
    """The picture in `data`, of mode L or RGB; transparency on `background`, or kept in RGBA if that is None.

    Args:
        path: its name helps where its bytes do not say what it is; and for a warning.
        turn: to wait for if the picture is large.

    Raises:
        Exception: whatever a decoder raises on damaged bytes.
    """
    with opened(data, path, max_pixels, turn) as image:
        return upright(image, background, path, data)


@contextmanager
def opened(data: bytes, path: str, max_pixels: int, turn: LargePictureLock | None) -> Iterator[Image.Image]:
    """The picture that `data` holds, not decoded yet, if it is not too large; arguments as of `decode`."""
    for size in _sizes_before_opening(data):
        check_pixels(*size, max_pixels)
        if turn is not None:
            turn.wait(size[0] * size[1])
    with undisturbed(max_pixels), _open(data, path) as image:
        for size in _sizes_when_opened(image):
            check_pixels(*size, max_pixels)
            if turn is not None:
                turn.wait(size[0] * size[1])
        if image.format == "PNG" and "transparency" in image.info and data[24:26] in _FEW_BITS_OF_GREY:
            most = (1 << data[24]) - 1  # Pillow scales pixels to 0-255, but not the value that is transparent
            image.info["transparency"] = (image.info["transparency"] & most) * 255 // most
        yield image


def stored_size(image: Image.Image) -> _Pixels:
    """Width and height of an opened picture as its file has them; Pillow's `size` of a TIFF is upright."""
    if image.format == "TIFF":
        tags = image.tag_v2  # type: ignore[attr-defined]  # a TiffImageFile has them
        return tags[_TIFF_SIZE[0]], tags[_TIFF_SIZE[1]]
    return image.size


def _open(data: bytes, path: str) -> Image.Image:
    formats = kinds.openers(data, path)
    try:
        return Image.open(io.BytesIO(data), formats=formats)
    except Image.DecompressionBombError:  # without the size, which the message is to name
        with undisturbed(_ANY_SIZE):
            return Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        if kind := kinds.undecodable_kind(data):
            raise ValueError(kinds.no_decoder(kind)) from None
        if kind := kinds.drawing(data):
            raise ValueError(f"{kind}: {kinds.DRAWING}") from None
        raise ValueError("not a known image format") from None


def upright(
    image: Image.Image, background: tuple[int, int, int] | None, path: str, data: bytes = b""
) -> Image.Image:
    """Pillow's picture turned upright, as of `decode`; `data` is what it was decoded from, if known."""
    image.load()
    turned = image
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        turned = ImageOps.exif_transpose(image)
    if turned.mode in ("I", "F") or turned.mode.startswith("I;16"):
        grey = Image.fromarray(depth.grey_to_8_bits(turned, image, data, path))
        shown = depth.shown_pixels(turned)
        if shown is None:
            return grey
        opacity = Image.fromarray(shown.astype(np.uint8) * 255)
        return _without_transparency(Image.merge("LA", (grey, opacity)), background)
    if depth.is_deep_colour(image, data):
        depth.warn_if_dark(depth.brightest_colour(image), path, "scale them")
    return _without_transparency(turned, background)


def _without_transparency(image: Image.Image, background: tuple[int, int, int] | None) -> Image.Image:
    """In L or RGB, or in RGBA if there is no background; blended a few rows at a time, which saves memory."""
    if not ("A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info):
        mode = "L" if image.mode in ("1", "L") else "RGB"
        return image if image.mode == mode else image.convert(mode)
    if background is None:
        return image.convert("RGBA")
    width, height = image.size
    rows = max(1, _BAND_PIXELS // width)
    result = Image.new("RGB", image.size)
    below = Image.new("RGBA", (width, min(rows, height)), (*background, 255))
    for top in range(0, height, rows):
        box = (0, top, width, min(top + rows, height))
        rgba = image.crop(box).convert("RGBA")
        backdrop = below if rgba.height == below.height else below.crop((0, 0, width, rgba.height))
        result.paste(Image.alpha_composite(backdrop, rgba).convert("RGB"), box)
    return result


class _Undisturbed:
    """Pillow without its warnings, and without its own limit of pixels where ours is higher.

    Both are settings of the whole process: the first of its threads to enter changes them, the last one
    to leave restores them. Pictures that another thread opens meanwhile are checked by the higher limit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0

    @contextmanager
    def __call__(self, max_pixels: int) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._warnings = warnings.catch_warnings()
                self._warnings.__enter__()
                warnings.simplefilter("ignore")
                self._limit = Image.MAX_IMAGE_PIXELS
            self._inside += 1
            limit = Image.MAX_IMAGE_PIXELS
            if limit is not None and max_pixels > 2 * limit:  # what Pillow refuses
                Image.MAX_IMAGE_PIXELS = max_pixels
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._warnings.__exit__(None, None, None)
                    Image.MAX_IMAGE_PIXELS = self._limit


undisturbed = _Undisturbed()


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Raise ValueError if a picture of `width` x `height` is too large."""
    if width * height > max_pixels:
        raise TooLargeError(
            f"is too large ({width:,}x{height:,} is {width * height:,} pixels, --max-pixels allows "
            f"{max_pixels:,})"
        )


class TooLargeError(ValueError):
    """A picture has more pixels than are allowed; `str(error)` says how many."""


def _sizes_before_opening(data: bytes) -> Iterator[_Pixels]:
    """Sizes in pixels of what Pillow allocates, or decodes, when it only opens a picture."""
    if kinds.content_kind(data[: kinds.PREFIX_BYTES]) == "WEBP":
        yield from _webp_sizes(data)
    elif data.startswith(b"\0\0\1\0"):
        yield from _icon_sizes(data)


def _sizes_when_opened(image: Image.Image) -> Iterator[_Pixels]:
    """Sizes in pixels of what Pillow allocates when an opened picture is decoded."""
    yield image.size
    tags = getattr(image, "tag_v2", None)
    if image.format == "TIFF" and tags is not None:
        width, height = (tags.get(tag) for tag in _TIFF_TILE)
        if isinstance(width, int) and isinstance(height, int):
            yield width, height  # a tile is decoded whole, also where it is larger than its picture


def _webp_sizes(data: bytes) -> Iterator[_Pixels]:
    """Sizes of the canvas, or of the first frame where there is none (RFC 9649, 2.5 to 2.7)."""
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
    """Of all pictures in an icon: its directory has room for 256 pixels a side, they may have more."""
    (count,) = struct.unpack_from("<H", data.ljust(6, b"\0"), 4)
    for entry in range(min(count, (len(data) - 6) // 16)):
        (start,) = struct.unpack_from("<I", data, 6 + 16 * entry + 12)
        head = data[start : start + 24].ljust(24, b"\0")
        if head.startswith(_PNG):
            yield struct.unpack(">II", head[16:24])
        else:
            width, height = struct.unpack("<ii", head[4:12])
            yield abs(width), abs(height) // 2  # of the picture and of its mask

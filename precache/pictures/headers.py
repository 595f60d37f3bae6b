"""How many pixels a picture has, as its header says: asked before anything is decoded."""

import struct
from collections.abc import Iterator

from PIL import Image

from precache.pictures.kinds import PREFIX_BYTES, content_kind

Size = tuple[int, int]
_TIFF_TILE = (322, 323)  # TileWidth, TileLength
_PNG = b"\x89PNG\r\n\x1a\n"


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Raise ValueError if a picture of `width` x `height` is too large."""
    if width * height > max_pixels:
        raise TooLargeError(
            f"is too large ({width:,}x{height:,} is {width * height:,} pixels, --max-pixels allows "
            f"{max_pixels:,})"
        )


class TooLargeError(ValueError):
    """A picture has more pixels than are allowed; `str(error)` says how many."""


def sizes_before_opening(data: bytes) -> Iterator[Size]:
    """Sizes in pixels of what Pillow makes room for, or decodes, when it only opens a picture."""
    if content_kind(data[:PREFIX_BYTES]) == "WEBP":
        yield from _webp_sizes(data)
    elif data.startswith(b"\0\0\1\0"):
        yield from _icon_sizes(data)


def sizes_when_opened(image: Image.Image) -> Iterator[Size]:
    """Sizes in pixels of what is made room for when an opened picture is decoded."""
    yield image.size
    tags = getattr(image, "tag_v2", None)
    if image.format == "TIFF" and tags is not None:
        width, height = (tags.get(tag) for tag in _TIFF_TILE)
        if isinstance(width, int) and isinstance(height, int):
            yield width, height  # a tile is decoded whole, also where it is larger than its picture


def _webp_sizes(data: bytes) -> Iterator[Size]:
    """Of the canvas, or of the first frame where there is none (RFC 9649, 2.5 to 2.7)."""
    kind, body = data[12:16], data[20:30]
    if kind == b"VP8X" and len(body) >= 10:
        yield 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    elif kind == b"VP8L" and len(body) >= 5:
        bits = int.from_bytes(body[1:5], "little")
        yield 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 " and len(body) >= 10:
        width, height = struct.unpack("<HH", body[6:10])
        yield width & 0x3FFF, height & 0x3FFF


def _icon_sizes(data: bytes) -> Iterator[Size]:
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

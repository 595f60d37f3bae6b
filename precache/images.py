"""Decode and resize one picture: the hot path, and what every other path is measured against.

The pixels are those of Pillow's decode, EXIF orientation applied, converted to RGB, then
torchvision's antialiased bilinear `Resize(size)` and `CenterCrop(size)`. Plain JPEGs are decoded by
simplejpeg, which drives the same libjpeg-turbo with the same settings and gives the same pixels in
less than half the time; everything else goes through Pillow.
"""

import io
import warnings
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError

from precache import jpeg
from precache.codecs import pillow_is_simd
from precache.errors import ImageError
from precache.jpeg import Pixels

Color: TypeAlias = tuple[int, int, int]
WHITE: Color = (255, 255, 255)

MAX_SIZE = 8192
"""The largest side in pixels that pictures are resized to."""

RESAMPLING = {
    "area": Image.Resampling.BOX,
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
}
FITS = ("crop", "pad", "stretch")

_SIDEWAYS = (5, 6, 7, 8)
# Pillow-SIMD works on four bytes at a time; a wrapped RGBX saves it the copy into its own layout.
_COLOUR_MODE = "RGBX" if pillow_is_simd() else "RGB"
# A scaled decode must leave this many times the pixels needed, a side: see README, Pixels.
SCALED_MARGIN = 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """How a picture becomes a square of pixels; the settings are those of `precache.Recipe`.

    Attributes:
        size: side of the square in pixels.
        fit: one of FITS.
        resample: one of RESAMPLING.
        background: RGB that transparency is composited on.
        allow_truncated: decode what there is of a damaged JPEG; the rest becomes grey.
        scaled_decode: let libjpeg decode large JPEGs at 1/2, 1/4 or 1/8 of their size.
    """

    size: int
    fit: str = "crop"
    resample: str = "bilinear"
    background: Color = WHITE
    allow_truncated: bool = False
    scaled_decode: bool = False


@dataclass(frozen=True, slots=True)
class Decoded:
    """An upright picture of `width` x `height` pixels, of which `content` has every `reduction`-th.

    Attributes:
        content: a Pillow image of mode L, RGB or RGBX, or uint8 [height, width, 1, 3 or 4] as such.
    """

    content: Image.Image | Pixels
    width: int
    height: int
    reduction: int = 1

    @property
    def image(self) -> Image.Image:
        """The content for Pillow, into whose own layout RGB is copied."""
        return _wrap(self.content) if isinstance(self.content, np.ndarray) else self.content


def load(path: str, size: int) -> Pixels:
    """Read, decode and fit the picture at `path`: uint8 [size, size, 3], RGB.

    Raises:
        ImageError: the file cannot be read or decoded; names `path` and the reason.
    """
    return render(read_bytes(path), path, Rendering(size=size))[0]


def render(data: bytes, path: str, how: Rendering) -> tuple[Pixels, tuple[int, int]]:
    """Decode and fit: (uint8 [size, size, 3], RGB; width and height of the upright picture).

    Raises:
        ImageError: as `decode_for`.
    """
    decoded = decode_for(data, path, how)
    return fit(decoded, how), (decoded.width, decoded.height)


def read_bytes(path: str) -> bytes:
    """The content of the picture at `path`, or an ImageError that names it."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError as error:
        raise ImageError(path, f"cannot be read ({error.strerror})") from error


def decode(data: bytes, path: str) -> Image.Image:
    """As `decode_for`, to a Pillow image of mode RGB in full size, transparency on white."""
    return decode_for(data, path, Rendering(size=1)).image.convert("RGB")


def decode_for(data: bytes, path: str, how: Rendering) -> Decoded:
    """Decode the bytes of a picture, as far as `how` needs it; `path` is for messages.

    The first frame of an animation; 16-bit greyscale keeps its upper 8 bits.

    Raises:
        ImageError: not a picture, damaged, truncated, or so large that Pillow suspects a bomb.
    """
    if not data:
        raise ImageError(path, "cannot be decoded (the file is empty)")
    try:
        decoded = _decode_jpeg(data, how) if data.startswith(jpeg.START) else None
        return decoded or _decode_any(data, how)
    except Exception as error:  # decoders raise nearly anything on damaged bytes
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = "not a known image format"
        raise ImageError(path, f"cannot be decoded ({reason})") from error


def fit(decoded: Decoded, how: Rendering) -> Pixels:
    """Make a square of a decoded picture: uint8 [size, size, 3], RGB."""
    if how.fit == "pad":
        return _pad(decoded, how)
    box = (0.0, 0.0, float(decoded.width), float(decoded.height))
    if how.fit == "crop":
        box = crop_box(decoded.width, decoded.height, how.size)
    return _resize(decoded, (how.size, how.size), box, how.resample)


def reference(image: Image.Image, size: int) -> Pixels:
    """torchvision's `Resize(size)` and `CenterCrop(size)` of a Pillow image: resize all, then crop."""
    width, height = resized_size(*image.size, size)
    left, top = centre_offset(width, size), centre_offset(height, size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + size, top + size)))


def crop_box(width: int, height: int, size: int) -> tuple[float, float, float, float]:
    """The part of a picture that `fit="crop"` keeps: left, top, right, bottom in source pixels.

    Sizes and offsets round as in torchvision 0.29 (`_compute_resized_output_size`, `center_crop`).
    """
    resized_width, resized_height = resized_size(width, height, size)
    left, top = centre_offset(resized_width, size), centre_offset(resized_height, size)
    x_scale, y_scale = width / resized_width, height / resized_height
    return left * x_scale, top * y_scale, (left + size) * x_scale, (top + size) * y_scale


def resized_size(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height once the shorter side is `size`."""
    if width <= height:
        return size, int(size * height / width)
    return int(size * width / height), size


def centre_offset(side: int, size: int) -> int:
    """Where a centred crop of `size` starts in a side of `side` pixels, as torchvision rounds it."""
    return round((side - size) / 2)


def _resize(
    decoded: Decoded, size: tuple[int, int], box: tuple[float, float, float, float], resample: str
) -> Pixels:
    """The part `box` of the picture, resized to `size`.

    Only what is kept is resized: less work, and a 1 x 30,000 picture needs no more memory than any
    other. Pillow rounds the box to float32, which moves a value by 1 at most.
    """
    image, (left, top, right, bottom) = decoded.image, (side / decoded.reduction for side in box)
    if (right - left, bottom - top) == size:
        return _pixels(image.crop((round(left), round(top), round(right), round(bottom))))
    return _pixels(image.resize(size, RESAMPLING[resample], (left, top, right, bottom)))


def _pad(decoded: Decoded, how: Rendering) -> Pixels:
    """The whole picture, as large as it fits, centred on black."""
    longer = max(decoded.width, decoded.height)
    width, height = (max(1, round(side * how.size / longer)) for side in (decoded.width, decoded.height))
    square = np.zeros((how.size, how.size, 3), np.uint8)
    left, top = centre_offset(how.size, width), centre_offset(how.size, height)
    box = (0.0, 0.0, float(decoded.width), float(decoded.height))
    square[top : top + height, left : left + width] = _resize(decoded, (width, height), box, how.resample)
    return square


def _pixels(image: Image.Image) -> Pixels:
    if image.mode == "RGBX":
        packed = np.frombuffer(image.tobytes("raw", "RGB"), np.uint8)
        return packed.reshape(image.height, image.width, 3)
    return np.asarray(image.convert("RGB") if image.mode == "L" else image)


def _decode_jpeg(data: bytes, how: Rendering) -> Decoded | None:
    """A grey or colour JPEG by simplejpeg; None for what it cannot decode and Pillow perhaps can."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):  # the latter for a header that breaks off
        return None
    limit = Image.MAX_IMAGE_PIXELS
    if colorspace in ("CMYK", "YCCK") or (limit is not None and width * height > 2 * limit):
        return None
    orientation = jpeg.orientation(data)
    reduction = _reduction(width, height, orientation, how)
    mode = "GRAY" if colorspace == "Gray" else _COLOUR_MODE
    pixels = jpeg.decode_strictly(data, mode, reduction, allow_truncated=how.allow_truncated)
    if pixels is None:
        return None
    if orientation == 1:
        return Decoded(pixels, width, height, reduction)
    turned = _wrap(pixels)
    turned.getexif()[jpeg.EXIF_ORIENTATION] = orientation
    if orientation in _SIDEWAYS:
        width, height = height, width
    return Decoded(ImageOps.exif_transpose(turned), width, height, reduction)


def _reduction(width: int, height: int, orientation: int, how: Rendering) -> int:
    """8, 4, 2 or 1: by how much libjpeg may reduce the picture while it decodes it."""
    if not how.scaled_decode:
        return 1
    needed = SCALED_MARGIN * how.size
    kept = max(width, height) if how.fit == "pad" else min(width, height)
    for factor in (8, 4, 2):
        # The last row and column of a reduced picture may stand for less than the others; turned,
        # they would be the first ones.
        whole = orientation == 1 or (width % factor == 0 and height % factor == 0)
        if whole and kept / factor >= needed:
            return factor
    return 1


def _wrap(pixels: Pixels) -> Image.Image:
    """A Pillow image of decoded pixels; L and RGBX are Pillow's own layout and are not copied."""
    height, width, channels = pixels.shape
    if channels == 3:
        return Image.fromarray(pixels)
    mode = "L" if channels == 1 else "RGBX"
    return Image.frombuffer(mode, (width, height), pixels, "raw", mode, 0, 1)


def _decode_any(data: bytes, how: Rendering) -> Decoded:
    """Whatever Pillow opens."""
    with warnings.catch_warnings():
        # Pillow warns of pictures over 89 million pixels and refuses those twice as large.
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data)) as image:
            upright = _to_rgb(ImageOps.exif_transpose(image), how.background)
            return Decoded(upright, *upright.size)


def _to_rgb(image: Image.Image, background: Color) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _deep_grey_to_rgb(image)
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        below = Image.new("RGBA", rgba.size, (*background, 255))
        return Image.alpha_composite(below, rgba).convert("RGB")
    return image.convert("RGB")


def _deep_grey_to_rgb(image: Image.Image) -> Image.Image:
    grey = np.asarray(image)
    if image.mode == "F" or grey.min() < 0 or grey.max() > 0xFFFF:
        raise ValueError(f"mode {image.mode} has no defined range of 0 to 65,535")
    return Image.fromarray((grey >> 8).astype(np.uint8)).convert("RGB")

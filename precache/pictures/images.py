"""Decode and resize one picture: the hot path, and what every other path is measured against.

The pixels are those of Pillow's decode, EXIF orientation applied, converted to RGB, grey or RGBA, then of
Pillow's antialiased resize; cropped and bilinear, of torchvision's `Resize(size)` and `CenterCrop(size)`.
Plain JPEGs are decoded by simplejpeg, which drives the same libjpeg-turbo with the same settings and gives
the same pixels in less than half the time; everything else goes through Pillow.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageOps

from precache.errors import ImageError, SourceError
from precache.pictures import depth, jpeg, pillow
from precache.pictures.jpeg import Pixels
from precache.pictures.kinds import no_decoder, pillow_is_simd
from precache.pictures.pillow import TooLargeError, check_pixels
from precache.pictures.reading import MAX_PIXELS, read_picture
from precache.pictures.sizes import Size, sides
from precache.pictures.large_pictures import LargePictureLock, lacks_memory

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
FITS = ("crop", "keep", "keep-longer", "pad", "stretch")
KEEPING_FITS = ("keep", "keep-longer")
"""Those of FITS that cut nothing away and add nothing: the result is as long as the picture is."""
MAX_KEPT_SIDE = 65_500
"""The largest side in pixels of such a result: more a JPEG cannot have (libjpeg's JPEG_MAX_DIMENSION)."""

MODES = {"grey": "L", "rgb": "RGB", "rgba": "RGBA"}
CHANNELS = {"grey": 1, "rgb": 3, "rgba": 4}
"""How many each setting of `Rendering.channels` stands for."""


_KERNELS = {**RESAMPLING, "nearest": Image.Resampling.NEAREST}  # of masks, see `precache.pictures.masks`
_EMPTY = "the file is empty"
# as Pillow says that it was compiled without a library
_MISSING_CODEC = re.compile(r"decoder (\w+) not available")
_KIND_OF_CODEC = {"jpeg2k": "JPEG2000", "libtiff": "compressed TIFF"}
_SIDEWAYS = (5, 6, 7, 8)
# Pillow-SIMD works on four bytes at a time; a wrapped RGBX saves it the copy into its own layout.
_COLOUR_MODE = "RGBX" if pillow_is_simd() else "RGB"
# A scaled decode must leave this many times the pixels needed, a side: see README, Pixels.
SCALED_MARGIN = 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """How a picture becomes what is stored of it; the settings are those of `precache.Recipe`.

    Attributes:
        size: of the result in pixels; with a `fit` of KEEPING_FITS, of its shorter or longer side at most.
        fit: one of FITS.
        enlarge: with a `fit` of KEEPING_FITS, that side of a smaller picture becomes as long, too.
        resample: one of RESAMPLING.
        background: RGB that transparency is composited on; not where it is kept.
        channels: one of CHANNELS.
        dtype: `uint8`; or `uint16`, of grey.
        allow_truncated: decode what there is of a damaged JPEG; the rest becomes grey.
        scaled_decode: let libjpeg decode large JPEGs at 1/2, 1/4 or 1/8 of their size.
        max_pixels: a picture of more is refused before it is decoded.
    """

    size: Size
    fit: str = "crop"
    enlarge: bool = False
    resample: str = "bilinear"
    background: Color = WHITE
    channels: str = "rgb"
    dtype: str = "uint8"
    allow_truncated: bool = False
    scaled_decode: bool = False
    max_pixels: int = MAX_PIXELS

    @property
    def is_deep(self) -> bool:
        """Whether 16 bits are kept, see `precache.pictures.depth`."""
        return self.dtype == "uint16"


@dataclass(frozen=True, slots=True)
class Decoded:
    """An upright picture of `width` x `height` pixels, of which `content` has every `reduction`-th.

    Attributes:
        content: a Pillow image of mode L, RGB, RGBX or RGBA, or uint8 [height, width, 1, 3 or 4] as one of
            the first three; or of `precache.pictures.depth`, uint16 [height, width, 1].
        plain: whether any decoder makes it of the same JPEG, as it is: it may be copied.
    """

    content: Image.Image | Pixels | depth.Grey16
    width: int
    height: int
    reduction: int = 1
    plain: bool = False

    @property
    def image(self) -> Image.Image:
        """The content for Pillow, into whose own layout RGB is copied."""
        return _wrap(self.content) if isinstance(self.content, np.ndarray) else self.content


def render(data: bytes | Image.Image, path: str, how: Rendering) -> tuple[Pixels, tuple[int, int]]:
    """As `render_or_copy`, without the last value."""
    return render_or_copy(data, path, how)[:2]


def render_or_copy(
    data: bytes | Image.Image, path: str, how: Rendering
) -> tuple[Pixels, tuple[int, int], bool]:
    """Decode and fit: (uint8 [height, width, channels]; width and height of the upright picture; may copy).

    The last: `data` is a JPEG of these very pixels, for any decoder. All workers of a run together render
    large pictures one at a time, see `precache.pictures.large_pictures`.

    Raises:
        ImageError, SourceError: as `decode_for`.
    """
    with LargePictureLock() as turn:
        decoded = decode_for(data, path, how, turn)
        width, height = fitted_size(decoded.width, decoded.height, how)
        if is_too_large(width, height, how):
            raise ImageError(path, _too_long(decoded, width, height))
        turn.wait(width * height)
        size = decoded.width, decoded.height
        return fit(decoded, how), size, decoded.plain and size == (width, height)


def read_bytes(path: str, max_pixels: int = MAX_PIXELS) -> bytes:
    """The content of the picture at `path`.

    Raises:
        ImageError: the file is larger than a picture of `max_pixels` can be; names `path`.
        SourceError: it cannot be read.
    """
    return read_picture(path, max_pixels)


def decode(data: bytes, path: str) -> Image.Image:
    """As `decode_for`, to a Pillow image of mode RGB in full size, transparency on white."""
    return decode_for(data, path, Rendering(size=1)).image.convert("RGB")


def decode_pixels(data: bytes, path: str) -> Pixels:
    """As `decode`, to uint8 [height, width, 3], a copy of its own."""
    content = decode_for(data, path, Rendering(size=1), jpeg_mode="RGB").content
    return content if isinstance(content, np.ndarray) else np.array(content.convert("RGB"))


def upright_shape(data: bytes, path: str) -> tuple[int, int]:
    """Height and width of what `decode` makes of a picture, by its header.

    Raises:
        ImageError: as `decode_for`, of what the header alone says.
    """
    with _named(path):
        if not data:
            raise ValueError(_EMPTY)
        if data.startswith(jpeg.START):
            try:
                height, width, *_ = simplejpeg.decode_jpeg_header(data, strict=False)
            except (ValueError, KeyError):  # then Pillow perhaps can
                pass
            else:
                check_pixels(width, height, MAX_PIXELS)
                return (width, height) if jpeg.orientation(data) in _SIDEWAYS else (height, width)
        with pillow.opened(data, path, MAX_PIXELS, None) as image:
            if image.format == "ICO":  # whose directory says what its pictures may not be
                image.load()
            width, height = pillow.stored_size(image)
            sideways = image.getexif().get(ExifTags.Base.Orientation, 1) in _SIDEWAYS
            return (width, height) if sideways else (height, width)


def decode_for(
    data: bytes | Image.Image,
    path: str,
    how: Rendering,
    turn: LargePictureLock | None = None,
    jpeg_mode: str | None = None,
) -> Decoded:
    """Decode the bytes of a picture, as far as `how` needs it; `path` is for messages.

    The first frame of an animation; 16-bit greyscale keeps its upper 8 bits, unless it says that fewer
    are used. `turn`, if given, is waited for before a large picture is decoded. One that is decoded already
    is turned upright and converted. A JPEG becomes `jpeg_mode`, if that is given.

    Raises:
        ImageError: not a picture, damaged, truncated, or of more than `how.max_pixels`.
        SourceError: there was not enough memory to decode it, which is not a fault of the picture.
    """
    with _named(path, how.max_pixels):
        if not data:
            raise ValueError(_EMPTY)
        if how.is_deep:
            deep = _decode_deep(data, path, how.max_pixels, turn)
            return Decoded(deep, deep.shape[1], deep.shape[0])
        if isinstance(data, Image.Image):
            check_pixels(*data.size, how.max_pixels)
            upright = pillow.upright(data, _backdrop(how), path)
            return Decoded(upright, *upright.size)
        decoded = _decode_jpeg(data, how, turn, jpeg_mode) if data.startswith(jpeg.START) else None
        return decoded or _decode_any(data, path, how, turn)


@contextmanager
def _named(path: str, max_pixels: int = MAX_PIXELS) -> Iterator[None]:
    """Make an ImageError that names `path` of whatever decoders raise: nearly anything on damaged bytes."""
    try:
        yield
    except TooLargeError as error:
        raise ImageError(path, str(error)) from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if lacks_memory(error, max_pixels):
            raise SourceError(
                f"{path}: not enough memory to decode it ({reason}); use fewer --workers, free some "
                f"memory, or leave it out with a smaller --max-pixels"
            ) from error
        if codec := _MISSING_CODEC.fullmatch(reason):
            reason = no_decoder(_KIND_OF_CODEC.get(codec[1], codec[1]))
        raise ImageError(path, f"cannot be decoded ({reason})") from error


def fit(decoded: Decoded, how: Rendering) -> Pixels:
    """Make what is stored of a decoded picture: uint8 [height, width, channels], of `fitted_size`."""
    if how.fit == "pad":
        return _pad(decoded, how)
    box = (0.0, 0.0, float(decoded.width), float(decoded.height))
    if how.fit == "crop":
        box = crop_box(decoded.width, decoded.height, how.size)
    return _resize(decoded, fitted_size(decoded.width, decoded.height, how), box, how)


def fitted_size(width: int, height: int, how: Rendering) -> tuple[int, int]:
    """Width and height of what `fit` makes of a picture of `width` x `height` pixels."""
    rows, columns = sides(how.size)
    if how.fit not in KEEPING_FITS:
        return columns, rows
    side, resized = (min, resized_size) if how.fit == "keep" else (max, inner_size)
    keeps_size = not how.enlarge and side(width, height) <= rows
    return (width, height) if keeps_size else resized(width, height, how.size)


def is_too_large(width: int, height: int, how: Rendering) -> bool:
    """Whether so large a result is refused: more than a JPEG can hold, or than is decoded."""
    return max(width, height) > MAX_KEPT_SIDE or width * height > max(how.max_pixels, MAX_SIZE**2)


def reference(
    image: Image.Image, size: Size, fit: str = "crop", resample: str = "bilinear", *, enlarge: bool = False
) -> Pixels:
    """A Pillow image resized whole, then, if `fit` is "crop", its centre; by default as torchvision does."""
    if fit != "crop":
        whole = fitted_size(*image.size, Rendering(size=size, fit=fit, enlarge=enlarge))
        return _pixels(image.resize(whole, RESAMPLING[resample]), image.mode)
    width, height = resized_size(*image.size, size)
    resized = image.resize((width, height), RESAMPLING[resample])
    rows, columns = sides(size)
    left, top = centre_offset(width, columns), centre_offset(height, rows)
    return _pixels(resized.crop((left, top, left + columns, top + rows)), image.mode)


def crop_box(width: int, height: int, size: Size) -> tuple[float, float, float, float]:
    """The part of a picture that `fit="crop"` keeps: left, top, right, bottom in source pixels.

    Sizes and offsets round as in torchvision 0.29 (`_compute_resized_output_size`, `center_crop`).
    """
    rows, columns = sides(size)
    resized_width, resized_height = resized_size(width, height, size)
    left, top = centre_offset(resized_width, columns), centre_offset(resized_height, rows)
    x_scale, y_scale = width / resized_width, height / resized_height
    return left * x_scale, top * y_scale, (left + columns) * x_scale, (top + rows) * y_scale


def resized_size(width: int, height: int, size: Size) -> tuple[int, int]:
    """Width and height once the picture just covers `size`: a square, once its shorter side is as long."""
    rows, columns = sides(size)
    if columns * height >= rows * width:
        return columns, int(columns * height / width)
    return int(rows * width / height), rows


def inner_size(width: int, height: int, size: Size) -> tuple[int, int]:
    """Width and height once the picture just fits into `size`: a square, once its longer side is as long."""
    rows, columns = sides(size)
    wanted, given = (rows, height) if columns * height >= rows * width else (columns, width)
    return max(1, round(width * wanted / given)), max(1, round(height * wanted / given))


def centre_offset(side: int, size: int) -> int:
    """Where a centred crop of `size` starts in a side of `side` pixels, as torchvision rounds it."""
    return round((side - size) / 2)


def _resize(
    decoded: Decoded, size: tuple[int, int], box: tuple[float, float, float, float], how: Rendering
) -> Pixels:
    """The part `box` of the picture, resized to `size`.

    Only what is kept is resized: less work, and a 1 x 30,000 picture needs no more memory than any
    other. Pillow rounds the box to float32, which moves a value by 1 at most; colours of RGBA it weighs with
    their alpha.
    """
    if how.is_deep:
        return depth.resize(np.asarray(decoded.content), size, box, RESAMPLING[how.resample])
    image, (left, top, right, bottom) = decoded.image, (side / decoded.reduction for side in box)
    mode = MODES[how.channels]
    if mode not in ("RGB", image.mode):
        image = image.convert(mode)
    if (right - left, bottom - top) == size:
        return _pixels(image.crop((round(left), round(top), round(right), round(bottom))), mode)
    return _pixels(image.resize(size, _KERNELS[how.resample], (left, top, right, bottom)), mode)


def _pad(decoded: Decoded, how: Rendering) -> Pixels:
    """The whole picture, as large as it fits, centred on black, which is transparent in RGBA."""
    rows, columns = sides(how.size)
    width, height = inner_size(decoded.width, decoded.height, how.size)
    padded = np.zeros((rows, columns, CHANNELS[how.channels]), how.dtype)
    left, top = centre_offset(columns, width), centre_offset(rows, height)
    box = (0.0, 0.0, float(decoded.width), float(decoded.height))
    padded[top : top + height, left : left + width] = _resize(decoded, (width, height), box, how)
    return padded


def _too_long(decoded: Decoded, width: int, height: int) -> str:
    return (
        f"of {decoded.width:,} x {decoded.height:,} pixels would be kept as {width:,} x {height:,}, which is "
        f"too large; leave it out, or choose another --fit or a smaller --size"
    )


def _pixels(image: Image.Image, mode: str) -> Pixels:
    """uint8 [height, width, channels] of an image that is to be of `mode`."""
    if image.mode == "RGBX":
        packed = np.frombuffer(image.tobytes("raw", "RGB"), np.uint8)
        return packed.reshape(image.height, image.width, 3)
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _backdrop(how: Rendering) -> Color | None:
    return None if how.channels == "rgba" else how.background


def _decode_jpeg(data: bytes, how: Rendering, turn: LargePictureLock | None, mode: str | None) -> Decoded | None:
    """A grey or colour JPEG by simplejpeg; None for what it cannot decode and Pillow perhaps can."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):  # the latter for a header that breaks off
        return None
    check_pixels(width, height, how.max_pixels)
    if colorspace in ("CMYK", "YCCK"):
        return None
    orientation = jpeg.orientation(data)
    reduction = _reduction(width, height, orientation, how)
    if turn is not None:
        turn.wait(width * height // reduction**2)
    mode = mode or ("GRAY" if colorspace == "Gray" else _COLOUR_MODE)
    plain = colorspace in (("Gray",) if how.channels == "grey" else ("Gray", "YCbCr")) and jpeg.is_plain(data)
    try:
        pixels = jpeg.decode_strictly(data, mode, reduction)
    except ValueError:
        if not how.allow_truncated:
            raise
        pixels, plain = jpeg.decode_leniently(data, mode, reduction), False
    if pixels is None:
        return None
    if orientation == 1:
        return Decoded(pixels, width, height, reduction, plain)
    turned = _wrap(pixels)
    turned.getexif()[ExifTags.Base.Orientation] = orientation
    if orientation in _SIDEWAYS:
        width, height = height, width
    return Decoded(ImageOps.exif_transpose(turned), width, height, reduction)


def _reduction(width: int, height: int, orientation: int, how: Rendering) -> int:
    """8, 4, 2 or 1: by how much libjpeg may reduce the picture while it decodes it."""
    if not how.scaled_decode:
        return 1
    rows, columns = (SCALED_MARGIN * side for side in sides(how.size))
    if orientation in _SIDEWAYS:
        rows, columns = columns, rows
    enough = any if how.fit in ("pad", "keep-longer") else all
    for factor in (8, 4, 2):
        # The last row and column of a reduced picture may stand for less than the others; turned,
        # they would be the first ones.
        whole = orientation == 1 or (width % factor == 0 and height % factor == 0)
        if whole and enough((width / factor >= columns, height / factor >= rows)):
            return factor
    return 1


def _wrap(pixels: Pixels) -> Image.Image:
    """A Pillow image of decoded pixels; L and RGBX are Pillow's own layout and are not copied."""
    height, width, channels = pixels.shape
    if channels == 3:
        return Image.fromarray(pixels)
    mode = "L" if channels == 1 else "RGBX"
    return Image.frombuffer(mode, (width, height), pixels, "raw", mode, 0, 1)


def _decode_any(data: bytes, path: str, how: Rendering, turn: LargePictureLock | None) -> Decoded:
    """Whatever Pillow opens."""
    upright = pillow.decode(data, path, _backdrop(how), how.max_pixels, turn)
    return Decoded(upright, *upright.size)


def _decode_deep(data: bytes | Image.Image, path: str, max_pixels: int, turn: LargePictureLock | None) -> depth.Grey16:
    """The grey of 16 bits of whatever Pillow opens."""
    if isinstance(data, Image.Image):
        check_pixels(*data.size, max_pixels)
        return _deep_grey(data, path)
    with pillow.opened(data, path, max_pixels, turn) as image:
        return _deep_grey(image, path)


def _deep_grey(image: Image.Image, path: str) -> depth.Grey16:
    image.load()
    deep = depth.grey_of_16_bits(image)
    return depth.grey_from_8_bits(pillow.upright(image, WHITE, path).convert("L")) if deep is None else deep

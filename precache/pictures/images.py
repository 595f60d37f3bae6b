"""Decoding and resizing of one picture: the hot path, and the reference for every other path.

The pixels are those that Pillow decodes, with EXIF orientation applied, converted to RGB or grey, and
resized by Pillow with antialiasing. With fit `crop` and bilinear resampling they are those of torchvision's
`Resize(size)` and `CenterCrop(size)`. Plain JPEGs are decoded by simplejpeg, which drives the same
libjpeg-turbo with the same settings and gives the same pixels in less than half the time; all other pictures
go through Pillow.
"""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import simplejpeg
from PIL import ExifTags
from PIL import Image as PillowImage

from precache.errors import ImageError, SettingError, SourceError, check_range
from precache.pictures import jpeg, pillow
from precache.pictures.jpeg import Pixels
from precache.pictures.kinds import no_decoder_reason, pillow_is_simd
from precache.pictures.large_pictures import LARGE_PIXELS, lacks_memory, large_picture_lock
from precache.pictures.own_pillow import Image, ImageOps
from precache.pictures.pillow import TooLargeError
from precache.pictures.reading import MAX_PIXELS, read_picture

Color: TypeAlias = tuple[int, int, int]
Size: TypeAlias = int | tuple[int, int]
"""Size in pixels: the side of a square, or (height, width) of a rectangle that is no square."""
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
"""Values of FITS that keep the whole picture and its aspect ratio, so that the results differ in size."""
MAX_KEPT_SIDE = 65_500
"""Largest side of such a result in pixels: the maximum of a JPEG (libjpeg's JPEG_MAX_DIMENSION)."""

MODES = {"grey": "L", "rgb": "RGB"}
"""Pillow's mode for each value of `Rendering.channels`."""
CHANNELS = {"grey": 1, "rgb": 3}
"""Number of channels for each value of `Rendering.channels`."""

_EMPTY = "the file is empty"
_SIZE_TEXT = re.compile(r"([0-9]+)(?:x([0-9]+))?", re.ASCII)
# Pillow's message where it was compiled without a library
_MISSING_CODEC = re.compile(r"decoder (\w+) not available")
_KIND_OF_CODEC = {"jpeg2k": "JPEG2000", "libtiff": "compressed TIFF"}
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap width and height
# Pillow-SIMD works on four bytes at a time; wrapping RGBX saves a copy into its own layout.
_COLOUR_MODE = "RGBX" if pillow_is_simd() else "RGB"
# A scaled decode must leave each side this many times as long as the result: see README, Pixels.
SCALED_MARGIN = 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """Settings of decoding and resizing, which are those of `precache.Recipe`.

    Attributes:
        size: size of the result in pixels; with a `fit` of KEEPING_FITS, the greatest length of its shorter
            side (`keep`) or of its longer side (`keep-longer`).
        fit: one of FITS.
        enlarge: with a `fit` of KEEPING_FITS, enlarge smaller pictures until that side has this length, too.
        resample: one of RESAMPLING.
        background: RGB that transparent pixels are composited on.
        channels: one of CHANNELS.
        allow_truncated: decode what there is of a damaged JPEG; the rest becomes grey.
        scaled_decode: let libjpeg decode large JPEGs at 1/2, 1/4 or 1/8 of their size.
        max_pixels: refuse a picture of more pixels before it is decoded.
    """

    size: Size
    fit: str = "crop"
    enlarge: bool = False
    resample: str = "bilinear"
    background: Color = WHITE
    channels: str = "rgb"
    allow_truncated: bool = False
    scaled_decode: bool = False
    max_pixels: int = MAX_PIXELS


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decoded and upright picture.

    Attributes:
        content: Pillow image of mode L, RGB or RGBX; or uint8 [height, width, channels] in the order of
            these.
        width, height: size of the picture in pixels before the reduction.
        reduction: factor, 1, 2, 4 or 8, by which each side of `content` is shorter.
        plain: whether the source is a JPEG of which every decoder makes these pixels, so it may be copied.
    """

    content: Image.Image | Pixels
    width: int
    height: int
    reduction: int = 1
    plain: bool = False

    @property
    def image(self) -> Image.Image:
        """Content as a Pillow image; RGB pixels are copied, because Pillow's layout has a fourth byte."""
        return _wrap(self.content) if isinstance(self.content, np.ndarray) else self.content


def render(
    data: bytes | PillowImage.Image, path: str, rendering: Rendering
) -> tuple[Pixels, tuple[int, int]]:
    """Decode and resize a picture: pixels, and size of the upright picture; see `render_or_copy`."""
    pixels, original_size, _ = render_or_copy(data, path, rendering)
    return pixels, original_size


def render_or_copy(
    data: bytes | PillowImage.Image, path: str, rendering: Rendering
) -> tuple[Pixels, tuple[int, int], bool]:
    """Decode and resize a picture, and find out whether its bytes may be stored as they are.

    The workers of a run render large pictures one at a time, see `precache.pictures.large_pictures`.

    Returns:
        Pixels, uint8 [height, width, channels]; (width, height) of the upright picture; and whether `data` is
        a JPEG of which every decoder makes exactly these pixels.

    Raises:
        ImageError, SourceError: as `decode_for`.
    """
    with ExitStack() as locks:
        decoded = decode_for(data, path, rendering, locks)
        width, height = fitted_size(decoded.width, decoded.height, rendering)
        if is_too_large(width, height, rendering):
            raise ImageError(
                path,
                f"of {decoded.width:,} x {decoded.height:,} pixels would be kept as {width:,} x {height:,}, "
                f"which is too large",
                remedy="leave it out, or choose another --fit or a smaller --size",
            )
        if width * height > LARGE_PIXELS:
            locks.enter_context(large_picture_lock())
        original_size = decoded.width, decoded.height
        may_copy = decoded.plain and original_size == (width, height)
        return fit(decoded, rendering), original_size, may_copy


def read_bytes(path: str, max_pixels: int = MAX_PIXELS) -> bytes:
    """Read the file of the picture at `path`.

    Raises:
        ImageError: the file is larger than a picture of `max_pixels` can be.
        SourceError: it cannot be read.
    """
    return read_picture(path, max_pixels)


def decode(data: bytes | PillowImage.Image, path: str) -> PillowImage.Image:
    """Decode a picture in full size to a Pillow image of mode RGB, on white; see `decode_for`."""
    return PillowImage.fromarray(decode_pixels(data, path))


def decode_pixels(data: bytes | PillowImage.Image, path: str) -> Pixels:
    """Decode a picture in full size to RGB, uint8 [height, width, 3], on white; see `decode_for`."""
    content = decode_for(data, path, Rendering(size=1), jpeg_mode="RGB").content
    return content if isinstance(content, np.ndarray) else np.array(content.convert("RGB"))


def upright_shape(data: bytes, path: str) -> tuple[int, int]:
    """Read height and width of the upright picture from its header.

    Raises:
        ImageError: as `decode_for`, for errors that the header alone shows.
    """
    with _decoder_errors(path):
        if not data:
            raise ValueError(_EMPTY)
        if data.startswith(jpeg.START):
            try:
                height, width, *_ = simplejpeg.decode_jpeg_header(data, strict=False)
            except (ValueError, KeyError):  # Pillow may be able to read it
                pass
            else:
                if width * height > MAX_PIXELS:
                    raise TooLargeError(width, height, MAX_PIXELS)
                return (width, height) if jpeg.orientation(data) in _SIDEWAYS else (height, width)
        with pillow.open_picture(data, path, MAX_PIXELS, None) as image:
            if image.format == "ICO":  # the sizes in an icon's directory may be wrong
                image.load()
            width, height = pillow.stored_size(image)
            sideways = image.getexif().get(ExifTags.Base.Orientation, 1) in _SIDEWAYS
            return (width, height) if sideways else (height, width)


def decode_for(
    data: bytes | PillowImage.Image,
    path: str,
    rendering: Rendering,
    locks: ExitStack | None = None,
    jpeg_mode: str | None = None,
) -> Decoded:
    """Decode a picture and turn it upright, at a reduced scale if `rendering` allows it.

    Of an animation the first frame is decoded. 16-bit greyscale keeps its upper 8 bits, unless the file says
    that fewer bits are used.

    Args:
        data: bytes of the picture; an image that is decoded already is turned upright and converted.
        path: path of the picture, for messages.
        rendering: settings of the result.
        locks: holder of the lock that is acquired before a large picture is decoded; None: none is.
        jpeg_mode: colour space that JPEGs are decoded to, `RGB`, `RGBX` or `GRAY`; None for the fastest.

    Raises:
        ImageError: this is no picture, or it is damaged, truncated, or larger than `rendering.max_pixels`.
        SourceError: there was not enough memory to decode it, which is no fault of the picture.
    """
    with _decoder_errors(path, rendering.max_pixels):
        if not data:
            raise ValueError(_EMPTY)
        if not isinstance(data, bytes):
            if math.prod(data.size) > rendering.max_pixels:
                raise TooLargeError(*data.size, rendering.max_pixels)
            upright = pillow.upright(data, rendering.background, path)
            return Decoded(upright, *upright.size)
        if data.startswith(jpeg.START):
            decoded = _decode_jpeg(data, rendering, locks, jpeg_mode)
            if decoded is not None:
                return decoded
        upright = pillow.decode(data, path, rendering.background, rendering.max_pixels, locks)
        return Decoded(upright, *upright.size)


@contextmanager
def _decoder_errors(path: str, max_pixels: int = MAX_PIXELS) -> Iterator[None]:
    """Turn errors of decoders, which are of nearly any type, into an ImageError that names `path`."""
    try:
        yield
    except TooLargeError as error:
        raise ImageError(path, str(error)) from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if lacks_memory(error, max_pixels):
            raise SourceError(
                f"not enough memory to decode it ({reason})",
                path=path,
                remedy="use fewer --workers, free some memory, or leave it out with a smaller --max-pixels",
            ) from error
        if match := _MISSING_CODEC.fullmatch(reason):
            codec = match[1]
            reason = no_decoder_reason(_KIND_OF_CODEC.get(codec, codec))
        raise ImageError(path, f"cannot be decoded ({reason})") from error


def fit(decoded: Decoded, rendering: Rendering) -> Pixels:
    """Resize a decoded picture to uint8 [height, width, channels] of `fitted_size`."""
    if rendering.fit == "pad":
        return _pad(decoded, rendering)
    box = (0.0, 0.0, float(decoded.width), float(decoded.height))
    if rendering.fit == "crop":
        box = crop_box(decoded.width, decoded.height, rendering.size)
    return _resize(decoded, fitted_size(decoded.width, decoded.height, rendering), box, rendering)


def fitted_size(width: int, height: int, rendering: Rendering) -> tuple[int, int]:
    """Width and height to which `fit` resizes a picture of `width` x `height` pixels."""
    rows, columns = sides(rendering.size)
    if rendering.fit == "keep":
        if not rendering.enlarge and min(width, height) <= rows:
            return width, height
        return resized_size(width, height, rendering.size)
    if rendering.fit == "keep-longer":
        if not rendering.enlarge and max(width, height) <= rows:
            return width, height
        return inner_size(width, height, rendering.size)
    return columns, rows


def is_too_large(width: int, height: int, rendering: Rendering) -> bool:
    """Whether a result of this size is refused, as larger than a JPEG can be or than `rendering` allows."""
    return max(width, height) > MAX_KEPT_SIDE or width * height > max(rendering.max_pixels, MAX_SIZE**2)


def crop_box(width: int, height: int, size: Size) -> tuple[float, float, float, float]:
    """Part of a picture that the fit `crop` keeps: left, top, right, bottom in source pixels.

    Sizes and offsets are rounded as in torchvision 0.29 (`_compute_resized_output_size`, `center_crop`).
    """
    rows, columns = sides(size)
    resized_width, resized_height = resized_size(width, height, size)
    left, top = centre_offset(resized_width, columns), centre_offset(resized_height, rows)
    x_scale, y_scale = width / resized_width, height / resized_height
    return left * x_scale, top * y_scale, (left + columns) * x_scale, (top + rows) * y_scale


def resized_size(width: int, height: int, size: Size) -> tuple[int, int]:
    """Width and height of a picture resized to just cover `size`; a square, by its shorter side."""
    rows, columns = sides(size)
    if columns * height >= rows * width:
        return columns, int(columns * height / width)
    return int(rows * width / height), rows


def inner_size(width: int, height: int, size: Size) -> tuple[int, int]:
    """Width and height of a picture resized to just fit into `size`; a square, by its longer side."""
    rows, columns = sides(size)
    new_side, old_side = (rows, height) if columns * height >= rows * width else (columns, width)
    return max(1, round(width * new_side / old_side)), max(1, round(height * new_side / old_side))


def centre_offset(side: int, size: int) -> int:
    """First pixel of a centred crop of `size` pixels in a side of `side` pixels, as torchvision rounds it."""
    return round((side - size) / 2)


def check_size(name: str, value: object, max_side: int) -> Size:
    """Convert the value of a setting to a Size; two equal sides become an int, and a list becomes a tuple.

    Args:
        name: name of the setting, for messages.
        value: value to convert.
        max_side: maximal length of a side.

    Raises:
        SettingError: the value is neither an integer from 1 to `max_side`, nor two of these.
    """
    if not isinstance(value, (tuple, list)):
        return check_range(name, value, 1, max_side)  # type: ignore[arg-type]  # which it checks
    if len(value) != 2:
        raise SettingError(f"{name} must be an integer, or height and width as (240, 320), got {value!r}")
    height = check_range(f"height of {name}", value[0], 1, max_side)
    width = check_range(f"width of {name}", value[1], 1, max_side)
    return as_size(height, width)


def parse_size(text: str) -> Size:
    """Parse '448', or '320x240', which is 320 wide; SettingError for any other text."""
    match = _SIZE_TEXT.fullmatch(text.strip())
    if match is None or max(map(len, match.groups(""))) > 9:  # Python refuses to parse very many digits
        raise SettingError(f"--size must be pixels as 448, or WIDTHxHEIGHT as 320x240, got {text!r}")
    return as_size(int(match[2] or match[1]), int(match[1]))


def as_size(height: int, width: int) -> Size:
    """Size of a picture of `height` x `width` pixels: an int if it is square."""
    return height if height == width else (height, width)


def sides(size: Size) -> tuple[int, int]:
    """Height and width of a size."""
    return size if isinstance(size, tuple) else (size, size)


def size_text(size: Size) -> str:
    """Size as text that `parse_size` parses."""
    return f"{size[1]}x{size[0]}" if isinstance(size, tuple) else str(size)


def _resize(
    decoded: Decoded, size: tuple[int, int], box: tuple[float, float, float, float], rendering: Rendering
) -> Pixels:
    """Resize the part `box` of a picture, (left, top, right, bottom), to `size`, (width, height).

    Only this part is resized: that is less work, and a picture of 1 x 30,000 pixels needs no more memory than
    any other. Pillow rounds the box to float32, which changes a value by 1 at most.
    """
    image, mode = decoded.image, MODES[rendering.channels]
    left, top, right, bottom = (side / decoded.reduction for side in box)
    if mode not in ("RGB", image.mode):
        image = image.convert(mode)
    if (right - left, bottom - top) == size:
        return _pixels(image.crop((round(left), round(top), round(right), round(bottom))), mode)
    return _pixels(image.resize(size, RESAMPLING[rendering.resample], (left, top, right, bottom)), mode)


def _pad(decoded: Decoded, rendering: Rendering) -> Pixels:
    """Resize the whole picture to fit into the size, centred on black."""
    rows, columns = sides(rendering.size)
    width, height = inner_size(decoded.width, decoded.height, rendering.size)
    padded = np.zeros((rows, columns, CHANNELS[rendering.channels]), np.uint8)
    left, top = centre_offset(columns, width), centre_offset(rows, height)
    box = (0.0, 0.0, float(decoded.width), float(decoded.height))
    padded[top : top + height, left : left + width] = _resize(decoded, (width, height), box, rendering)
    return padded


def _pixels(image: Image.Image, mode: str) -> Pixels:
    """Pixels of an image, converted to `mode`, as uint8 [height, width, channels]."""
    if image.mode == "RGBX":
        packed = np.frombuffer(image.tobytes("raw", "RGB"), np.uint8)
        return packed.reshape(image.height, image.width, 3)
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _decode_jpeg(
    data: bytes, rendering: Rendering, locks: ExitStack | None, mode: str | None
) -> Decoded | None:
    """Decode a grey or colour JPEG by simplejpeg; None for one that is left to Pillow."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):  # KeyError where the header breaks off
        return None
    if width * height > rendering.max_pixels:
        raise TooLargeError(width, height, rendering.max_pixels)
    if colorspace in ("CMYK", "YCCK"):
        return None
    orientation = jpeg.orientation(data)
    reduction = _reduction(width, height, orientation, rendering)
    if locks is not None and width * height // reduction**2 > LARGE_PIXELS:
        locks.enter_context(large_picture_lock())
    mode = mode or ("GRAY" if colorspace == "Gray" else _COLOUR_MODE)
    plain_colorspaces = ("Gray",) if rendering.channels == "grey" else ("Gray", "YCbCr")
    plain = colorspace in plain_colorspaces and jpeg.is_plain(data)
    try:
        pixels = jpeg.decode_strictly(data, mode, reduction)
    except ValueError:
        if not rendering.allow_truncated:
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


def _reduction(width: int, height: int, orientation: int, rendering: Rendering) -> int:
    """Factor, 8, 4, 2 or 1, by which libjpeg may reduce the picture while it decodes it."""
    if not rendering.scaled_decode:
        return 1
    rows, columns = (SCALED_MARGIN * side for side in sides(rendering.size))
    if orientation in _SIDEWAYS:
        rows, columns = columns, rows
    for factor in (8, 4, 2):
        # The last row and column of a reduced picture may stand for fewer pixels than the others; in a
        # turned picture they would be the first ones.
        is_exact = orientation == 1 or (width % factor == 0 and height % factor == 0)
        is_wide, is_high = width / factor >= columns, height / factor >= rows
        is_large = is_wide or is_high if rendering.fit in ("pad", "keep-longer") else is_wide and is_high
        if is_exact and is_large:
            return factor
    return 1


def _wrap(pixels: Pixels) -> Image.Image:
    """Make a Pillow image of decoded pixels; L and RGBX, which are Pillow's own layouts, are not copied."""
    height, width, channels = pixels.shape
    if channels == 3:
        return Image.fromarray(pixels)
    mode = "L" if channels == 1 else "RGBX"
    return Image.frombuffer(mode, (width, height), pixels, "raw", mode, 0, 1)

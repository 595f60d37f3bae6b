"""Decode and resize one picture: the hot path, and what every other path is measured against.

The pixels are those of Pillow's decode, EXIF orientation applied, converted to RGB, then
torchvision's antialiased bilinear `Resize(size)` and `CenterCrop(size)`. Plain JPEGs are decoded by
simplejpeg, which drives the same libjpeg-turbo with the same settings and gives the same pixels in
less than half the time; everything else, and whatever it objects to, goes through Pillow.
"""

import io
import warnings
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError

from precache.errors import ImageError

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""uint8 [height, width, 3], RGB, 0-255."""

MAX_SIZE = 8192
"""The largest side in pixels that pictures are resized to."""

RESAMPLING = {
    "area": Image.Resampling.BOX,
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
}
FITS = ("crop", "pad", "stretch")

_EXIF_ORIENTATION = 0x0112
_WHITE = (255, 255, 255, 255)


def load(path: str, size: int) -> Pixels:
    """Read, decode and fit the picture at `path`: uint8 [size, size, 3], RGB.

    Raises:
        ImageError: the file cannot be read or decoded; names `path` and the reason.
    """
    return fit(decode(read_bytes(path), path), size)


def read_bytes(path: str) -> bytes:
    """The content of the picture at `path`, or an ImageError that names it."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ImageError(path, f"cannot be read ({error.strerror})") from error


def decode(data: bytes, path: str) -> Image.Image:
    """Decode the bytes of a picture to an upright Pillow image of mode RGB; `path` is for messages.

    The first frame of an animation; transparency is composited on white; 16-bit greyscale keeps
    its upper 8 bits.

    Raises:
        ImageError: not a picture, damaged, truncated, or so large that Pillow suspects a bomb.
    """
    if not data:
        raise ImageError(path, "cannot be decoded (the file is empty)")
    try:
        with warnings.catch_warnings():
            # Pillow warns of pictures over 89 million pixels and refuses those twice as large.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data)) as image:
                return _upright_rgb(image, data)
    except Exception as error:  # decoders raise nearly anything on damaged bytes
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = "not a known image format"
        raise ImageError(path, f"cannot be decoded ({reason})") from error


def fit(image: Image.Image, size: int, how: str = "crop", resample: str = "bilinear") -> Pixels:
    """Make a square of `size` of an RGB image; `how` and `resample` as in `precache.Recipe`.

    For `crop`, only what is kept is resized: less work, and a 1 x 30,000 picture needs no more
    memory than any other. Pillow rounds the box to float32, which moves a value by 1 at most.
    """
    kernel = RESAMPLING[resample]
    if how == "stretch":
        return np.asarray(image.resize((size, size), kernel))
    if how == "pad":
        return _pad(image, size, kernel)
    left, top, right, bottom = crop_box(*image.size, size)
    if (right - left, bottom - top) == (size, size):
        return np.asarray(image.crop((round(left), round(top), round(right), round(bottom))))
    return np.asarray(image.resize((size, size), kernel, (left, top, right, bottom)))


def reference(image: Image.Image, size: int) -> Pixels:
    """torchvision's `Resize(size)` and `CenterCrop(size)` of a Pillow image: resize all, then crop."""
    width, height = _resized(*image.size, size)
    left, top = centre_offset(width, size), centre_offset(height, size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + size, top + size)))


def crop_box(width: int, height: int, size: int) -> tuple[float, float, float, float]:
    """The part of a picture that `fit` keeps: left, top, right, bottom in source pixels.

    Sizes and offsets round as in torchvision 0.29 (`_compute_resized_output_size`, `center_crop`).
    """
    resized_width, resized_height = _resized(width, height, size)
    left, top = centre_offset(resized_width, size), centre_offset(resized_height, size)
    x_scale, y_scale = width / resized_width, height / resized_height
    return left * x_scale, top * y_scale, (left + size) * x_scale, (top + size) * y_scale


def _resized(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height once the shorter side is `size`."""
    if width <= height:
        return size, int(size * height / width)
    return int(size * width / height), size


def centre_offset(side: int, size: int) -> int:
    """Where a centred crop of `size` starts in a side of `side` pixels, as torchvision rounds it."""
    return round((side - size) / 2)


def encode_jpeg(pixels: Pixels, quality: int) -> bytes:
    """JPEG bytes of `pixels`, colour in full resolution from quality 95 on, else 4:2:0."""
    subsampling = "444" if quality >= 95 else "420"
    encoded: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels), quality=quality, colorspace="RGB", colorsubsampling=subsampling
    )
    return encoded


def decode_jpeg(data: bytes, path: str) -> Pixels:
    """Pixels of a JPEG that `encode_jpeg` wrote; ImageError names `path` if it is damaged."""
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data, colorspace="RGB")
    except ValueError as error:
        raise ImageError(path, f"cannot be decoded ({error})") from error
    return pixels


def _pad(image: Image.Image, size: int, kernel: Image.Resampling) -> Pixels:
    """The whole picture, as large as it fits, centred on black."""
    longer = max(image.size)
    width, height = (max(1, round(side * size / longer)) for side in image.size)
    square = Image.new("RGB", (size, size))
    resized = image.resize((width, height), kernel)
    square.paste(resized, (centre_offset(size, width), centre_offset(size, height)))
    return np.asarray(square)


def _upright_rgb(image: Image.Image, data: bytes) -> Image.Image:
    if image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):
        orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
        try:
            decoded = Image.fromarray(simplejpeg.decode_jpeg(data, colorspace="RGB"))
        except ValueError:  # strict about warnings; Pillow decides what is beyond repair
            pass
        else:
            if orientation == 1:
                return decoded
            decoded.getexif()[_EXIF_ORIENTATION] = orientation
            return ImageOps.exif_transpose(decoded)
    return _to_rgb(ImageOps.exif_transpose(image))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _deep_grey_to_rgb(image)
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, _WHITE), rgba).convert("RGB")
    return image.convert("RGB")


def _deep_grey_to_rgb(image: Image.Image) -> Image.Image:
    grey = np.asarray(image)
    if image.mode == "F" or grey.min() < 0 or grey.max() > 0xFFFF:
        raise ValueError(f"mode {image.mode} has no defined range of 0 to 65,535")
    return Image.fromarray((grey >> 8).astype(np.uint8)).convert("RGB")

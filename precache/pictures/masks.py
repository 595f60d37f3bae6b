"""Masks: a picture of labels for each picture, of the same size; a number from 0 to 255 for each pixel.

They go the way of their picture, resized by nearest neighbour: a label has no value between two others. What
padding adds is 0.
"""

import io
from dataclasses import replace

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from precache.errors import ImageError, SourceError
from precache.pictures import images
from precache.pictures.images import Decoded, Rendering
from precache.pictures.jpeg import Pixels
from precache.pictures.pillow import check_pixels, undisturbed
from precache.pictures.large_pictures import lacks_memory

_KINDS = ("BMP", "GIF", "PNG", "TIFF")  # a JPEG blurs the labels of neighbours into others
_EXPECTED = "expected a PNG, TIFF, BMP or GIF of one channel, a label for each pixel"


def render(data: bytes | Image.Image, path: str, name: str, size: tuple[int, int], how: Rendering) -> Pixels:
    """What is stored of the mask of a picture: uint8 [height, width], as large as what is stored of that.

    Args:
        path: the picture's name in messages.
        name: what they call the mask.
        size: width and height of the upright picture.

    Raises:
        ImageError: it cannot be decoded, or does not fit the picture.
        SourceError: there is not enough memory.
    """
    mask = _decode(data, path, name, how.max_pixels)
    if mask.size != size:
        of_mask, of_picture = (f"{width}x{height}" for width, height in (mask.size, size))
        raise ImageError(
            path,
            f"its mask {name} has {of_mask} pixels, its picture {of_picture}; both must have the same size",
        )
    fitted = images.fit(
        Decoded(mask, *size), replace(how, resample="nearest", channels="grey", dtype="uint8")
    )
    return np.ascontiguousarray(fitted[..., 0])


def encode(mask: Pixels) -> bytes:
    """A PNG of uint8 [height, width]."""
    file = io.BytesIO()
    Image.fromarray(mask).save(file, "PNG")
    return file.getvalue()


def decode(png: bytes, shape: tuple[int, int]) -> Pixels:
    """What `encode` was given, of this height and width; ValueError for anything else."""
    try:
        with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
            if image.mode != "L" or image.size != shape[::-1]:
                raise ValueError(f"a mask of mode {image.mode} and {image.size[0]}x{image.size[1]} pixels")
            return np.asarray(image)
    except (OSError, SyntaxError) as error:  # Pillow's own of a damaged PNG
        raise ValueError(str(error)) from error


def _decode(data: bytes | Image.Image, path: str, name: str, max_pixels: int) -> Image.Image:
    """The upright mask, of mode L."""
    try:
        with undisturbed(max_pixels):
            image = data if isinstance(data, Image.Image) else Image.open(io.BytesIO(data), formats=_KINDS)
            check_pixels(*image.size, max_pixels)
            labels = _labels(ImageOps.exif_transpose(image))
    except Exception as error:  # decoders raise nearly anything on damaged bytes
        reason = " ".join(str(error).split()) or type(error).__name__
        if lacks_memory(error, max_pixels):
            raise SourceError(
                f"{path}: not enough memory for its mask {name}; use fewer --workers"
            ) from error
        if isinstance(error, UnidentifiedImageError):
            reason = f"not such a picture; {_EXPECTED}"
        raise ImageError(path, f"its mask {name} cannot be read ({reason})") from error
    return Image.fromarray(labels)


def _labels(image: Image.Image) -> Pixels:
    """uint8 [height, width]; of a palette its indices, of bilevel pictures 0 and 1."""
    if image.mode in ("1", "L", "P"):
        return np.asarray(image).astype(np.uint8)
    if image.mode != "I" and not image.mode.startswith("I;16"):
        raise ValueError(f"it is of mode {image.mode}; {_EXPECTED}")
    labels = np.asarray(image)
    if labels.min() < 0 or labels.max() > 255:
        raise ValueError(f"it has labels from {labels.min()} to {labels.max()}; expected 0 to 255")
    return labels.astype(np.uint8)

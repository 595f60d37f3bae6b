"""Segmentation masks: for each picture one of the same size, with a label from 0 to 255 for each pixel.

A mask is cropped and resized like its picture, but by nearest neighbour, because there is no label between
two others. Padding has label 0.
"""

import io
from dataclasses import replace

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from precache.errors import ImageError, SourceError
from precache.pictures import images
from precache.pictures.images import Decoded, Rendering
from precache.pictures.jpeg import Pixels
from precache.pictures.large_pictures import lacks_memory
from precache.pictures.pillow import check_pixels, quiet_pillow

_KINDS = ("BMP", "GIF", "PNG", "TIFF")  # a JPEG blurs the labels of neighbours into others
_EXPECTED = "expected a PNG, TIFF, BMP or GIF of one channel, a label for each pixel"


def render(
    data: bytes | Image.Image, path: str, name: str, size: tuple[int, int], rendering: Rendering
) -> Pixels:
    """Decode and resize the mask of a picture: uint8 [height, width], as large as the stored picture.

    Args:
        data: bytes of the mask, or an image that is decoded already.
        path: path of the picture, for messages.
        name: name of the mask, for messages.
        size: width and height of the upright picture.
        rendering: settings that the picture is stored with.

    Raises:
        ImageError: the mask cannot be decoded, or is not as large as the picture.
        SourceError: there is not enough memory.
    """
    mask = _decode(data, path, name, rendering.max_pixels)
    if mask.size != size:
        (mask_width, mask_height), (width, height) = mask.size, size
        raise ImageError(
            path,
            f"its mask {name} has {mask_width}x{mask_height} pixels, its picture {width}x{height}; both must "
            f"have the same size",
        )
    fitted = images.fit(
        Decoded(mask, *size), replace(rendering, resample="nearest", channels="grey", dtype="uint8")
    )
    return np.ascontiguousarray(fitted[..., 0])


def encode(mask: Pixels) -> bytes:
    """Encode a mask, uint8 [height, width], as PNG."""
    file = io.BytesIO()
    Image.fromarray(mask).save(file, "PNG")
    return file.getvalue()


def decode(png: bytes, shape: tuple[int, int]) -> Pixels:
    """Decode a PNG of `encode` to a mask of this height and width; ValueError for anything else."""
    try:
        with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
            if image.mode != "L" or image.size != shape[::-1]:
                raise ValueError(f"a mask of mode {image.mode} and {image.size[0]}x{image.size[1]} pixels")
            return np.asarray(image)
    except (OSError, SyntaxError) as error:  # Pillow raises SyntaxError for a damaged PNG
        raise ValueError(str(error)) from error


def _decode(data: bytes | Image.Image, path: str, name: str, max_pixels: int) -> Image.Image:
    """Decode a mask to an upright image of mode L."""
    try:
        with quiet_pillow(max_pixels):
            image = data if isinstance(data, Image.Image) else Image.open(io.BytesIO(data), formats=_KINDS)
            check_pixels(*image.size, max_pixels)
            labels = _labels(ImageOps.exif_transpose(image))
    except Exception as error:  # decoders raise nearly anything on damaged bytes
        reason = " ".join(str(error).split()) or type(error).__name__
        if lacks_memory(error, max_pixels):
            raise SourceError(
                f"not enough memory for its mask {name}", path=path, remedy="use fewer --workers"
            ) from error
        if isinstance(error, UnidentifiedImageError):
            reason = f"not such a picture; {_EXPECTED}"
        raise ImageError(path, f"its mask {name} cannot be read ({reason})") from error
    return Image.fromarray(labels)


def _labels(image: Image.Image) -> Pixels:
    """Labels of an image, uint8 [height, width]: the indices of a palette, and 0 and 1 of bilevel images."""
    if image.mode in ("1", "L", "P"):
        return np.asarray(image).astype(np.uint8)
    if image.mode != "I" and not image.mode.startswith("I;16"):
        raise ValueError(f"it is of mode {image.mode}; {_EXPECTED}")
    labels = np.asarray(image)
    if labels.min() < 0 or labels.max() > 255:
        raise ValueError(f"it has labels from {labels.min()} to {labels.max()}; expected 0 to 255")
    return labels.astype(np.uint8)

"""Decoding and resizing a picture of a raw tree, as fast as what is installed can.

The decoder is the converter's. So is the resizer where Pillow is Pillow-SIMD; stock Pillow is slower than
torch's kernel, whose pixels are those of `precache.images.reference` give or take one in 255:
https://pytorch.org/vision/stable/transforms.html#performance-considerations
"""

import math

import numpy as np
import torch

from precache import images
from precache.images import Rendering
from precache.jpeg import Pixels
from precache.pictures.codecs import pillow_is_simd
from precache.pictures.sizes import Size, sides

_MOST_SURPLUS = 4  # how many times what is kept may be resized; longer pictures are left to Pillow


def load(path: str, size: Size) -> Pixels:
    """Read, decode and fit the picture at `path`: uint8 [height, width, 3], RGB.

    Raises:
        ImageError: the file cannot be decoded; names `path` and the reason.
        SourceError: it cannot be read.
    """
    return render(images.read_bytes(path), path, size)


def render(data: bytes, path: str, size: Size) -> Pixels:
    """Decode and fit the bytes of a picture, as `load`; `path` is for messages."""
    how = Rendering(size=size)
    decoded = images.decode_for(data, path, how)
    if torch_is_faster():
        width, height = images.resized_size(decoded.width, decoded.height, size)
        content = decoded.content
        if (
            isinstance(content, np.ndarray)
            and content.shape[2] == 3
            and width * height <= _MOST_SURPLUS * math.prod(sides(size))
        ):
            return _resize(content, width, height, size)
    return images.fit(decoded, how)


def torch_is_faster() -> bool:
    """Whether torch resizes RGB bytes faster than Pillow: it does with the AVX2 of x86 processors."""
    return not pillow_is_simd() and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _resize(pixels: Pixels, width: int, height: int, size: Size) -> Pixels:
    """The centre of `pixels` resized to `width` x `height`."""
    # with this stride of a batch of one torch takes it for channels-last, in which it is twice as fast
    batch = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        batch, (height, width), mode="bilinear", align_corners=False, antialias=True
    )
    rows, columns = sides(size)
    left, top = images.centre_offset(width, columns), images.centre_offset(height, rows)
    return resized[0, :, top : top + rows, left : left + columns].permute(1, 2, 0).numpy()

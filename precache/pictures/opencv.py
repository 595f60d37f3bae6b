"""WebP by OpenCV, which brings a decoder, where Pillow was built without.

Both use libwebp, and give the same pixels. Animations, of which Pillow shows the first frame, are not read.
Like Pillow it refuses a file that breaks off; of damage within a file it notices less.
"""

import re
from typing import IO

import numpy as np

from precache.pictures.own_pillow import Image

START = b"RIFF\0\0\0\0WEBP"
_ANIMATION = 2  # a bit of the first byte of VP8X (RFC 9649, 2.7)
_MISSING = "decoder WEBP not available"  # the words of Pillow
_METADATA = {b"EXIF": "exif", b"XMP ": "xmp"}


def open_webp(file: IO[bytes], _: str | bytes) -> Image.Image:
    """Decode a WebP to an image of mode RGB or RGBA, with its EXIF and XMP.

    Raises:
        OSError: it is damaged; or an animation, or this OpenCV reads no WebP.
    """
    try:
        import cv2
    except Exception as error:  # also AttributeError, for another NumPy
        raise OSError(_MISSING) from error
    data = file.read()
    if len(data) < 8 + int.from_bytes(data[4:8], "little"):
        raise OSError("truncated WebP")
    chunks = _chunks(data)
    if chunks.get(b"VP8X", b"\0")[0] & _ANIMATION or not re.search(
        r"WEBP: +(?!NO)", cv2.getBuildInformation()
    ):
        raise OSError(_MISSING)
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise OSError("damaged WebP")
    order = [2, 1, 0, 3][: pixels.shape[2]]  # OpenCV's pixels are BGR
    image = Image.fromarray(np.ascontiguousarray(pixels[..., order]))
    image.info.update({name: chunks[kind] for kind, name in _METADATA.items() if kind in chunks})
    return image


def _chunks(data: bytes) -> dict[bytes, bytes]:
    """Return the chunks of a RIFF file by kind; of several of a kind the first."""
    chunks: dict[bytes, bytes] = {}
    position = len(START)
    while position + 8 <= len(data):
        size = int.from_bytes(data[position + 4 : position + 8], "little")
        chunks.setdefault(data[position : position + 4], data[position + 8 : position + 8 + size])
        position += 8 + size + size % 2
    return chunks

"""What DALI is given of a raw tree's picture, so that it decodes it as `precache.pictures.images` does."""

from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image

from precache.pictures import images, jpeg
from precache.pictures.reading import MAX_PIXELS

_EXIF_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)


def prepare(content: bytes, file: str) -> tuple[npt.NDArray[np.uint8], tuple[int, int]]:
    """What DALI decodes, and the height and width of that.

    Raises:
        ImageError: what `precache.pictures.images` has to decode for it cannot be decoded.
    """
    width, height, plain = _upright_size(content)
    if not plain:
        pixels = images.decode(content, file)
        width, height = pixels.size
        content = b"P6 %d %d 255\n" % pixels.size + pixels.tobytes()  # PPM: DALI reads it as it is
    return np.frombuffer(content, np.uint8), (height, width)


def _upright_size(content: bytes) -> tuple[int, int, bool]:
    """Width, height, and whether DALI decodes this to the reference's RGB: grey or YCbCr JPEG."""
    try:
        with Image.open(BytesIO(content), formats=("JPEG",)) as picture:  # MPO is a JPEG, too
            width, height = picture.size
            # what is larger is refused by `images.decode`, by name
            plain = picture.mode in ("RGB", "L") and width * height <= MAX_PIXELS
            orientation = picture.getexif().get(_EXIF_ORIENTATION, 1)
            if orientation in _SIDEWAYS:
                width, height = height, width
            if orientation != 1 and ("exif" not in picture.info or jpeg.XMP in content):
                plain = False  # it may stand in XMP, which Pillow reads and DALI does not
            return width, height, plain
    except Exception:  # images.decode says what is wrong with it
        return 0, 0, False

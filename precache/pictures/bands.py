"""Pictures as they are: 16 bits of grey, or the bands of a TIFF, which no colour is made of.

Values stay those of the file; a picture of 8 bits becomes one of 16 by 257, so that white is white. Each band
is resized by Pillow in 32-bit floating point and rounded once: the distance from exact arithmetic is 0.5, and
less than 0.01 of floating point.
"""

from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from precache.errors import MissingDependencyError
from precache.packages import install_extra
from precache.pictures import kinds, pillow
from precache.pictures.headers import TooLargeError, check_pixels
from precache.pictures.rendering import CHANNELS
from precache.pictures.turns import Turn

Bands = npt.NDArray[Any]
"""uint8 or uint16 [height, width, bands]."""

_MOST_BANDS = 64
_PIXEL_BYTES = 12  # of a picture of the most pixels that are allowed: many bands are as if it had more
_ORIENTATION = 274  # of TIFF and EXIF
_TURNS = {  # orientation -> mirrored, and quarter turns to the left that bring it upright (TIFF 6.0, page 36)
    1: (False, 0), 2: (True, 0), 3: (False, 2), 4: (True, 2), 5: (True, 1), 6: (False, 3), 7: (True, 3),
    8: (False, 1),
}  # fmt: skip


def check_reader(channels: str) -> None:
    """Raise MissingDependencyError where `channels` are bands of a TIFF, and nothing here reads them."""
    if channels not in CHANNELS:
        _tifffile()


def decode(
    data: bytes | Image.Image, path: str, bands: int, dtype: str, max_pixels: int, turn: Turn | None
) -> Bands:
    """The upright picture: `dtype` [height, width, `bands`]; one band of colour is its grey.

    Raises:
        ValueError: it has other bands, or values that are none of `dtype`.
        Exception: whatever a decoder raises on damaged bytes.
    """
    if isinstance(data, bytes) and kinds.content_kind(data[: kinds.PREFIX_BYTES]) == "TIFF" and bands > 1:
        found = _of_tiff(data, max_pixels, turn)
    else:
        found = _of_image(data, path, bands, max_pixels, turn)
    if found.shape[2] != bands:
        raise ValueError(f"has {found.shape[2]} bands, expected {bands}; leave it out, or choose --channels")
    if found.dtype == dtype:
        return found
    if found.dtype == np.uint8:
        return np.multiply(found, 257, dtype=np.uint16)
    if found.dtype == np.uint16:
        raise ValueError("has bands of 16 bits; convert with --dtype uint16")
    raise ValueError(f"has bands of {found.dtype}, expected uint8 or uint16; convert them yourself")


def resize(
    picture: Bands,
    size: tuple[int, int],
    box: tuple[float, float, float, float],
    resample: Image.Resampling,
) -> Bands:
    """The part `box` (left, top, right, bottom) of `picture`, of its dtype, as `size` (width, height)."""
    resized = [
        np.asarray(Image.fromarray(picture[..., band].astype(np.float32)).resize(size, resample, box))
        for band in range(picture.shape[2])
    ]
    brightest = np.iinfo(picture.dtype).max
    rounded: Bands = np.stack(resized, axis=-1).round().clip(0, brightest).astype(picture.dtype)
    return rounded


def _of_image(data: bytes | Image.Image, path: str, bands: int, max_pixels: int, turn: Turn | None) -> Bands:
    """What Pillow decodes: grey of 16 bits, or bands of 8."""
    if isinstance(data, Image.Image):
        check_pixels(*data.size, max_pixels)
        return _array(data, path, bands)
    with pillow.opened(data, path, max_pixels, turn) as image:
        return _array(image, path, bands)


def _array(image: Image.Image, path: str, bands: int) -> Bands:
    image.load()
    if image.mode == "I" or image.mode.startswith("I;16"):
        grey = np.asarray(ImageOps.exif_transpose(image))
        if grey.min() < 0 or grey.max() >= 1 << 16:
            raise ValueError(f"mode {image.mode} has values that are not within 0 to 65,535")
        return grey.astype(np.uint16)[..., None]
    if bands > 1:
        eight = ImageOps.exif_transpose(image)
        return np.atleast_3d(np.asarray(eight.convert("RGBA") if eight.mode == "PA" else eight))
    return np.asarray(pillow.upright(image, (255, 255, 255), path).convert("L"))[..., None]


def _of_tiff(data: bytes, max_pixels: int, turn: Turn | None) -> Bands:
    """The bands of the first page, side by side or one behind the other."""
    with _tifffile().TiffFile(BytesIO(data)) as file:
        page = file.pages.first
        for width, height in ((page.imagewidth, page.imagelength), (page.tilewidth, page.tilelength)):
            check_pixels(width, height, max_pixels)
        if turn is not None:
            turn.wait(page.imagewidth * page.imagelength)
        if page.samplesperpixel > _MOST_BANDS or page.imagedepth != 1:
            raise ValueError(f"has {page.samplesperpixel} bands, at most {_MOST_BANDS} can be converted")
        if page.nbytes > max_pixels * _PIXEL_BYTES:
            raise TooLargeError(
                f"is too large (its bands are {page.nbytes:,} bytes, --max-pixels allows "
                f"{max_pixels * _PIXEL_BYTES:,})"
            )
        found: Bands = np.asarray(page.asarray())
        planes = found.ndim == 3 and page.axes.startswith("S")
        orientation = page.tags[_ORIENTATION].value if _ORIENTATION in page.tags else 1
    found = np.moveaxis(found, 0, -1) if planes else np.atleast_3d(found)
    mirrored, turns = _TURNS.get(int(orientation), (False, 0))
    if mirrored:
        found = found[:, ::-1]
    return np.ascontiguousarray(np.rot90(found, turns))


def _tifffile() -> Any:
    try:
        import tifffile
    except ImportError as error:
        raise MissingDependencyError(
            f"a number of channels needs tifffile, which reads the bands of a TIFF; "
            f"run: {install_extra('pictures')}"
        ) from error
    return tifffile

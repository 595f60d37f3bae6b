"""How a picture becomes what is stored of it: the settings, and what they stand for."""

from dataclasses import dataclass
from typing import TypeAlias

from PIL import Image

from precache.pictures.reading import MAX_PIXELS
from precache.pictures.sizes import Size

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
KEPT = ("keep", "keep-longer")
"""Those of FITS that cut nothing away and add nothing: the result is as long as the picture is."""
MAX_KEPT_SIDE = 65_500
"""The largest side in pixels of such a result: more a JPEG cannot have (libjpeg's JPEG_MAX_DIMENSION)."""

MODES = {"grey": "L", "rgb": "RGB", "rgba": "RGBA"}
CHANNELS = {"grey": 1, "rgb": 3, "rgba": 4}
"""How many each setting of `Rendering.channels` stands for; so does a number, of bands kept as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """How a picture becomes what is stored of it; the settings are those of `precache.Recipe`.

    Attributes:
        size: of the result in pixels; with a `fit` of KEPT, of its shorter or longer side at most.
        fit: one of FITS.
        enlarge: with a `fit` of KEPT, that side of a smaller picture becomes as long, too.
        resample: one of RESAMPLING.
        background: RGB that transparency is composited on; not where it is kept.
        channels: one of CHANNELS, or a number of bands.
        dtype: `uint8`; or `uint16`, of grey or bands.
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
    def keeps_bands(self) -> bool:
        """Whether values are kept, see `precache.pictures.bands`."""
        return self.dtype != "uint8" or self.channels not in CHANNELS


def channel_count(channels: str) -> int:
    """How many channels `channels` of a `Rendering` stands for."""
    return CHANNELS.get(channels) or int(channels)

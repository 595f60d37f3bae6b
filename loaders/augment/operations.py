"""Operations on the served picture, by name, in the order in which they are drawn.

An operation has up to four values:

    SHEAR_X, SHEAR_Y          shift in pixels for each pixel of distance from the top, or from the left; to
                              the left, or up, where it is positive
    TRANSLATE_X, TRANSLATE_Y  pixels to the right, or down
    ROTATE                    degrees, counter-clockwise, about the centre
    BRIGHTNESS, CONTRAST, SATURATION, SHARPNESS
                              factor, 1 for no change, as of torchvision's `adjust_*`
    HUE                       shift as a share of the circle, from -0.5 to 0.5
    POSTERIZE                 bits that are kept
    SOLARIZE                  threshold, from which on values are inverted
    SOLARIZE_ADD              what is added to values below 128, as in timm
    BLUR                      sigma of a Gaussian, pixels
    ERASE                     left, top, width and height in pixels
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from loaders.augment.draws import Floats

Codes: TypeAlias = npt.NDArray[np.int8]
"""int8 [n] or [n, steps]: numbers of operations."""


class Operation(IntEnum):
    """Operation on a picture."""

    IDENTITY = 0
    # pixels move
    SHEAR_X = 1
    SHEAR_Y = 2
    TRANSLATE_X = 3
    TRANSLATE_Y = 4
    ROTATE = 5
    # a new colour is linear in the old one
    SATURATION = 6
    GREY = 7
    # a new value depends on the old one alone
    BRIGHTNESS = 8
    POSTERIZE = 9
    SOLARIZE = 10
    SOLARIZE_ADD = 11
    INVERT = 12
    # ... and on all pixels of the picture
    CONTRAST = 13
    AUTOCONTRAST = 14
    EQUALIZE = 15
    # others
    SHARPNESS = 16
    HUE = 17
    BLUR = 18
    ERASE = 19


GEOMETRIC = (
    Operation.SHEAR_X,
    Operation.SHEAR_Y,
    Operation.TRANSLATE_X,
    Operation.TRANSLATE_Y,
    Operation.ROTATE,
)
LINEAR = (Operation.SATURATION, Operation.GREY)
TABLES = (
    Operation.BRIGHTNESS,
    Operation.POSTERIZE,
    Operation.SOLARIZE,
    Operation.SOLARIZE_ADD,
    Operation.INVERT,
)
ERASED = (124, 116, 104)
"""Value of each channel of what is erased: ImageNet's mean, which is 0 once it is normalised."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations that were drawn for several pictures.

    Attributes:
        codes: int8 [n, steps]: the operations of each picture, in their order; IDENTITY fills up.
        values: float64 [n, steps, 4]: their values, zeros where one has fewer.
        fill: value of each channel, 0-255, of pixels that a geometric operation moves in from outside.
    """

    codes: Codes
    values: Floats
    fill: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def none(cls, pictures: int) -> "Operations":
        """Return no operations for so many pictures."""
        return cls(np.empty((pictures, 0), np.int8), np.empty((pictures, 0, 4)))

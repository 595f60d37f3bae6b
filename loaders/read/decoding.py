"""Pictures of a raw tree: read, measured by their header, and decoded as the converter decodes them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from precache.errors import ImageError
from precache.pictures import images
from precache.pictures.jpeg import Pixels


@dataclass(frozen=True, slots=True)
class Encoded:
    """A picture that was read.

    Attributes:
        shape: height and width of the upright picture, as its header says.
        error: why it cannot be decoded, where that is known already.
    """

    path: str
    data: bytes
    shape: tuple[int, int]
    error: ImageError | None = None

    def decode(self) -> Pixels:
        """uint8 [height, width, 3], RGB.

        Raises:
            ImageError: it cannot be decoded; names `path` and the reason.
        """
        if self.error is not None:
            raise self.error
        pixels = images.decode_pixels(self.data, self.path)
        if pixels.shape[:2] != self.shape:
            (height, width), (rows, columns) = self.shape, pixels.shape[:2]
            raise ImageError(
                self.path,
                f"its header says {width}x{height} pixels, and it has {columns}x{rows}; store it anew",
            )
        return pixels


def read(path: str) -> Encoded:
    """The picture at `path`; one that cannot be decoded says so when it is.

    Raises:
        SourceError: it cannot be read, which says nothing about the picture.
    """
    try:
        data = images.read_bytes(path)
        return Encoded(path, data, images.upright_shape(data, path))
    except ImageError as error:
        return Encoded(path, b"", (1, 1), type(error)(error.path, error.reason))  # without its traceback


def shapes_of(pictures: list[Encoded]) -> npt.NDArray[np.int64]:
    """int64 [n, 2], height and width of each."""
    return np.array([picture.shape for picture in pictures], np.int64).reshape(-1, 2)

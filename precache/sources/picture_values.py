"""What a row may have in the place of its picture.

    str, path                     the file of that name
    bytes                         an encoded picture
    {"bytes": ..., "path": ...}   either, as Hugging Face has it undecoded
    Pillow image                  itself
    array                         uint8 [h, w], [h, w, 1], [h, w, 3] or [h, w, 4]
    tensor                        the same, or [1, h, w], [3, h, w] or [4, h, w]

A tensor is known by its methods: torch is not imported.
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from precache.errors import ImageError
from precache.pictures.pillow import TooLargeError, check_pixels
from precache.pictures.reading import check_bytes, read_picture, status_of

_CHANNELS = (1, 3, 4)
_EXPECTED = "expected a path, encoded bytes, a Pillow image, or a uint8 array or tensor"


def picture_of(value: Any, where: str, max_pixels: int) -> bytes | Image.Image:
    """The picture that `value` is, as `Source.read` gives it.

    Raises:
        ImageError: it is not a picture; names `where`.
        SourceError: it is a file that cannot be read now.
    """
    if isinstance(value, Mapping):
        content = value.get("bytes")
        value = value.get("path") if content is None else content
    if isinstance(value, str | os.PathLike):
        return _file(value, where, max_pixels)
    if isinstance(value, bytes | bytearray | memoryview):
        check_bytes(where, len(value), max_pixels)
        return bytes(value)
    if isinstance(value, Image.Image):
        return _loaded(value, where, max_pixels)
    if is_tensor(value):
        return _image(_channels_last(value.detach().cpu().numpy()), where)
    if isinstance(value, np.ndarray):
        return _image(value, where)
    what = "has no picture" if value is None else f"has {type(value).__name__} {value!r:.60}, not a picture"
    raise ImageError(where, f"{what}; {_EXPECTED}")


def _file(path: str | os.PathLike[str], where: str, max_pixels: int) -> bytes:
    name = os.fsdecode(path)
    if status_of(name) is None:
        raise ImageError(where, f"its picture {name!r:.200} is not a file")
    return read_picture(name, max_pixels)


def _loaded(image: Image.Image, where: str, max_pixels: int) -> Image.Image:
    """`image` once its pixels are there: one that is opened only decodes them when it is asked to."""
    try:
        check_pixels(*image.size, max_pixels)
        image.load()
    except TooLargeError as error:
        raise ImageError(where, str(error)) from error
    except Exception as error:  # decoders raise nearly anything on damaged bytes
        raise ImageError(where, f"cannot be decoded ({reason_of(error)})") from error
    return image


def _channels_last(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A tensor's [channels, h, w] as [h, w, channels]; where either is possible, torch means the first."""
    return np.moveaxis(array, 0, -1) if array.ndim == 3 and array.shape[0] in _CHANNELS else array


def _image(array: npt.NDArray[Any], where: str) -> Image.Image:
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in _CHANNELS)
    if array.dtype != np.uint8 or not fits or not array.size:
        raise ImageError(
            where,
            f"is {array.dtype} {[*array.shape]}; expected uint8 [h, w], [h, w, 1], [h, w, 3] or [h, w, 4], "
            f"or a tensor with the channels first; leave out the transform that changes it",
        )
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def is_tensor(value: Any) -> bool:
    """Whether `value` is what torch calls a tensor."""
    return all(hasattr(value, name) for name in ("detach", "cpu", "numpy", "shape"))


def reason_of(error: Exception) -> str:
    """The text of an error of other people's code, on one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text[:200]}" if text else name

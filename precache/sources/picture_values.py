"""Pictures from the values that a row may hold: paths, bytes, Pillow images, arrays and tensors.

    str, path                     the file of that name
    bytes                         an encoded picture
    {"bytes": ..., "path": ...}   either of these, as Hugging Face's library stores pictures
    Pillow image                  used as it is
    array                         uint8 [h, w], [h, w, 1], [h, w, 3] or [h, w, 4]
    tensor                        the same, or [1, h, w], [3, h, w] or [4, h, w]

Tensors are recognized by their methods, so that torch need not be imported.
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


def to_picture(value: Any, where: str, max_pixels: int) -> bytes | Image.Image:
    """Return the picture in `value`, as `Source.read` returns it.

    Args:
        where: name of the row in messages.

    Raises:
        ImageError: `value` is not a picture.
        SourceError: `value` names a file that cannot be read now.
    """
    if isinstance(value, Mapping):
        content = value.get("bytes")
        value = value.get("path") if content is None else content
    if isinstance(value, str | os.PathLike):
        return _read_file(value, where, max_pixels)
    if isinstance(value, bytes | bytearray | memoryview):
        check_bytes(where, len(value), max_pixels)
        return bytes(value)
    if isinstance(value, Image.Image):
        return _load(value, where, max_pixels)
    if is_tensor(value):
        return _image_from_array(_channels_last(value.detach().cpu().numpy()), where)
    if isinstance(value, np.ndarray):
        return _image_from_array(value, where)
    reason = f"has {type(value).__name__} {value!r:.60}, not a picture"
    if value is None:
        reason = "has no picture"
    raise ImageError(where, f"{reason}; {_EXPECTED}")


def _read_file(path: str | os.PathLike[str], where: str, max_pixels: int) -> bytes:
    name = os.fsdecode(path)
    if status_of(name) is None:
        raise ImageError(where, f"its picture {name!r:.200} is not a file")
    return read_picture(name, max_pixels)


def _load(image: Image.Image, where: str, max_pixels: int) -> Image.Image:
    """Decode the pixels of an image, which Pillow does not do when it opens a file, and return it."""
    try:
        check_pixels(*image.size, max_pixels)
        image.load()
    except TooLargeError as error:
        raise ImageError(where, str(error)) from error
    except Exception as error:  # decoders raise nearly anything on damaged bytes
        raise ImageError(where, f"cannot be decoded ({reason_of(error)})") from error
    return image


def _channels_last(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Move the channels of a tensor to the end; a shape that may be either is torch's, channels first."""
    return np.moveaxis(array, 0, -1) if array.ndim == 3 and array.shape[0] in _CHANNELS else array


def _image_from_array(array: npt.NDArray[Any], where: str) -> Image.Image:
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in _CHANNELS)
    if array.dtype != np.uint8 or not fits or not array.size:
        raise ImageError(
            where,
            f"is {array.dtype} {[*array.shape]}; expected uint8 [h, w], [h, w, 1], [h, w, 3] or [h, w, 4], "
            f"or a tensor with the channels first",
            remedy="leave out the transform that changes it",
        )
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def is_tensor(value: Any) -> bool:
    """Return whether `value` has the methods of a torch tensor."""
    return all(hasattr(value, name) for name in ("detach", "cpu", "numpy", "shape"))


def reason_of(error: Exception) -> str:
    """Return type and message of an exception of other libraries, or of a user's code, on one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text[:200]}" if text else name

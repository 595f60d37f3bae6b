"""Who decodes JPEGs on a GPU: TorchCodec's nvJPEG decoder where it is installed, else torchvision's.

TorchCodec (0.16 or newer) applies EXIF orientation, and serves several threads at a time with a decoder each;
torchvision has one per device, and will drop it: https://github.com/meta-pytorch/torchcodec/issues/1560
"""

import io
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from PIL import Image

from precache.errors import MissingDependencyError

Decode = Callable[[list[torch.Tensor], torch.device], list[torch.Tensor]]
"""(JPEGs, uint8 [bytes], on the CPU; device) -> RGB pictures, uint8 [3, height, width], on that device, for
work on the current stream; RuntimeError if one of them cannot be decoded."""

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuDecoder:
    """A library's decoder.

    Attributes:
        name: of the library.
        turns: whether it applies EXIF orientation.
        most: how many threads it serves at a time.
    """

    name: str
    decode: Decode
    turns: bool
    most: int


@cache
def find_decoder(device: torch.device) -> GpuDecoder:
    """The first of the installed ones that decodes a small JPEG on `device`.

    Raises:
        MissingDependencyError: none is installed, or none does.
    """
    tiny = io.BytesIO()
    Image.new("RGB", (16, 16), "white").save(tiny, "JPEG")
    jpeg = torch.frombuffer(bytearray(tiny.getvalue()), dtype=torch.uint8)
    if (decoder := _torchcodec()) is not None:
        try:
            decoder.decode([jpeg], device)
        except RuntimeError as error:  # a wheel without nvJPEG, or one that does not fit this CUDA
            why = str(error).partition("\n")[0]
            _LOGGER.warning("torchcodec does not decode JPEGs on %s, torchvision is used: %s", device, why)
        else:
            return decoder
    decoder = _torchvision()
    try:
        decoder.decode([jpeg], device)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise MissingDependencyError(
            f"backend 'nvjpeg': what is installed does not decode JPEGs on {device} (torchvision: {why}); "
            f"'pip install torchcodec' of a version for this CUDA, or choose another backend"
        ) from error
    return decoder


def _torchcodec() -> GpuDecoder | None:
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError):  # the latter two: its libraries do not fit this torch
        return None

    def decode(jpegs: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        pictures: list[torch.Tensor] = decode_jpeg(jpegs, device=device)
        return pictures

    return GpuDecoder("torchcodec", decode, turns=True, most=4)


def _torchvision() -> GpuDecoder:
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except ImportError as error:
        raise MissingDependencyError(
            "backend 'nvjpeg' needs TorchCodec; install it with 'pip install torchcodec'"
        ) from error

    def decode(jpegs: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        pictures: list[torch.Tensor] = decode_jpeg(jpegs, ImageReadMode.RGB, device)
        return pictures

    return GpuDecoder("torchvision", decode, turns=False, most=1)

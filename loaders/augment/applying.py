"""Apply the operations of pictures in their order: picture by picture on the CPU, in batches on a device.

On a device, each step of a batch is at most one call for each kind of operation: one affine grid for all that
move pixels, one matrix of colours, one table of values, and one call for each of the others. Which pictures a
kind is for is known on the CPU, so that nothing waits for the device.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from loaders.augment import colour
from loaders.augment.geometry import inverse_affine, warp, warp_batch
from loaders.augment.operations import ERASED, GEOMETRIC, LINEAR, TABLES, Operation, Operations
from loaders.device import upload
from precache.pictures.jpeg import Pixels

_CHUNK = 128  # pictures at a time: bounds the memory of their float copies
Steps: TypeAlias = list[tuple[int, Any]]
"""The operations of a picture, each with its argument: a matrix where pixels move, else its values."""


def plan_steps(operations: Operations, shape: tuple[int, int]) -> list[Steps]:
    """Return the steps of each picture, for `apply_to_picture`.

    Args:
        shape: height and width of the pictures.
    """
    count, steps = operations.codes.shape
    planned: list[Steps] = [[] for _ in range(count)]
    for step in range(steps):
        codes, values = operations.codes[:, step], operations.values[:, step]
        moving = np.isin(codes, GEOMETRIC)
        arguments: list[Any] = values.tolist()
        if moving.any():
            matrices = inverse_affine(codes, values, shape)
            for slot in np.flatnonzero(moving).tolist():
                arguments[slot] = matrices[slot]
        for picture_steps, code, argument in zip(planned, codes.tolist(), arguments, strict=True):
            if code != Operation.IDENTITY:
                picture_steps.append((code, argument))
    return planned


def apply_to_picture(picture: Pixels, steps: Steps, fill: tuple[int, ...]) -> None:
    """Apply the steps of a picture, uint8 [height, width, channels], in place.

    Args:
        fill: see `Operations`.
    """
    channels = picture.shape[2]
    for code, argument in steps:
        if code in GEOMETRIC:
            warp(picture, argument, fill[:channels])
        elif code == Operation.ERASE:
            left, top, width, height = map(int, argument)
            picture[top : top + height, left : left + width] = ERASED[:channels]
        else:
            colour.recolour(picture, code, argument[0])


def apply_to_pictures(images: torch.Tensor, operations: Operations) -> torch.Tensor:
    """Return the images with their operations applied one by one on the CPU.

    Args:
        images: uint8 [n, height, width, channels].
    """
    if not operations.codes.any():
        return images
    # cloned, since a backend may serve memory that is not to be written to; OpenCV refuses other strides, as
    # torch may give to pictures of one channel
    images = images.clone(memory_format=torch.contiguous_format)
    steps = plan_steps(operations, (images.shape[1], images.shape[2]))
    for picture, picture_steps in zip(images.numpy(), steps, strict=True):
        apply_to_picture(picture, picture_steps, operations.fill)
    return images


def apply_to_batch(images: torch.Tensor, operations: Operations) -> torch.Tensor:
    """Return the images with their operations applied in batches on their device.

    Args:
        images: uint8 [n, height, width, channels].
    """
    codes = operations.codes
    if not codes.any():
        return images
    out = torch.empty_like(images)
    for start in range(0, len(images), _CHUNK):
        part = slice(start, start + _CHUNK)
        floats = images[part].permute(0, 3, 1, 2).to(torch.float32)
        for step in range(codes.shape[1]):
            _apply_step(floats, codes[part, step], operations.values[part, step], operations.fill)
        out[part] = floats.to(images.dtype).permute(0, 2, 3, 1)
    return out


def _apply_step(
    floats: torch.Tensor, codes: np.ndarray[Any, Any], values: np.ndarray[Any, Any], fill: tuple[int, ...]
) -> None:
    """Apply one step of each picture, float [n, channels, height, width], in place on their device."""
    channels, height, width = floats.shape[1:]
    known = {*codes.tolist()} - {Operation.IDENTITY, *GEOMETRIC, *LINEAR, *TABLES}
    others = [Operation(code) for code in sorted(known)]
    kinds: list[Sequence[Operation]] = [GEOMETRIC, LINEAR, TABLES, *([code] for code in others)]
    for kind in kinds:
        slots = np.flatnonzero(np.isin(codes, kind))
        if not len(slots):
            continue
        on_device = upload(torch.from_numpy(slots), floats.device)
        part, part_codes, part_values = floats[on_device], codes[slots], values[slots]

        def send(array: np.ndarray[Any, Any]) -> torch.Tensor:
            return upload(torch.from_numpy(array.astype(np.float32)), floats.device)

        if kind is GEOMETRIC:
            matrices = send(inverse_affine(part_codes, part_values, (height, width)))
            part = warp_batch(part, matrices, fill[:channels])
        elif kind is LINEAR:
            part = colour.recolour_linear(part, send(colour.linear_matrices(part_codes, part_values)))
        elif kind is TABLES:
            part = colour.apply_tables(part, send(colour.tables(part_codes, part_values)))
        elif kind[0] == Operation.ERASE:
            part = _erase(part, send(part_values))
        elif kind[0] == Operation.BLUR:
            part = colour.blur(part, send(colour.blur_kernels(part_values[:, 0])))
        elif kind[0] in _WITHOUT_VALUE:
            part = _WITHOUT_VALUE[kind[0]](part)
        else:
            part = _WITH_VALUE[kind[0]](part, send(part_values[:, 0]))
        floats[on_device] = part


_WITH_VALUE = {
    Operation.CONTRAST: colour.contrast,
    Operation.SHARPNESS: colour.sharpen,
    Operation.HUE: colour.shift_hue,
}
_WITHOUT_VALUE = {Operation.AUTOCONTRAST: colour.autocontrast, Operation.EQUALIZE: colour.equalize}


def _erase(images: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Return the images with the colour ERASED inside a box each, float [n, 4]: left, top, width, height."""
    left, top, width, height = boxes.T[:, :, None, None]
    rows = torch.arange(images.shape[2], device=images.device)[None, :, None]
    columns = torch.arange(images.shape[3], device=images.device)[None, None, :]
    inside = (rows >= top) & (rows < top + height) & (columns >= left) & (columns < left + width)
    erased = torch.tensor(ERASED[: images.shape[1]], dtype=images.dtype, device="cpu")
    return torch.where(inside[:, None], upload(erased, images.device)[:, None, None], images)

"""MixUp and CutMix: every picture of a batch is mixed with the picture before it, the first with the last.

    MixUp   lam * picture + (1 - lam) * other            https://arxiv.org/abs/1710.09412
    CutMix  the picture, with a box of the other in it   https://arxiv.org/abs/1905.04899

Labels are mixed as lam * label + (1 - lam) * label of the other. A batch draws one lam from
Beta(alpha, alpha), as in torchvision's `v2.MixUp` and `v2.CutMix`. In CutMix the drawn lam is the share of
the box's size; once the box is cut off at the borders, lam is the share of the area that it leaves.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import torch

from loaders.augment.draws import Integers
from precache.errors import SettingError
from precache.pictures.jpeg import Pixels

_MIX_TAG = 7
_PAIRS = ((slice(1, None), slice(None, -1)), (slice(None, 1), slice(-1, None)))
"""Slots of pictures and of those that they are mixed with: all but the first, and the first."""
_CHUNK = 64  # pictures at a time on a device: bounds the memory of their float copies


@dataclass(frozen=True, slots=True)
class Mixing:
    """How the pictures of one batch are mixed.

    Attributes:
        lam: weight of each picture's own label, and in MixUp of its pixels; 1 - lam is that of the other.
        box: left, top, right and bottom, in pixels, of the box that CutMix takes of the other picture; it
            may be empty. None: MixUp.
        partners: int64 [n], slot of the other picture: the one before, and for the first the last.
    """

    lam: float
    box: tuple[int, int, int, int] | None
    partners: Integers


def check_mixable(mixup: float, cutmix: float, classes: Sequence[str], path: object) -> None:
    """Raise SettingError if one of the alphas is set and there are no classes, whose labels could be mixed.

    Args:
        mixup: alpha of MixUp, as `draw_mixing`.
        cutmix: alpha of CutMix.
        classes: `SplitData.classes`; empty where samples have a number, several, or no label at all.
        path: where the data is, for the message.
    """
    values = {"mixup": mixup, "cutmix": cutmix}
    names = [name for name, alpha in values.items() if alpha > 0]
    if names and not classes:
        settings = " and ".join(f"{name} {values[name]:g}" for name in names)
        zeros = ", ".join(f"{name}=0" for name in names)
        raise SettingError(
            f"augment has {settings}, which mixes classes as it mixes pictures; samples of {path} have none",
            remedy=f"give augment=dataclasses.replace(settings, {zeros}), with settings such as "
            "loaders.AUGMENTATIONS['torchvision']",
        )


def draw_mixing(
    mixup: float, cutmix: float, seed: int, epoch: int, ids: Integers, shape: tuple[int, int]
) -> Mixing | None:
    """Draw how to mix a batch: it depends on seed, epoch, and on which samples the batch has, in their order.

    Args:
        mixup: alpha of MixUp; 0: never.
        cutmix: alpha of CutMix; 0: never. If both are set, each batch takes one of the two, equally likely.
        ids: int64 [n], ids of the samples.
        shape: height and width of the pictures.

    Returns:
        None if neither is set, or if the batch is one picture.
    """
    if len(ids) < 2 or (mixup == 0 and cutmix == 0):
        return None
    batch_key = int.from_bytes(hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=8).digest(), "little")
    generator = np.random.default_rng((seed % 2**64, epoch, batch_key, _MIX_TAG))
    takes_cutmix = cutmix > 0 and (mixup == 0 or generator.random() < 0.5)
    alpha = cutmix if takes_cutmix else mixup
    lam = float(generator.beta(alpha, alpha))
    partners = np.roll(np.arange(len(ids)), 1)
    if not takes_cutmix:
        return Mixing(lam, None, partners)
    height, width = shape
    box = find_box(lam, int(generator.integers(width)), int(generator.integers(height)), shape)
    left, top, right, bottom = box
    return Mixing(1 - (right - left) * (bottom - top) / (width * height), box, partners)


def find_box(lam: float, x: int, y: int, shape: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of CutMix's box, as torchvision's `v2.CutMix` rounds them.

    Args:
        lam: share of the area outside of the box, before it is cut off at the borders of the picture.
        x, y: centre of the box, in pixels.
        shape: height and width of the picture.
    """
    height, width = shape
    half_side = 0.5 * math.sqrt(1 - lam)
    half_width, half_height = int(half_side * width), int(half_side * height)
    return (
        max(x - half_width, 0),
        max(y - half_height, 0),
        min(x + half_width, width),
        min(y + half_height, height),
    )


def mix_images(images: torch.Tensor, mixing: Mixing, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mixed pictures, rounded to the nearest whole number.

    On a device all work is queued, and no thread waits.

    Args:
        images: uint8 [n, height, width, channels], contiguous.
        out: of the same shape, dtype, device and memory format, for the result; it may be `images` itself,
            which spares CutMix the copy of all that is outside of the box. None: fresh memory.
    """
    if out is None:
        out = torch.empty_like(images)
    if images.device.type != "cpu":
        _mix_on_device(images, mixing, out)
    elif mixing.box is None:
        _mix_up(images.numpy(), mixing.lam, out.numpy())
    else:
        _paste_boxes(images.numpy(), mixing.box, out.numpy())
    return out


def _mix_up(images: Pixels, lam: float, out: Pixels) -> None:
    """Mix `images` into `out`, both uint8 [n, height, width, channels], which may be the same memory."""
    # OpenCV takes the batch for one picture, whose rows are the batch's pictures
    rows, out_rows = images.reshape(len(images), -1), out.reshape(len(images), -1)
    if not np.may_share_memory(images, out):
        for slots, partners in _PAIRS:
            cv2.addWeighted(rows[slots], lam, rows[partners], 1 - lam, 0, dst=out_rows[slots])
        return
    last = rows[-1:].copy()
    for slot in range(len(rows) - 1, -1, -1):  # backwards: the picture before is still as it was
        row, partner = rows[slot : slot + 1], rows[slot - 1 : slot] if slot else last
        cv2.addWeighted(row, lam, partner, 1 - lam, 0, dst=row)


def _paste_boxes(images: Pixels, box: tuple[int, int, int, int], out: Pixels) -> None:
    """Copy `images`, uint8 [n, height, width, channels], to `out`, with boxes of the pictures before in them.

    Both may be the same memory.
    """
    left, top, right, bottom = box
    parts = images[:, top:bottom, left:right]
    if np.may_share_memory(images, out):
        parts = parts.copy()
    else:
        np.copyto(out, images)
    for slots, partners in _PAIRS:
        out[slots, top:bottom, left:right] = parts[partners]


def _mix_on_device(images: torch.Tensor, mixing: Mixing, out: torch.Tensor) -> None:
    """Queue what mixes `images` into `out`, both uint8 [n, height, width, channels]."""
    if mixing.box is None:
        others = images.roll(1, 0)
        for start in range(0, len(images), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            floats = images[chunk].to(torch.float32).mul_(mixing.lam)
            out[chunk] = floats.add_(others[chunk], alpha=1 - mixing.lam).round_()
        return
    left, top, right, bottom = mixing.box
    parts = images[:, top:bottom, left:right].roll(1, 0)
    if out is not images:
        out.copy_(images)
    out[:, top:bottom, left:right] = parts


def mix_labels(labels: torch.Tensor, mixing: Mixing | None, classes: int) -> torch.Tensor:
    """Return the mixed labels, float32 [n, classes], on the device of `labels`; no thread waits for it.

    Args:
        labels: int64 [n], or floats [n, classes].
        mixing: None: pictures are not mixed, and each label has its own weight alone.
        classes: number of classes.
    """
    if labels.ndim == 1:
        # `one_hot` of torch checks its values, for which the thread waits
        weights = torch.zeros(len(labels), classes, dtype=torch.float32, device=labels.device)
        weights.scatter_(1, labels[:, None], 1.0)
    else:
        weights = labels.to(torch.float32)
    if mixing is None:
        return weights
    return weights * mixing.lam + weights.roll(1, 0) * (1 - mixing.lam)

"""What `augment` of `loaders.build` does with a batch, on its device: draws, or a caller's function."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from loaders.augment.draw import RandomAugmentation, draw
from loaders.deliver import upload
from precache.errors import SettingError, check_choice
from precache.pictures.sizes import Size, as_size, sides

BatchFunction: TypeAlias = Callable[..., Any]
"""(images uint8 [n, height, width, channels], see `augment` of `loaders.build`, on the device, ids int64 [n]
on the CPU, epoch) -> images uint8 [n, height, width, channels] on the same device: as many, of the `size`
that `build` was given, or else all of one.

With a parameter called `labels` (as of `Batch`, on the device) it returns images and labels: [n], or soft
ones, float [n, classes], as CutMix and MixUp make them. With one called `view` it is told which it makes."""
NAMES = ("crop", "eval", "train")
_CHUNK = 32  # pictures at a time: bounds the memory of their float copies
# ITU-R BT.601, as torchvision's rgb_to_grayscale has it
_LUMA = (0.2989, 0.587, 0.114)


def choose(
    augment: str | RandomAugmentation | BatchFunction | None,
) -> RandomAugmentation | BatchFunction | None:
    """What `loaders.build` was asked for; None: the centre, unchanged.

    Raises:
        SettingError: an unknown name.
    """
    if augment is None or isinstance(augment, RandomAugmentation):
        return augment
    if isinstance(augment, str):
        check_choice("augment", augment, NAMES)
        return {"crop": RandomAugmentation(scale=None), "eval": None, "train": RandomAugmentation()}[augment]
    if callable(augment):
        return augment
    raise SettingError(
        f"augment must be a name, a RandomAugmentation, a function or None, got {augment!r}; "
        f"names: {', '.join(NAMES)}"
    )


class CheckedFunction:
    """A function of the caller's, of which what it returns is looked at: not the pixels, nothing waits.

    Args:
        size: that it must return; None: that of the first batch.
    """

    def __init__(self, function: BatchFunction, size: Size | None) -> None:
        self._function = function
        self._size = size
        self._name = getattr(function, "__qualname__", type(function).__name__)
        try:
            parameters = set(inspect.signature(function).parameters)
        except ValueError:  # of a function written in C
            parameters = set()
        self._takes_view = "view" in parameters
        self.takes_labels = "labels" in parameters

    def apply(
        self, images: torch.Tensor, ids: torch.Tensor, epoch: int, labels: torch.Tensor, view: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels that the function returns.

        Raises:
            SettingError: they are not what `BatchFunction` says.
        """
        more: dict[str, Any] = {"view": view} if self._takes_view else {}
        if not self.takes_labels:
            return self._checked(self._function(images, ids, epoch, **more), images), labels
        returned = self._function(images, ids, epoch, labels=labels, **more)
        if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
            raise SettingError(
                f"augment function {self._name} takes labels, so it must return images and labels, got "
                f"{type(returned).__name__}"
            )
        mixed = returned[1]
        if not isinstance(mixed, torch.Tensor) or mixed.shape[:1] != labels.shape[:1] or mixed.ndim > 2:
            got = [*mixed.shape] if isinstance(mixed, torch.Tensor) else type(mixed).__name__
            raise SettingError(
                f"augment function {self._name} must return labels [{len(labels)}] or "
                f"[{len(labels)}, classes], got {got}"
            )
        return self._checked(returned[0], images), mixed

    def _checked(self, returned: object, images: torch.Tensor) -> torch.Tensor:
        height, width = ("height", "width") if self._size is None else sides(self._size)
        wanted = (
            f"{_name(images.dtype)} [{len(images)}, {height}, {width}, {images.shape[3]}] on {images.device}"
        )
        if not isinstance(returned, torch.Tensor):
            got, remedy = type(returned).__name__, "return a torch tensor"
        else:
            remedy = _flaw(returned, images, self._size)
            if not remedy:
                self._size = as_size(*returned.shape[1:3])
                return returned
            got = f"{_name(returned.dtype)} {list(returned.shape)} on {returned.device}"
        raise SettingError(f"augment function {self._name} must return {wanted}, got {got}; {remedy}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _flaw(returned: torch.Tensor, images: torch.Tensor, size: Size | None) -> str:
    """What the caller's function has to change; nothing if it is right."""
    shape = [*returned.shape] if returned.ndim == 4 else [0] * 4
    channels = images.shape[3]
    flaws = {
        "this is NCHW: return images.permute(0, 2, 3, 1), NHWC": shape[1] == channels != shape[3],
        "return NHWC, with as many channels as it was given": shape[3] != channels,
        "return as many pictures as it was given, in their order": shape[0] != len(images),
        f"return 0-{torch.iinfo(images.dtype).max:,}; the loader normalises for dtype='float32'": (
            returned.dtype != images.dtype
        ),
        "leave them on the device that they came on": returned.device != images.device,
        "return the size that the loader was built with, or that of the first batch": (
            size is not None and sides(size) != (shape[1], shape[2])
        ),
    }
    return next((remedy for remedy, applies in flaws.items() if applies), "")


class BatchAugmentation:
    """What `loaders.augment.draw.draw` draws, applied to a batch.

    Args:
        size: that crops are resized to; None where they are taken already, and only colours
            are left to do.
    """

    def __init__(self, settings: RandomAugmentation, seed: int, size: Size | None) -> None:
        self._settings = settings
        self._seed = seed
        self._size = size

    def __call__(self, images: torch.Tensor, ids: torch.Tensor, epoch: int) -> torch.Tensor:
        """[n, height, width, channels] to [n, height, width, channels] of `size`, of the same dtype."""
        stored = as_size(*images.shape[1:3])
        size = stored if self._size is None else self._size
        draws = draw(self._settings, stored, size, self._seed, epoch, ids.numpy())
        columns = np.concatenate((draws.boxes, draws.colors, draws.mirrored[:, None]), axis=1)
        drawn = upload(torch.from_numpy(columns.astype(np.float32)), images.device)  # in one copy
        boxes, colors, mirrored = drawn[:, :4], drawn[:, 4:8], drawn[:, 8] > 0
        shape = (len(images), *sides(size), images.shape[3])
        out = torch.empty(shape, dtype=images.dtype, device=images.device)
        for start in range(0, len(images), _CHUNK):
            part = slice(start, start + _CHUNK)
            floats = images[part].permute(0, 3, 1, 2).to(torch.float32)
            if self._size is not None:
                floats = crop_and_resize(floats, boxes[part], mirrored[part], size)
            if self._settings.jitters:
                floats = color_jitter(floats, colors[part], shifts_hue=self._settings.hue > 0)
            out[part] = floats.round_().to(images.dtype).permute(0, 2, 3, 1)
        return out


def crop_and_resize(
    images: torch.Tensor, boxes: torch.Tensor, mirrored: torch.Tensor, size: Size
) -> torch.Tensor:
    """float [n, channels, *size] of boxes (left, top, width, height) of float [n, channels, height, width].

    Each is the crop's own antialiased bilinear resize, as `loaders.augment.cpu.resize`: two products with
    matrices of weights, of shapes that depend on no value, so that nothing waits for the device.
    """
    rows, columns = sides(size)
    left, top, width, height = boxes.T
    down = weights(top, height, images.shape[2], rows)
    across = weights(left, width, images.shape[3], columns)
    across = torch.where(mirrored[:, None, None], across.flip(1), across)
    return down[:, None] @ images @ across[:, None].transpose(2, 3)


def weights(
    start: torch.Tensor, length: torch.Tensor, side: int, count: int, *, alone: bool = True
) -> torch.Tensor:
    """float [n, count, side]: how much of each of `side` pixels goes into each of `count`.

    A triangle as wide as two pixels of the coarser side, over `length` pixels from `start` on, floats [n],
    `alone` or with those around them: Pillow's bilinear filter, see
    https://github.com/python-pillow/Pillow/blob/main/src/libImaging/Resample.c
    """
    scale = (length / count)[:, None, None]
    pixels = torch.arange(side, device=start.device, dtype=torch.float32)
    centres = start[:, None, None] + (torch.arange(count, device=start.device)[:, None] + 0.5) * scale
    found = (1 - (pixels + 0.5 - centres).abs() / scale.clamp(min=1)).clamp_(min=0)
    if alone:
        first, last = start[:, None, None], (start + length)[:, None, None]
        found = found * ((pixels >= first) & (pixels < last))
    # what lies outside of the picture is made of nothing: black
    return found / found.sum(dim=2, keepdim=True).clamp_(min=torch.finfo(found.dtype).tiny)


def color_jitter(images: torch.Tensor, colors: torch.Tensor, *, shifts_hue: bool = True) -> torch.Tensor:
    """float [n, 3, height, width], 0-255, with factors of brightness, contrast, saturation and shift of hue.

    Each picture with its own, as torchvision's `adjust_*` functions do it with one for all.
    """
    brightness, contrast, saturation, hue = colors.T[:, :, None, None, None]
    images = (images * brightness).clamp_(0, 255)
    mean = _grey(images).floor().mean(dim=(1, 2, 3), keepdim=True)
    images = _blend(images, mean, contrast)
    images = _blend(images, _grey(images).floor(), saturation)
    return _shift_hue(images, hue[..., 0]) if shifts_hue else images


def _blend(images: torch.Tensor, other: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (images * factor + other * (1 - factor)).clamp_(0, 255)


def _grey(images: torch.Tensor) -> torch.Tensor:
    red, green, blue = (images[:, channel : channel + 1] for channel in range(3))
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue


def _shift_hue(images: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Through HSV and back; `shift` [n, 1, 1] is a share of the circle."""
    most, least = images.max(dim=1).values, images.min(dim=1).values
    span = most - least
    red, green, blue = images.unbind(1)
    safe = torch.where(span == 0, torch.ones_like(span), span)
    sector = torch.where(
        most == red,
        (green - blue) / safe,
        torch.where(most == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sector = (sector + 6 * shift) % 6
    # each channel falls from `most` to `least` and back, a third of the circle after the other
    # https://en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative
    channels = []
    for number in (5, 3, 1):
        k = (number + sector) % 6
        channels.append(most - span * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)

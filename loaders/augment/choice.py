"""What `augment` of `loaders.build` stands for: a name, random draws, or a function of the caller's."""

from collections.abc import Callable
from typing import TypeAlias

import torch

from loaders.augment.draw import RandomAugmentation
from precache.errors import SettingError, check_choice
from precache.sizes import Size, as_size, sides

BatchFunction: TypeAlias = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(images uint8 [n, height, width, channels], all that is stored, on the device, ids int64 [n] on the CPU,
epoch) -> images uint8 [n, height, width, channels] on the same device: as many, of the `size` that `build`
was given, or else all of one."""

NAMES = ("crop", "eval", "train")
_RATIO_TO_SERVED = 256 / 224


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

    def __call__(self, images: torch.Tensor, ids: torch.Tensor, epoch: int) -> torch.Tensor:
        """What the function returns.

        Raises:
            SettingError: it is not what `BatchFunction` says.
        """
        returned: object = self._function(images, ids, epoch)
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
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        raise SettingError(f"augment function {name} must return {wanted}, got {got}; {remedy}")


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
        f"return {_name(images.dtype)}; the loader normalises for dtype='float32'": (
            returned.dtype != images.dtype
        ),
        "leave them on the device that they came on": returned.device != images.device,
        "return the size that the loader was built with, or that of the first batch": (
            size is not None and sides(size) != (shape[1], shape[2])
        ),
    }
    return next((remedy for remedy, applies in flaws.items() if applies), "")


def source_size(size: Size) -> Size:
    """What a raw tree is resized to, so that crops of it are served as `size`."""
    height, width = sides(size)
    return as_size(round(height * _RATIO_TO_SERVED), round(width * _RATIO_TO_SERVED))

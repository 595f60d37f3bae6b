"""Random crops, flips and colour jitter of a whole batch, on the device that it is on."""

import numpy as np
import torch

from loaders.augment.draw import RandomAugmentation, draw
from loaders.deliver.devices import upload
from precache.pictures.sizes import Size, as_size, sides

_CHUNK = 32  # pictures at a time: bounds the memory of their float copies
# ITU-R BT.601, as torchvision's rgb_to_grayscale has it
_LUMA = (0.2989, 0.587, 0.114)


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

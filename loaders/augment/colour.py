"""Change the colours of pictures, on a device."""

import torch


def color_jitter(images: torch.Tensor, colors: torch.Tensor, *, shifts_hue: bool = True) -> torch.Tensor:
    """Return the images with each picture's own brightness, contrast, saturation and hue.

    Values are those of torchvision's `adjust_*` functions, which take one factor for all pictures.

    Args:
        images: float [n, 3, height, width], 0-255.
        colors: float [n, 4], factors of brightness, contrast and saturation, and the shift of hue.
        shifts_hue: whether to apply the shifts of hue.
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
    """Return the luma, ITU-R BT.601, as torchvision's `rgb_to_grayscale`, whose import takes a second."""
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    return 0.2989 * red + 0.587 * green + 0.114 * blue


def _shift_hue(images: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Shift the hue, through HSV and back, by `shift` [n, 1, 1], a share of the circle."""
    high, low = images.max(dim=1).values, images.min(dim=1).values
    span = high - low
    red, green, blue = images.unbind(1)
    divisor = torch.where(span == 0, torch.ones_like(span), span)
    sector = torch.where(
        high == red,
        (green - blue) / divisor,
        torch.where(high == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    sector = (sector + 6 * shift) % 6
    # each channel falls from `high` to `low` and rises back, a third of the circle apart
    # https://en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative
    channels = []
    for number in (5, 3, 1):
        k = (number + sector) % 6
        channels.append(high - span * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)

"""From a decoded batch to one that a training step takes: device, dtype, layout."""

import torch

from loaders.augment import Augmentation
from loaders.batch import Batch, DecodedBatch

# Mean and standard deviation of ImageNet's RGB values in 0-1, as torchvision's models expect them:
# https://pytorch.org/vision/stable/models.html
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def deliver(
    decoded: DecodedBatch,
    device: torch.device,
    dtype: torch.dtype,
    epoch: int,
    augmentation: Augmentation | None,
) -> Batch:
    """Move `decoded` to `device`, augment it there, and normalise it if `dtype` is floating."""
    # uint8 crosses the bus: normalising on the device moves 4x fewer bytes than float32.
    images = _move(decoded.images, device)
    if augmentation is not None:
        images = augmentation(images, decoded.ids, epoch)
    images = images.permute(0, 3, 1, 2)  # NHWC seen as NCHW is channels-last
    labels = _move(decoded.labels, device)
    if dtype.is_floating_point:
        images = normalise(images, dtype)
    return Batch(images, labels, decoded.ids)


def normalise(images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [n, 3, height, width] to `dtype`: (value / 255 - mean) / std, computed in float32."""
    mean = torch.tensor(IMAGENET_MEAN, device=images.device).mul_(255).view(1, 3, 1, 1)
    std = torch.tensor(IMAGENET_STD, device=images.device).mul_(255).view(1, 3, 1, 1)
    return images.to(torch.float32).sub_(mean).div_(std).to(dtype)


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    if tensor.is_cuda:
        # made on a backend's own stream: its memory must outlive what this stream does with it
        tensor.record_stream(torch.cuda.current_stream(device))
    return tensor.to(device)

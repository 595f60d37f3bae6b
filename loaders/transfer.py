"""From a decoded batch to one that a training step takes: device, augmentation, dtype, layout.

On CUDA all of it is queued on the loader's lane, ahead of the training: the copy from pinned memory, the
augmentation, the normalising. The training's stream waits for an event, its thread for nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from loaders.augment.choice import BatchFunction
from loaders.batch import Batch, DecodedBatch
from loaders.devices import Lane, upload
from precache.errors import ImageError

# Mean and standard deviation of ImageNet's RGB values in 0-1, as torchvision's models expect them:
# https://pytorch.org/vision/stable/models.html
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch on its way.

    Attributes:
        ready: recorded behind the work on it; None where that is done.
        refused: as of `DecodedBatch`.
    """

    batch: Batch
    ready: torch.cuda.Event | None
    refused: Mapping[int, ImageError]


class Transfer:
    """Sends batches to a device, in the thread that reads ahead, and receives them in the caller's."""

    def __init__(self, lane: Lane, dtype: torch.dtype, augmentation: BatchFunction | None) -> None:
        self.lane = lane
        self._dtype = dtype
        self._augmentation = augmentation

    def send(self, decoded: DecodedBatch, epoch: int, padding: torch.Tensor | None = None) -> Sent:
        """Queue the work on `decoded`, where the lane is active; `padding` as of `Batch`, or None."""
        if not len(decoded.ids):  # nothing could be decoded: there is nothing to work on
            empty = Batch(decoded.images.permute(0, 3, 1, 2), decoded.labels, decoded.ids)
            return Sent(empty, None, decoded.refused)
        batch = self._prepare(decoded, epoch, padding)
        return Sent(batch, self.lane.mark(), decoded.refused)

    def receive(self, sent: Sent) -> Batch:
        """The batch, for use on the current stream."""
        if sent.ready is not None:
            current = torch.cuda.current_stream(self.lane.device)
            current.wait_event(sent.ready)
            for tensor in sent.batch:
                tensor.record_stream(current)  # its memory is reused only after what this stream does
        return sent.batch

    def _prepare(self, decoded: DecodedBatch, epoch: int, padding: torch.Tensor | None) -> Batch:
        # uint8 crosses the bus: normalising on the device moves 4x fewer bytes than float32.
        images = upload(self.lane.take(decoded.images, decoded.ready), self.lane.device)
        if self._augmentation is not None:
            images = self._augmentation(images, decoded.ids, epoch)
        images = images.permute(0, 3, 1, 2)  # NHWC seen as NCHW is channels-last
        labels = upload(decoded.labels, self.lane.device)
        if self._dtype.is_floating_point:
            images = normalise(images, self._dtype)
        return Batch(images, labels, decoded.ids, padding)


def normalise(images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [n, 3, height, width] to `dtype`: (value / 255 - mean) / std, computed in float32."""
    scales = upload(255 * torch.tensor([IMAGENET_MEAN, IMAGENET_STD]), images.device)
    mean, std = scales.view(2, 1, 3, 1, 1)
    return images.to(torch.float32).sub_(mean).div_(std).to(dtype)

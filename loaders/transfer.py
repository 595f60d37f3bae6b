"""From a decoded batch to one that a training step takes: device, augmentation, dtype, layout.

On CUDA all of it is queued on the loader's lane, ahead of the training: the copy from pinned memory, the
augmentation, the normalising. The training's stream waits for an event, its thread for nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from loaders.augment.choice import BatchFunction, CheckedFunction
from loaders.augment.draw import draw_keys
from loaders.batch import Batch, DecodedBatch, Positions
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

    def __init__(
        self,
        lane: Lane,
        dtype: torch.dtype,
        augmentation: BatchFunction | CheckedFunction | None,
        views: int = 1,
    ) -> None:
        self.lane = lane
        self._dtype = dtype
        self._views = views
        self._augmentation = augmentation

    def send(
        self,
        decoded: DecodedBatch,
        epoch: int,
        padding: torch.Tensor | None = None,
        occurrences: Positions | None = None,
    ) -> Sent:
        """Queue the work on `decoded`, where the lane is active.

        Args:
            padding: as of `Batch`, or None.
            occurrences: as of `loaders.batch.Request`, of what is in `decoded`.
        """
        if not len(decoded.ids):  # nothing could be decoded: there is nothing to work on
            empty = Batch(decoded.images.permute(0, 3, 1, 2), decoded.labels, decoded.ids)
            return Sent(empty, None, decoded.refused)
        batch = self._prepare(decoded, epoch, padding, occurrences)
        return Sent(batch, self.lane.mark(), decoded.refused)

    def receive(self, sent: Sent) -> Batch:
        """The batch, for use on the current stream."""
        if sent.ready is not None:
            current = torch.cuda.current_stream(self.lane.device)
            current.wait_event(sent.ready)
            for tensor in (*sent.batch.views, sent.batch.labels):
                tensor.record_stream(current)  # its memory is reused only after what this stream does
        return sent.batch

    def _prepare(
        self,
        decoded: DecodedBatch,
        epoch: int,
        padding: torch.Tensor | None,
        occurrences: Positions | None,
    ) -> Batch:
        # uint8 crosses the bus: normalising on the device moves 4x fewer bytes than float32.
        images = upload(self.lane.take(decoded.images, decoded.ready), self.lane.device)
        labels = upload(decoded.labels, self.lane.device)
        # cropped already, a view each, or pictures of which all are to be cropped
        cropped = len(images) == self._views * len(decoded.ids)
        parts = list(images.chunk(self._views)) if cropped else [images] * self._views
        views = []
        for view, part in enumerate(parts):
            pictures = part
            if isinstance(self._augmentation, CheckedFunction):
                # a function of the caller's may change what it is given
                given = part.clone() if view < self._views - 1 else part
                pictures, labels = self._augmentation.apply(given, decoded.ids, epoch, labels, view)
            elif self._augmentation is not None:
                keys = draw_keys(decoded.ids.numpy(), view, occurrences)
                pictures = self._augmentation(part, torch.from_numpy(keys), epoch)
            pictures = pictures.permute(0, 3, 1, 2)  # NHWC seen as NCHW is channels-last
            views.append(normalise(pictures, self._dtype) if self._dtype.is_floating_point else pictures)
        return Batch(views[0], labels, decoded.ids, padding, other_views=views[1:])


def normalise(images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [n, 3, height, width] to `dtype`: (value / 255 - mean) / std, computed in float32."""
    scales = upload(255 * torch.tensor([IMAGENET_MEAN, IMAGENET_STD]), images.device)
    mean, std = scales.view(2, 1, 3, 1, 1)
    return images.to(torch.float32).sub_(mean).div_(std).to(dtype)

"""From what a backend reads to a batch that a training step takes: fields, device, augmentation, dtype.

On CUDA all of it is queued on the loader's lane, ahead of the training: the copy from pinned memory, the
augmentation, the normalising. The training's stream waits for an event, its thread for nothing.
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, TypeAlias

import numpy as np
import torch

from loaders.augment.device import BatchFunction, CheckedFunction
from loaders.augment.draw import draw_keys
from loaders.batch import MASK, Batch, DecodedBatch, Reader, Request, masks_in
from loaders.dataset import RAW, SplitData
from loaders.deliver import Lane, upload
from loaders.fields import Fields, labels_of
from loaders.settings import LoaderSpec, Normalize, numbers_of
from precache.errors import SettingError

# Mean and standard deviation of ImageNet's RGB values in 0-1, as torchvision's models expect them:
# https://pytorch.org/vision/stable/models.html
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
IMAGENET = IMAGENET_MEAN, IMAGENET_STD
Scales: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, of values in 0-1."""
STORED = {1: torch.uint8, 2: torch.uint16}
"""Bytes of a value -> dtype of pictures that are stored."""


class Pipeline:
    """One split on its way: read by a backend, sent to the device.

    Args:
        late: what is left to do with a batch on the device.
        scales: that floating point is normalised with.
        fields: puts into batches what else is known of their samples.

    Attributes:
        lane: that of the loader.
        data: the split.
        random_access: as of `Reader`.
        size: of what is served; None where only the first batch will tell.
    """

    def __init__(
        self,
        spec: LoaderSpec,
        data: SplitData,
        lane: Lane,
        reader: Reader,
        late: BatchFunction | CheckedFunction | None,
        scales: Scales | None,
        fields: Fields | None,
    ) -> None:
        self.data, self.lane = data, lane
        self.random_access = reader.random_access
        self.size = None if isinstance(late, CheckedFunction) else spec.served
        self._dtype, self._views = spec.dtype, spec.serving.views
        self._stored = STORED[data.dtype.itemsize]
        self._reader, self._fields = reader, fields
        self._late, self._scales = late, scales

    def read(self, requests: Iterator[Request]) -> Generator[Batch, None, None]:
        """Yield one batch per request, where the lane is active; `receive` is for the caller's thread."""
        asked: deque[Request] = deque()  # the reader looks ahead

        def ask() -> Iterator[Request]:
            for request in requests:
                asked.append(request)
                yield request

        with closing(self._reader.read(ask())) as batches:  # type: ignore[type-var]  # of a generator
            for decoded in batches:
                yield self.send(asked.popleft(), decoded)

    def send(self, request: Request, decoded: DecodedBatch) -> Batch:
        """Queue the work on `decoded`, which answers `request`."""
        refused = dict(decoded.refused)
        there = request.without(refused)
        # uint8 crosses the bus: normalising on the device moves 4x fewer bytes than float32.
        images = upload(self.lane.take(decoded.images, decoded.ready), self.lane.device)
        fields: dict[str, Any] = {}
        if self._fields is not None:
            fields, damaged = self._fields.describe(there)
            if damaged:
                numbers = np.delete(np.arange(len(request.positions)), [*refused])
                refused |= {int(numbers[number]): error for number, error in damaged.items()}
                kept = np.isin(np.arange(len(numbers)), [*damaged], invert=True)
                rows = np.flatnonzero(np.tile(kept, len(images) // len(kept)))  # of each view
                images = images[upload(torch.from_numpy(rows), self.lane.device)]
                there = request.without(refused)
        batch = self._prepare(images.view(self._stored), there, fields)
        batch.refused = refused
        return batch

    def _prepare(self, images: torch.Tensor, request: Request, fields: dict[str, Any]) -> Batch:
        ids = torch.from_numpy(self.data.ids[request.positions])
        labels = upload(labels_of(self.data, request.positions), self.lane.device)
        if not len(ids):  # nothing could be decoded: there is nothing to work on
            return Batch(images.permute(0, 3, 1, 2), labels, ids, fields=fields)
        padding = None
        if request.padding:
            padding = torch.arange(len(ids)) >= len(ids) - request.padding
        # cropped already, a view each, or pictures of which all are to be cropped
        cropped = len(images) == self._views * len(ids)
        parts = list(images.chunk(self._views)) if cropped else [images] * self._views
        views = []
        for view, part in enumerate(parts):
            pictures = part
            if isinstance(self._late, CheckedFunction):
                # a function of the caller's may change what it is given
                given = part.clone() if view < self._views - 1 else part
                pictures, labels = self._late.apply(given, ids, request.epoch, labels, view)
            elif self._late is not None:
                keys = draw_keys(ids.numpy(), view, request.places)
                pictures = self._late(part, torch.from_numpy(keys), request.epoch)
            pictures = pictures.permute(0, 3, 1, 2)  # NHWC seen as NCHW is channels-last
            if self._scales is not None:
                pictures = normalise(pictures, self._dtype, self._scales)
            views.append(pictures)
        if (masks := masks_in(fields)) is not None:
            fields = {**fields, MASK: upload(masks, self.lane.device)}
        batch = Batch(views[0], labels, ids, padding, fields, views[1:])
        batch.ready = self.lane.mark()
        return batch

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""
        self._reader.close()
        if self._fields is not None:
            self._fields.close()


def receive(batch: Batch, device: torch.device) -> Batch:
    """`batch`, which was sent to `device`, for use on the current stream."""
    if batch.ready is not None:
        current = torch.cuda.current_stream(device)
        current.wait_event(batch.ready)
        batch.ready = None
        masks = masks_in(batch.fields)
        for tensor in (*batch.views, batch.labels, *([] if masks is None else [masks])):
            tensor.record_stream(current)  # its memory is reused only after what this stream does
    return batch


def find_scales(asked: Normalize, data: SplitData) -> Scales:
    """What `normalize` of `loaders.Serving` means for `data`.

    Raises:
        SettingError: the statistics of the dataset are asked for, and it has none.
    """
    if asked is None:
        return (0.0,) * data.channels, (1.0,) * data.channels
    if asked == "imagenet":
        if data.channels != 3:
            raise SettingError(
                f"normalize 'imagenet' is for RGB, not for {data.channels}-channel pictures as of "
                f"{data.path}; give normalize='dataset', (mean, std) or None"
            )
        return IMAGENET
    if asked == "dataset":
        return _of_dataset(data)
    mean, std = (tuple(map(float, numbers_of(part))) for part in asked)  # type: ignore[arg-type]  # a pair
    channels = data.channels
    if len(mean) not in (1, channels):
        raise SettingError(
            f"normalize has {len(mean)} numbers each, the channels of {data.path} are {channels}; "
            f"give as many"
        )
    return mean * (channels // len(mean)), std * (channels // len(std))


def _of_dataset(data: SplitData) -> Scales:
    if data.statistics is None:
        why = "a raw tree, of which they are not known" if data.kind == RAW else "converted without them"
        remedy = "convert it" if data.kind == RAW else "convert it again"
        raise SettingError(
            f"normalize 'dataset' needs mean and standard deviation, and {data.path} is {why}; "
            f"{remedy}, or give normalize=(mean, std)"
        )
    mean, std = data.statistics
    if min(std) == 0:
        raise SettingError(
            f"normalize 'dataset': channel {std.index(0)} of {data.path} has the same value everywhere, so "
            f"its standard deviation is 0; give normalize=(mean, std)"
        )
    return mean, std


def normalise(images: torch.Tensor, dtype: torch.dtype, scales: Scales = IMAGENET) -> torch.Tensor:
    """[n, channels, height, width] to `dtype`: (value / most - mean) / std, computed in float32.

    The most that a value can be is 255, or 65,535 of uint16.
    """
    both = upload(torch.iinfo(images.dtype).max * torch.tensor(scales), images.device)
    mean, std = both.view(2, 1, -1, 1, 1)
    return images.to(torch.float32).sub_(mean).div_(std).to(dtype)

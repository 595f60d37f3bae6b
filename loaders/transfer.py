"""Turn what a backend reads into batches for training: fields, device, augmentation, dtype.

On CUDA all work is queued on the loader's lane, ahead of the training: the copy from pinned memory, the
augmentation, the normalising. The training's stream waits for an event; its thread does not wait.

`batch.labels` are on the loader's device; their form depends on the kind of labels:

    class    int64 [n]
    classes  float32 [n, classes]: 1 where the sample is of the class, else 0
    number   float32 [n] or [n, k]
    none     int64 [n], all -1

`batch.fields` has the samples' other values, by name, on the CPU; their form depends on the kind:

    int      int64 [n]
    float    float64 [n]: as it is stored
    vector   int64 or float64 [n, k]
    ragged   a list of n tensors, int64 or float64 [m] or [m, k]
    text     a list of n str
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, TypeAlias

import numpy as np
import torch

from loaders.augment.crops import Crops, LateAugmentation
from loaders.augment.draws import draw_keys
from loaders.augment.functions import CheckedFunction
from loaders.augment.mixing import draw_mixing, mix_images, mix_labels
from loaders.augment.policies import RandomAugmentation
from loaders.batch import Batch, DecodedBatch, Positions, Reader, Request
from loaders.dataset import RAW, SplitData
from loaders.device import Lane, upload
from loaders.read.filler import BufferPool
from loaders.settings import LoaderSpec, Normalize, as_floats
from precache.dataset.columns import Column
from precache.errors import SettingError
from precache.pictures.images import sides

# Mean and standard deviation of ImageNet's RGB values in 0-1, as torchvision's models expect them:
# https://pytorch.org/vision/stable/models.html
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
IMAGENET = IMAGENET_MEAN, IMAGENET_STD
MeanAndStd: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, of values in 0-1."""
_IMAGENET: dict[int, MeanAndStd] = {
    1: ((0.449,), (0.226,)),  # the mean of the three channels, as timm has it for models of one channel
    3: IMAGENET,
}
"""Mean and standard deviation by the number of channels."""


class Pipeline:
    """Pipeline of one split: a backend reads it, and its batches are finished on the device.

    Args:
        reader: backend that reads the split.
        late: augmentation that is done with a batch on the device; None: the backend has done all.
        crops: what the backend serves.
        mean_and_std: with which floating-point images are normalised; None: images are integers.

    Attributes:
        lane: lane of the loader.
        random_access: see `Reader`.
        size: size of the served pictures; None if only the first batch will show it.
    """

    def __init__(
        self,
        spec: LoaderSpec,
        data: SplitData,
        lane: Lane,
        reader: Reader,
        late: LateAugmentation | CheckedFunction | None,
        crops: Crops,
        mean_and_std: MeanAndStd | None,
    ) -> None:
        self._data, self.lane = data, lane
        self._fields = sorted(data.index.fields.items())
        self.random_access = reader.random_access
        views = late.views if isinstance(late, LateAugmentation) else crops.views
        makes_size = isinstance(late, CheckedFunction) or crops.per_picture is not None
        self.size = None if makes_size else views[0].size
        self._dtype, self._seed = spec.dtype, spec.seed
        self._per_picture, self._made_size = crops.per_picture, spec.size
        self._views = len(views)
        is_mixed = isinstance(spec.augment, RandomAugmentation) and spec.augment.mixes
        self._mixes: RandomAugmentation | None = spec.augment if is_mixed else None
        self._reader, self._late, self._mean_and_std = reader, late, mean_and_std
        self._floats: BufferPool | None = None  # on the CPU, for the largest batch so far

    def read(self, requests: Iterator[Request]) -> Generator[Batch, None, None]:
        """Yield one batch per request, in a thread in which the lane is active; see `receive`."""
        pending: deque[Request] = deque()  # the reader looks ahead in the requests

        def pass_on() -> Iterator[Request]:
            for request in requests:
                pending.append(request)
                yield request

        with closing(self._reader.read(pass_on())) as batches:  # type: ignore[type-var]  # a generator
            for decoded in batches:
                yield self.send(pending.popleft(), decoded)

    def send(self, request: Request, decoded: DecodedBatch) -> Batch:
        """Queue the work on `decoded`, the backend's answer to `request`, and return the batch."""
        # uint8 crosses the bus: normalising on the device moves 4x fewer bytes than float32.
        views = [upload(view, self.lane.device) for view in decoded.views]
        batch = self._prepare(views, request.drop(decoded.refused))
        batch.refused = decoded.refused
        return batch

    def _prepare(self, views: Sequence[torch.Tensor], request: Request) -> Batch:
        """Augment, mix and normalise the views, and return them with labels and fields as a batch."""
        ids = torch.from_numpy(self._data.ids[request.positions])
        labels = upload(batch_labels(self._data, request.positions), self.lane.device)
        fields = {name: field_values(column, request.positions) for name, column in self._fields}
        if not len(ids):  # no picture could be decoded: a batch that `Loader` refuses
            return Batch(views[0], labels, ids, fields=fields)
        padding = None
        if request.padding:
            padding = torch.from_numpy(np.arange(len(ids)) >= len(ids) - request.padding)
        served, first_mixing = [], None
        for number in range(self._views):
            pictures = views[number if len(views) > 1 else 0]
            if isinstance(self._late, CheckedFunction):
                pictures, labels = self._late.apply(pictures, ids, request.epoch, labels)
            elif self._late is not None:
                keys = draw_keys(ids.numpy(), number, request.places)
                pictures = self._late.apply(number, pictures, keys, request.epoch)
            if self._mixes is not None:
                shape = pictures.shape[1], pictures.shape[2]
                alphas = self._mixes.mixup, self._mixes.cutmix
                mixing = draw_mixing(*alphas, self._seed, request.epoch, ids.numpy(), shape)
                if mixing is not None:
                    pictures = mix_images(pictures, mixing)
                    # in views of other sizes, a box of CutMix has whole pixels of another share
                    first_mixing = first_mixing or mixing
            served.append(self._finish(pictures))
        batch = Batch(served if len(served) > 1 else served[0], labels, ids, padding, fields)
        if self._mixes is not None:  # also where a batch of one picture has no other to mix it with
            batch[1] = mix_labels(labels, first_mixing, len(self._data.classes))
        if first_mixing is not None:
            batch.partners = torch.from_numpy(first_mixing.partners)
        batch.ready = self.lane.mark()
        return batch

    def _finish(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return NHWC pictures as NCHW in the loader's dtype, normalised where that is one of floats."""
        pictures = pictures.permute(0, 3, 1, 2)  # NHWC seen as NCHW is channels-last
        if self._per_picture is not None:
            self._check_made(pictures, self._per_picture.name)
            if pictures.dtype != torch.uint8:
                return pictures.to(self._dtype)
        if self._mean_and_std is None:
            return pictures
        out = self._take_floats(pictures) if pictures.device.type == "cpu" else None
        return normalise(pictures, self._dtype, self._mean_and_std, out)

    def _check_made(self, pictures: torch.Tensor, name: str) -> None:
        """Raise SettingError if a function of the caller has not made the pictures that the settings ask for.

        Args:
            pictures: [n, channels, height, width].
        """
        is_bytes, (_, channels, height, width) = pictures.dtype == torch.uint8, pictures.shape
        if self._made_size is not None and sides(self._made_size) != (height, width):
            raise SettingError(
                f"size is {self._made_size}, and {name} of per_picture returned pictures of {height}x{width}",
                remedy="end it with a crop or a resize to this size, or leave out size and set_size",
            )
        if not is_bytes and not self._dtype.is_floating_point:
            raise SettingError(
                f"dtype is 'uint8', and {name} of per_picture returned {pictures.dtype}",
                remedy="build with dtype='float32', or let it return uint8",
            )
        if is_bytes and self._mean_and_std is not None and channels != self._data.channels:
            raise SettingError(
                f"normalize is for the {self._data.channels} channels of {self._data.path}, and {name} of "
                f"per_picture returned {channels}",
                remedy="let it return floats, which are not normalised again, or build with dtype='uint8'",
            )

    def _take_floats(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return float32 memory for as many pictures of the same shape, reused once no tensor shows it."""
        count, channels, height, width = pictures.shape
        bytes = pictures.numel() * torch.float32.itemsize
        if self._floats is None or self._floats.bytes < bytes:
            self._floats = BufferPool(bytes, self.lane.device)
        floats = self._floats.take(bytes).view(torch.float32)
        return floats.view(count, height, width, channels).permute(0, 3, 1, 2)

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""
        self._reader.close()


def receive(batch: Batch, device: torch.device) -> Batch:
    """Make the current stream wait until `batch`, which was sent to `device`, is ready, and return it."""
    if batch.ready is not None:
        current = torch.cuda.current_stream(device)
        current.wait_event(batch.ready)
        batch.ready = None
        for tensor in (*batch.views, batch.labels):
            tensor.record_stream(current)  # so that its memory is reused only after the work of this stream
    return batch


def find_mean_and_std(normalize: Normalize, data: SplitData) -> MeanAndStd:
    """Return the mean and standard deviation that `normalize` of `loaders.build` stands for.

    Raises:
        SettingError: it is "dataset", and the dataset has no statistics; or the channels are not as many.
    """
    channels = data.channels
    if normalize is None:
        return (0.0,) * channels, (1.0,) * channels
    if isinstance(normalize, str) and normalize == "imagenet":
        return _IMAGENET[channels]
    if isinstance(normalize, str):  # "dataset"
        if data.statistics is None:
            kind = "is a raw tree; convert it" if data.kind == RAW else "has none; convert it again"
            raise SettingError(
                f"normalize 'dataset' needs mean and standard deviation, and {data.path} {kind}, or give "
                f"normalize=(mean, std)"
            )
        mean, std = data.statistics.mean, data.statistics.std
        if min(std) == 0:
            raise SettingError(
                f"normalize 'dataset': channel {std.index(0)} of {data.path} has the same value everywhere, "
                f"so its standard deviation is 0",
                remedy="give normalize=(mean, std)",
            )
        return mean, std
    mean, std = map(as_floats, normalize)
    if len(mean) not in (1, channels):
        raise SettingError(
            f"normalize has {len(mean)} numbers each, the channels of {data.path} are {channels}",
            remedy="give as many",
        )
    return mean * (channels // len(mean)), std * (channels // len(std))


def normalise(
    images: torch.Tensor,
    dtype: torch.dtype,
    mean_and_std: MeanAndStd = IMAGENET,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return (images / 255 - mean) / std as `dtype`, computed in float32.

    Args:
        images: uint8 [n, channels, height, width].
        out: float32 in channels-last memory on the CPU, for the result; None: fresh memory.
    """
    scaled = np.float32(255) * np.array(mean_and_std, np.float32)
    if out is None:
        mean, std = upload(torch.from_numpy(scaled), images.device).view(2, 1, -1, 1, 1)
        return images.to(torch.float32).sub_(mean).div_(std).to(dtype)
    # A picture at a time stays in the cache of one CPU, rows of all channels are long enough for vector
    # instructions, and no thread waits for those that decode: several times as fast as a batch at a time.
    mean_row, std_row = np.tile(scaled, images.shape[3])
    rows = images.permute(0, 2, 3, 1).reshape(*images.shape[::2], -1).numpy()
    for picture, space in zip(rows, out.permute(0, 2, 3, 1).view(rows.shape).numpy(), strict=True):
        np.copyto(space, picture)
        np.subtract(space, mean_row, out=space)
        np.divide(space, std_row, out=space)
    return out.to(dtype)


def batch_labels(data: SplitData, positions: Positions) -> torch.Tensor:
    """Return the labels of samples in the form that the module describes, on the CPU."""
    if data.index.targets is None:
        return torch.from_numpy(data.labels[positions])
    targets = data.index.targets.select(positions)
    if targets.ends is None:
        with np.errstate(over="ignore"):  # a value beyond float32 becomes infinite
            return torch.from_numpy(targets.values.astype(np.float32))
    labels = np.zeros((len(targets), len(data.classes)), np.float32)
    labels[np.repeat(np.arange(len(targets)), np.diff(targets.ends, prepend=0)), targets.values] = 1
    return torch.from_numpy(labels)


def field_values(column: Column, positions: Positions) -> torch.Tensor | list[Any]:
    """Return the values of samples in the form that the module describes, in memory of their own."""
    selected = column.select(positions)
    if selected.kind == "text":
        return [selected.row_value(slot) for slot in range(len(selected))]
    if selected.ends is None:
        return torch.from_numpy(selected.values)
    return [torch.from_numpy(selected.row_array(slot)) for slot in range(len(selected))]

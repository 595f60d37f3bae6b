"""From what a backend reads to a batch that a training step takes: fields, device, augmentation, dtype.

On CUDA all of it is queued on the loader's lane, ahead of the training: the copy from pinned memory, the
augmentation, the normalising. The training's stream waits for an event, its thread for nothing.

`batch.labels` are on the loader's device, whatever the samples are labelled with:

    class    int64 [n]
    classes  float32 [n, classes]: 1 where the sample is of the class, else 0
    number   float32 [n] or [n, k]
    none     int64 [n], all -1

`batch.fields` has what else is known of the samples. All of it is on the CPU:

    int      int64 [n]
    float    float64 [n]: as it is stored
    vector   int64 or float64 [n, k]
    ragged   a list of n tensors, int64 or float64 [m] or [m, k], such as boxes
    text     a list of n str

Two kinds follow their picture through crops, resizing and mirroring; a function of the caller's gets the
whole of what is stored, and they are of that then:

    mask     uint8 [n, height, width] of `batch.images`, and on their device
    boxes    a list of n tensors, float32 [m, 4]: left, top, right and bottom in pixels of what is served, cut
             off where it or the picture ends; those outside are gone. NAME_kept has the numbers of the
             others, int64 [m], so that other fields can follow: `labels[kept]`
"""

from collections import OrderedDict, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from loaders.augment import BatchFunction, Boxes, CheckedFunction, Crops, Mirrored, draw_keys
from loaders.batch import MASK, Batch, DecodedBatch, Positions, Reader, Request, masks_in
from loaders.dataset import RAW, SplitData
from loaders.deliver import Lane, Pool, upload
from loaders.read.filler import BufferPool
from loaders.settings import LoaderSpec, Normalize, numbers_of
from precache.dataset.boxes import moved
from precache.dataset.columns import Column
from precache.dataset.index import REMEDY
from precache.errors import ImageError, SettingError
from precache.formats import FORMATS
from precache.formats.base import MaskFile
from precache.pictures import masks
from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import as_size, sides

# Mean and standard deviation of ImageNet's RGB values in 0-1, as torchvision's models expect them:
# https://pytorch.org/vision/stable/models.html
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
IMAGENET = IMAGENET_MEAN, IMAGENET_STD
Scales: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, of values in 0-1."""
_IMAGENET: dict[int, Scales] = {
    1: ((0.449,), (0.226,)),  # the mean of the three, as timm has it for models of one channel
    3: IMAGENET,
    4: ((*IMAGENET_MEAN, 0.0), (*IMAGENET_STD, 1.0)),  # ImageNet has no alpha: it stays as it is
}
"""By channels."""
STORED = {1: torch.uint8, 2: torch.uint16}
"""Bytes of a value -> dtype of pictures that are stored."""
_OPEN_FILES = 32  # of masks: a process may have 1,024 by default, on macOS 256


class Pipeline:
    """One split on its way: read by a backend, sent to the device.

    Args:
        late: what is left to do with a batch on the device.
        scales: that floating point is normalised with.
        followed: what becomes of each stored picture until it is served, whoever does it.

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
        followed: Crops,
    ) -> None:
        self.data, self.lane = data, lane
        self.random_access = reader.random_access
        self.size = None if isinstance(late, CheckedFunction) else spec.served
        self._dtype, self._views = spec.dtype, spec.serving.views
        self._stored = STORED[data.dtype.itemsize]
        self._reader, self._fields = reader, Fields(data, spec, followed)
        self._late, self._scales = late, scales
        self._floats: BufferPool | None = None  # on the CPU, of the largest batch so far

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
        images = upload(decoded.images, self.lane.device)
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
        padding = torch.from_numpy(np.arange(len(ids)) >= len(ids) - request.padding)
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
                out = self._take_floats(pictures) if pictures.device.type == "cpu" else None
                pictures = normalise(pictures, self._dtype, self._scales, out)
            views.append(pictures)
        batch = Batch(views[0], labels, ids, padding, fields, views[1:])
        batch.ready = self.lane.mark()
        return batch

    def _take_floats(self, pictures: torch.Tensor) -> torch.Tensor:
        """float32 for as many of the same shape; its memory comes back when nobody looks at it any more."""
        shape = (*pictures.shape[2:], pictures.shape[1] * torch.float32.itemsize)
        if self._floats is None or not self._floats.can_hold(len(pictures), shape):
            self._floats = BufferPool(len(pictures), as_size(*shape[:2]), self.lane.device, shape[2])
        return self._floats.take(len(pictures)).view(torch.float32).permute(0, 3, 1, 2)

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""
        self._reader.close()
        self._fields.close()


def receive(batch: Batch, device: torch.device) -> Batch:
    """`batch`, which was sent to `device`, for use on the current stream."""
    if batch.ready is not None:
        current = torch.cuda.current_stream(device)
        current.wait_event(batch.ready)
        batch.ready = None
        mask = masks_in(batch.fields)
        for tensor in (*batch.views, batch.labels, *([] if mask is None else [mask])):
            tensor.record_stream(current)  # its memory is reused only after what this stream does
    return batch


def find_scales(asked: Normalize, data: SplitData) -> Scales:
    """What `normalize` of `loaders.build` means for `data`.

    Raises:
        SettingError: the statistics of the dataset are asked for, and it has none.
    """
    if asked is None:
        return (0.0,) * data.channels, (1.0,) * data.channels
    if isinstance(asked, str) and asked == "imagenet":
        return _IMAGENET[data.channels]
    if isinstance(asked, str):  # "dataset"
        if data.statistics is None:
            kind = "is a raw tree; convert it" if data.kind == RAW else "has none; convert it again"
            raise SettingError(
                f"normalize 'dataset' needs mean and standard deviation, and {data.path} {kind}, or give "
                f"normalize=(mean, std)"
            )
        mean, std = data.statistics
        if min(std) == 0:
            raise SettingError(
                f"normalize 'dataset': channel {std.index(0)} of {data.path} has the same value everywhere, "
                f"so its standard deviation is 0; give normalize=(mean, std)"
            )
        return mean, std
    means, stds = map(numbers_of, asked)
    channels = data.channels
    if len(means) not in (1, channels):
        raise SettingError(
            f"normalize has {len(means)} numbers each, the channels of {data.path} are {channels}; "
            f"give as many"
        )
    return means * (channels // len(means)), stds * (channels // len(stds))


def normalise(
    images: torch.Tensor, dtype: torch.dtype, scales: Scales = IMAGENET, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[n, channels, height, width] to `dtype`: (value / most - mean) / std, computed in float32.

    The most that a value can be is 255, or 65,535 of uint16. `out`: where that may be done on the CPU,
    float32 in channels-last memory.
    """
    both = np.float32(torch.iinfo(images.dtype).max) * np.array(scales, np.float32)
    if out is None:
        mean, std = upload(torch.from_numpy(both), images.device).view(2, 1, -1, 1, 1)
        return images.to(torch.float32).sub_(mean).div_(std).to(dtype)
    # Each picture stays in the cache of one CPU, and rows of all channels are long enough for its vectors; no
    # thread waits for others, which decode: several times as fast as the above, of a batch at a time.
    mean_row, std_row = np.tile(both, images.shape[3])
    rows = images.permute(0, 2, 3, 1).reshape(*images.shape[::2], -1).numpy()
    for picture, place in zip(rows, out.permute(0, 2, 3, 1).view(rows.shape).numpy(), strict=True):
        np.copyto(place, picture)
        np.subtract(place, mean_row, out=place)
        np.divide(place, std_row, out=place)
    return out.to(dtype)


class Fields:
    """Fields and masks of what a reader decodes; `crops` are `followed` of `Pipeline`."""

    def __init__(self, data: SplitData, spec: LoaderSpec, crops: Crops) -> None:
        assert crops.size is not None
        self._data, self._crops = data, replace(crops, views=1)
        self._index, self._device = data.index, spec.device
        self._rows, self._columns = sides(crops.size)
        self._has_masks = "mask_checksums" in data.index
        self._check_masks = spec.reading.check != "never"
        self._pool = Pool(max(1, spec.workers), "mask")
        self._mask_files: OrderedDict[int, MaskFile] = OrderedDict()

    def close(self) -> None:
        """End the threads, and close the files."""
        self._pool.close()
        while self._mask_files:
            self._mask_files.popitem()[1].close()

    def describe(self, request: Request) -> tuple[dict[str, Any], dict[int, ImageError]]:
        """Fields of the samples asked for, and by their numbers why some are left out: for their masks.

        Raises:
            DatasetError: a shard cannot be read.
        """
        fields: dict[str, Any] = {}
        damaged: dict[int, ImageError] = {}
        if not (self._index.fields or self._has_masks):
            return fields, damaged
        rows = request.positions
        boxes, mirrored = self._crops.of(
            request.epoch, self._data.ids[rows], self._data.shapes_at(rows), request.places
        )
        if self._has_masks:
            mask, damaged = self._read_masks(rows, boxes, mirrored)
            if damaged:
                kept = np.delete(np.arange(len(rows)), [*damaged])
                rows, boxes, mirrored, mask = rows[kept], boxes[kept], mirrored[kept], mask[kept]
            fields[MASK] = upload(mask, self._device)
        for name, column in sorted(self._index.fields.items()):
            if name == self._data.boxes:
                assert self._data.rendering is not None
                sizes = self._index["source_sizes"][rows]
                stored = moved(column.select(rows), sizes, self._data.rendering, cut=True)
                each = enumerate(zip(boxes.tolist(), mirrored.tolist(), strict=True))
                followed = [self._follow(stored.array(row), *how) for row, how in each]
                fields[name] = [found for found, _ in followed]
                fields[f"{name}_kept"] = [kept for _, kept in followed]
            else:
                fields[name] = values_of(column, rows)
        return fields, damaged

    def _follow(
        self, stored: npt.NDArray[Any], crop: list[float], mirrored: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The boxes of a sample in what is served, and which of them these are."""
        left, top, width, height = crop
        scale = self._columns / width, self._rows / height
        boxes = (stored.reshape(-1, 4) - (left, top, left, top)) * (*scale, *scale)
        if mirrored:
            boxes[:, [0, 2]] = self._columns - boxes[:, [2, 0]]
        boxes = np.clip(boxes, 0, (self._columns, self._rows) * 2)
        kept = np.flatnonzero((boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1]))
        return torch.from_numpy(boxes[kept].astype(np.float32)), torch.from_numpy(kept)

    def _read_masks(
        self, positions: Positions, boxes: Boxes, mirrored: Mirrored
    ) -> tuple[torch.Tensor, dict[int, ImageError]]:
        """uint8 [n, height, width], and why those that are not what was written are not: number -> error."""
        out = torch.empty((len(positions), self._rows, self._columns), dtype=torch.uint8)
        shards, rows = self._data.locate(positions)
        columns = (column.tolist() for column in (positions, shards, rows, boxes, mirrored))
        asked: list[Any] = list(zip(*columns, strict=True))
        places, damaged = out.numpy(), dict[int, ImageError]()

        def read(number: int) -> ImageError | None:
            position, shard, row, box, is_mirrored = asked[number]
            return self._read_mask(position, shard, row, box, is_mirrored, places[number])

        wanted = np.unique(shards)
        for start in range(0, len(wanted), _OPEN_FILES):
            opened = wanted[start : start + _OPEN_FILES]
            self._open_masks(opened.tolist())
            numbers = np.flatnonzero(np.isin(shards, opened)).tolist()
            errors = zip(numbers, self._pool.map(read, numbers), strict=True)
            damaged |= {number: error for number, error in errors if error is not None}
        return out, dict(sorted(damaged.items()))

    def _open_masks(self, wanted: list[int]) -> None:
        """Open those shards, and close the ones that were used least recently where there are too many."""
        for shard in wanted:
            if shard in self._mask_files:
                self._mask_files.move_to_end(shard)
        for shard in wanted:
            if shard not in self._mask_files:
                if len(self._mask_files) == _OPEN_FILES:
                    self._mask_files.popitem(last=False)[1].close()
                opener = FORMATS[self._data.kind].open_masks
                self._mask_files[shard] = self._data.read(shard, opener, with_index=True)

    def _read_mask(
        self, position: int, shard: int, row: int, crop: list[float], mirrored: bool, out: Pixels
    ) -> ImageError | None:
        """Put the mask into `out`, cropped, resized and mirrored as its picture was.

        Each pixel is that on which its centre lies: nearest neighbour, without values between two labels.
        What lies outside of the mask is 0.
        """
        index, file = self._index, self._data.file(position)
        mask = self._mask_files[shard].read_mask(row)
        try:
            if isinstance(mask, bytes):
                height, width = self._data.shapes_at(slice(position, position + 1))[0].tolist()
                mask = masks.decode(mask, (height, width))
            if self._check_masks:
                index.check_mask(position, mask, file)
        except (ImageError, ValueError) as error:
            if self._data.remote is not None:
                return index.error(position, file, self._data.remote.damaged(shard))
            if isinstance(error, ImageError):
                return type(error)(error.path, error.reason)
            return index.error(position, file, f"its mask cannot be decoded ({error}); {REMEDY}")
        rows, inside_rows = _nearest(crop[1], crop[3], self._rows, mask.shape[0])
        columns, inside_columns = _nearest(crop[0], crop[2], self._columns, mask.shape[1])
        shown = mask[rows[:, None], columns] * (inside_rows[:, None] & inside_columns)
        out[:] = shown[:, ::-1] if mirrored else shown
        return None


def _nearest(start: float, length: float, count: int, side: int) -> tuple[Positions, Mirrored]:
    """Which of `side` pixels each of `count` lies on, and whether it does; else the nearest one."""
    places = np.floor(start + (np.arange(count) + 0.5) * (length / count)).astype(np.int64)
    return places.clip(0, side - 1), (places >= 0) & (places < side)


def labels_of(data: SplitData, rows: Positions) -> torch.Tensor:
    """What `rows` are labelled with, see the module; on the CPU."""
    if data.index.targets is None:
        return torch.from_numpy(data.labels[rows])
    chosen = data.index.targets.select(rows)
    if chosen.ends is None:
        with np.errstate(over="ignore"):  # beyond 32 bits it is infinite
            return torch.from_numpy(chosen.values.astype(np.float32))
    labels = np.zeros((len(chosen), len(data.classes)), np.float32)
    labels[np.repeat(np.arange(len(chosen)), np.diff(chosen.ends, prepend=0)), chosen.values] = 1
    return torch.from_numpy(labels)


def values_of(column: Column, rows: Positions) -> torch.Tensor | list[Any]:
    """The values of `rows`, as the module says; nobody else has their memory."""
    chosen = column.select(rows)
    if chosen.kind == "text":
        return [chosen.value(row) for row in range(len(chosen))]
    if chosen.ends is None:
        return torch.from_numpy(chosen.values)
    return [torch.from_numpy(chosen.array(row)) for row in range(len(chosen))]

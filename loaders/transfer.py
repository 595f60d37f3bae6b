"""Turn what a backend reads into batches for training: fields, masks, device, augmentation, dtype.

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
    ragged   a list of n tensors, int64 or float64 [m] or [m, k], such as boxes
    text     a list of n str

Two kinds are cropped, resized and mirrored as their picture is. (An `augment` function gets all that is
stored, so that these are of the whole stored picture then.)

    mask     uint8 [n, height, width] as `batch.images`, and on their device
    boxes    a list of n tensors, float32 [m, 4]: left, top, right and bottom in pixels of the served picture,
             cut off at its edges and those of the stored picture; boxes outside are left out. NAME_kept has
             the numbers of the others, int64 [m], so that other fields can follow: `labels[kept]`
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
from loaders.batch import MASK, Batch, DecodedBatch, Positions, Reader, Request, find_masks
from loaders.dataset import RAW, SplitData
from loaders.device import Lane, upload
from loaders.read.filler import BufferPool
from loaders.settings import LoaderSpec, Normalize, as_floats
from loaders.threads import Pool
from precache.dataset.boxes import fit_boxes
from precache.dataset.columns import Column, Ints
from precache.dataset.index import REMEDY
from precache.errors import ImageError, SampleError, SettingError
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
MeanAndStd: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, of values in 0-1."""
_IMAGENET: dict[int, MeanAndStd] = {
    1: ((0.449,), (0.226,)),  # the mean of the three channels, as timm has it for models of one channel
    3: IMAGENET,
    4: ((*IMAGENET_MEAN, 0.0), (*IMAGENET_STD, 1.0)),  # ImageNet has no alpha: alpha stays as it is
}
"""Mean and standard deviation by the number of channels."""
STORED_DTYPES = {1: torch.uint8, 2: torch.uint16}
"""Dtype of stored pictures by the bytes of a value."""
_MAX_OPEN_MASKS = 32  # mask files: a process may have 1,024 open files by default, on macOS 256


class Pipeline:
    """Pipeline of one split: a backend reads it, and its batches are finished on the device.

    Args:
        reader: backend that reads the split.
        late: augmentation that is done with a batch on the device; None: the backend has done all.
        mean_and_std: with which floating-point images are normalised; None: images are integers.
        crops: the part of each stored picture that is served in the end, which masks and boxes follow.

    Attributes:
        data: the split.
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
        late: BatchFunction | CheckedFunction | None,
        mean_and_std: MeanAndStd | None,
        crops: Crops,
    ) -> None:
        self.data, self.lane = data, lane
        self.random_access = reader.random_access
        self.size = None if isinstance(late, CheckedFunction) else spec.served
        self._dtype, self._views = spec.dtype, spec.serving.views
        self._stored_dtype = STORED_DTYPES[data.dtype.itemsize]
        self._reader, self._fields = reader, FieldReader(data, spec, crops)
        self._late, self._mean_and_std = late, mean_and_std
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
        refused = dict(decoded.refused)
        readable = request.drop(refused)
        # uint8 crosses the bus: normalising on the device moves 4x fewer bytes than float32.
        images = upload(decoded.images, self.lane.device)
        fields, damaged = self._fields.read(readable)
        if damaged:
            readable_slots = np.delete(np.arange(len(request.positions)), [*refused])
            refused |= {int(readable_slots[slot]): error for slot, error in damaged.items()}
            is_right = np.isin(np.arange(len(readable_slots)), [*damaged], invert=True)
            right = np.flatnonzero(np.tile(is_right, len(images) // len(is_right)))  # in each view
            images = images[upload(torch.from_numpy(right), self.lane.device)]
            readable = request.drop(refused)
        batch = self._prepare(images.view(self._stored_dtype), readable, fields)
        batch.refused = refused
        return batch

    def _prepare(self, images: torch.Tensor, request: Request, fields: dict[str, Any]) -> Batch:
        """Augment and normalise the images, and return them with labels and fields as a batch."""
        ids = torch.from_numpy(self.data.ids[request.positions])
        labels = upload(batch_labels(self.data, request.positions), self.lane.device)
        if not len(ids):  # no picture could be decoded
            return Batch(images.permute(0, 3, 1, 2), labels, ids, fields=fields)
        padding = torch.from_numpy(np.arange(len(ids)) >= len(ids) - request.padding)
        # either the backend has cropped one part for each view, or all views are cropped from the same images
        is_cropped = len(images) == self._views * len(ids)
        parts = list(images.chunk(self._views)) if is_cropped else [images] * self._views
        views = []
        for view, part in enumerate(parts):
            pictures = part
            if isinstance(self._late, CheckedFunction):
                # the caller's function may write to its argument, which the next view needs unchanged
                argument = part.clone() if view < self._views - 1 else part
                pictures, labels = self._late.apply(argument, ids, request.epoch, labels, view)
            elif self._late is not None:
                keys = draw_keys(ids.numpy(), view, request.places)
                pictures = self._late(part, torch.from_numpy(keys), request.epoch)
            pictures = pictures.permute(0, 3, 1, 2)  # NHWC seen as NCHW is channels-last
            if self._mean_and_std is not None:
                out = self._take_floats(pictures) if pictures.device.type == "cpu" else None
                pictures = normalise(pictures, self._dtype, self._mean_and_std, out)
            views.append(pictures)
        batch = Batch(views[0], labels, ids, padding, fields, views[1:])
        batch.ready = self.lane.mark()
        return batch

    def _take_floats(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return float32 memory for as many pictures of the same shape, reused once no tensor shows it."""
        shape = (*pictures.shape[2:], pictures.shape[1] * torch.float32.itemsize)
        if self._floats is None or not self._floats.can_hold(len(pictures), shape):
            self._floats = BufferPool(len(pictures), as_size(*shape[:2]), self.lane.device, shape[2])
        return self._floats.take(len(pictures)).view(torch.float32).permute(0, 3, 1, 2)

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""
        self._reader.close()
        self._fields.close()


def receive(batch: Batch, device: torch.device) -> Batch:
    """Make the current stream wait until `batch`, which was sent to `device`, is ready, and return it."""
    if batch.ready is not None:
        current = torch.cuda.current_stream(device)
        current.wait_event(batch.ready)
        batch.ready = None
        tensors = [*batch.views, batch.labels]
        if (masks := find_masks(batch.fields)) is not None:
            tensors.append(masks)
        for tensor in tensors:
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
        mean, std = data.statistics
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
    """Return (images / high - mean) / std as `dtype`, computed in float32; high is 255, or 65,535 for uint16.

    Args:
        images: uint8 or uint16 [n, channels, height, width].
        out: float32 in channels-last memory on the CPU, for the result; None: fresh memory.
    """
    scaled = np.float32(torch.iinfo(images.dtype).max) * np.array(mean_and_std, np.float32)
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


class FieldReader:
    """Reads the fields and masks of samples, and crops masks and boxes as their pictures are.

    Args:
        crops: the part of each stored picture that is served.
    """

    def __init__(self, data: SplitData, spec: LoaderSpec, crops: Crops) -> None:
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
            _, mask_file = self._mask_files.popitem()
            mask_file.close()

    def read(self, request: Request) -> tuple[dict[str, Any], dict[int, ImageError]]:
        """Read the fields of the samples in `request`.

        Returns:
            Fields of the samples whose masks are right, and the errors of the others, by their slots.

        Raises:
            DatasetError: a shard cannot be read.
        """
        fields: dict[str, Any] = {}
        damaged: dict[int, ImageError] = {}
        if not (self._index.fields or self._has_masks):
            return fields, damaged
        positions = request.positions
        boxes, mirrored = self._crops.boxes_and_flips(
            request.epoch, self._data.ids[positions], self._data.shapes_at(positions), request.places
        )
        if self._has_masks:
            mask, damaged = self._read_masks(positions, boxes, mirrored)
            if damaged:
                right = np.delete(np.arange(len(positions)), [*damaged])
                positions, boxes, mirrored = positions[right], boxes[right], mirrored[right]
                mask = mask[right]
            fields[MASK] = upload(mask, self._device)
        for name, column in sorted(self._index.fields.items()):
            if name == self._data.boxes:
                assert self._data.rendering is not None
                sizes = self._index["source_sizes"][positions]
                stored = fit_boxes(column.select(positions), sizes, self._data.rendering, clip=True)
                served_boxes, kept_numbers = [], []
                for slot in range(len(positions)):
                    crop, is_mirrored = boxes[slot].tolist(), bool(mirrored[slot])
                    sample_boxes, numbers = self._crop_boxes(stored.row_array(slot), crop, is_mirrored)
                    served_boxes.append(sample_boxes)
                    kept_numbers.append(numbers)
                fields[name] = served_boxes
                fields[f"{name}_kept"] = kept_numbers
            else:
                fields[name] = field_values(column, positions)
        return fields, damaged

    def _crop_boxes(
        self, stored: npt.NDArray[Any], crop: list[float], mirrored: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a sample's boxes in the served picture, and the numbers of those that are inside of it."""
        left, top, width, height = crop
        scale = self._columns / width, self._rows / height
        boxes = (stored.reshape(-1, 4) - (left, top, left, top)) * (*scale, *scale)
        if mirrored:
            boxes[:, [0, 2]] = self._columns - boxes[:, [2, 0]]
        boxes = np.clip(boxes, 0, (self._columns, self._rows) * 2)
        inside = np.flatnonzero((boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1]))
        return torch.from_numpy(boxes[inside].astype(np.float32)), torch.from_numpy(inside)

    def _read_masks(
        self, positions: Positions, boxes: Boxes, mirrored: Mirrored
    ) -> tuple[torch.Tensor, dict[int, ImageError]]:
        """Return masks, uint8 [n, height, width], and errors of those not as they were written, by slot."""
        masks = torch.empty((len(positions), self._rows, self._columns), dtype=torch.uint8)
        shards, rows = self._data.locate(positions)
        columns = (column.tolist() for column in (positions, shards, rows, boxes, mirrored))
        samples: list[Any] = list(zip(*columns, strict=True))
        spaces, damaged = masks.numpy(), dict[int, ImageError]()

        def read(slot: int) -> ImageError | None:
            position, shard, row, box, is_mirrored = samples[slot]
            return self._read_mask(position, shard, row, box, is_mirrored, spaces[slot])

        needed = np.unique(shards)
        for start in range(0, len(needed), _MAX_OPEN_MASKS):
            opened = needed[start : start + _MAX_OPEN_MASKS]
            self._open_masks(opened.tolist())
            slots = np.flatnonzero(np.isin(shards, opened)).tolist()
            for slot, error in zip(slots, self._pool.map(read, slots), strict=True):
                if error is not None:
                    damaged[slot] = error
        return masks, dict(sorted(damaged.items()))

    def _open_masks(self, shards: list[int]) -> None:
        """Open the masks of `shards`; close the least recently used ones if too many are open."""
        for shard in shards:
            if shard in self._mask_files:
                self._mask_files.move_to_end(shard)
        for shard in shards:
            if shard not in self._mask_files:
                if len(self._mask_files) == _MAX_OPEN_MASKS:
                    _, mask_file = self._mask_files.popitem(last=False)
                    mask_file.close()
                open_masks = FORMATS[self._data.kind].open_masks
                self._mask_files[shard] = self._data.read(shard, open_masks, with_index=True)

    def _read_mask(
        self, position: int, shard: int, row: int, crop: list[float], mirrored: bool, out: Pixels
    ) -> ImageError | None:
        """Put a mask into `out`, cropped, resized and mirrored as its picture is.

        Each pixel gets the value of the one that its centre lies on (nearest neighbour), since values between
        two labels would be wrong; outside of the mask it gets 0.

        Args:
            position: position of the sample in the split.
            shard: number of its shard.
            row: row of the sample in its shard.

        Returns:
            The error if the mask is not as it was written.
        """
        index, file = self._index, self._data.file_at(position)
        mask = self._mask_files[shard].read_mask(row)
        try:
            if isinstance(mask, bytes):
                height, width = self._data.shapes_at(slice(position, position + 1))[0].tolist()
                mask = masks.decode(mask, (height, width))
            if self._check_masks:
                index.check_mask(position, mask, file)
        except (ImageError, ValueError) as error:
            if self._data.remote is not None:
                self._data.remote.forget(shard)
                return index.error(position, file, self._data.remote.forgotten_reason)
            if isinstance(error, ImageError):
                return type(error)(error.path, error.reason, remedy=error.remedy)
            undecodable = index.error(position, file, f"its mask cannot be decoded ({error})")
            return SampleError(undecodable.path, undecodable.reason, remedy=REMEDY)
        lines, inside_lines = _nearest_pixels(crop[1], crop[3], self._rows, mask.shape[0])
        columns, inside_columns = _nearest_pixels(crop[0], crop[2], self._columns, mask.shape[1])
        cropped = mask[lines[:, None], columns] * (inside_lines[:, None] & inside_columns)
        out[:] = cropped[:, ::-1] if mirrored else cropped
        return None


def _nearest_pixels(start: float, length: float, count: int, side: int) -> tuple[Ints, Mirrored]:
    """Return which of `side` pixels is nearest to each of `count` new ones, and whether that one lies on it.

    Args:
        start: where the new pixels begin, in old pixels.
        length: old pixels that the new ones cover.
    """
    pixels = np.floor(start + (np.arange(count) + 0.5) * (length / count)).astype(np.int64)
    return pixels.clip(0, side - 1), (pixels >= 0) & (pixels < side)


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

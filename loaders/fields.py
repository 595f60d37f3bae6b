"""What is known of the samples of a batch beside their pictures: targets and fields, for every backend here.

    kind     served as
    int      int64 [n]
    float    float64 [n]: as it is stored
    vector   int64 or float64 [n, k]
    ragged   a list of n tensors, int64 or float64 [m] or [m, k], such as boxes
    text     a list of n str

All of it is on the CPU. Two kinds follow their picture through crops, resizing and mirroring:

    mask     uint8 [n, height, width] of `batch.images`, and on their device
    boxes    a list of n tensors, float32 [m, 4]: left, top, right and bottom in pixels of what is served, cut
             off at its edges; those outside are gone. NAME_kept has the numbers of those that are left,
             int64 [m], so that other fields can follow: `labels[kept]`

A function of the caller's gets the whole of what is stored; masks and boxes are of that then.

`batch.labels` are on the loader's device, whatever the samples are labelled with:

    class    int64 [n]
    classes  float32 [n, classes]: 1 where the sample is of the class, else 0
    number   float32 [n] or [n, k]
    none     int64 [n], all -1
"""

from collections import OrderedDict
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from loaders.augment.cpu import Boxes, Crops
from loaders.batch import MASK, Positions, Request
from loaders.dataset import SplitData
from loaders.deliver import Pool
from loaders.settings import LoaderSpec
from precache.dataset.boxes import placement
from precache.dataset.columns import Column
from precache.dataset.index import REMEDY
from precache.errors import ImageError
from precache.formats import FORMATS
from precache.formats.base import MaskFile
from precache.pictures import masks
from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import Size, sides

KEPT = "_kept"
"""Behind the name of boxes: the numbers of those that are left of each sample."""
Served: TypeAlias = tuple[Boxes, npt.NDArray[np.bool_]]
"""What is served of each picture and whether it is mirrored, as `loaders.augment.cpu.Crops.of` says."""
_OPEN_FILES = 128


def find_fields(data: SplitData, spec: LoaderSpec, crops: Crops) -> "Fields | None":
    """What knows fields and masks of `data`, if it has any.

    Args:
        crops: what becomes of each stored picture until it is served, whoever does it.
    """
    index = data.index
    if index is None:
        return None
    if not index.fields and "mask_checksums" not in index.columns:
        return None
    return Fields(data, spec, crops)


class Fields:
    """Fields and masks of what a reader decodes; arguments as of `find_fields`."""

    def __init__(self, data: SplitData, spec: LoaderSpec, crops: Crops) -> None:
        assert data.index is not None
        assert crops.size is not None
        self._data, self._crops = data, replace(crops, views=1)
        self._fields = data.index.fields
        self._size = crops.size
        self._has_masks = "mask_checksums" in data.index.columns
        self._check_masks = spec.reading.check != "never"
        self._pool = Pool(max(1, spec.workers), "mask")
        self._mask_files: OrderedDict[int, MaskFile] = OrderedDict()

    def close(self) -> None:
        """End the threads, and close the files."""
        self._pool.close()
        while self._mask_files:
            self._mask_files.popitem()[1].close()

    def describe(self, request: Request) -> tuple[dict[str, Any], dict[int, ImageError]]:
        """Fields of the samples asked for, and by their numbers why some are left out: for their masks."""
        rows = request.positions
        served = self._crops.of(
            request.epoch, self._data.ids[rows], self._data.shapes_at(rows), request.places
        )
        fields: dict[str, Any] = {}
        damaged: dict[int, ImageError] = {}
        if self._has_masks:
            fields[MASK], damaged = self._read_masks(rows, served)
            if damaged:
                kept = np.delete(np.arange(len(rows)), [*damaged])
                rows, served = rows[kept], (served[0][kept], served[1][kept])
                fields[MASK] = fields[MASK][torch.from_numpy(kept)]
        for name, column in sorted(self._fields.items()):
            if name == self._data.boxes:
                fields |= self._follow(name, column, rows, served)
            else:
                fields[name] = values_of(column, rows)
        return fields, damaged

    def _follow(self, name: str, column: Column, rows: Positions, crops: Served) -> dict[str, Any]:
        """The boxes of `rows` in what is served, and which of theirs these are."""
        index, how = self._data.index, self._data.rendering
        assert index is not None
        assert how is not None
        served, all_kept = [], []
        for row, crop, mirrored in zip(rows.tolist(), crops[0], crops[1].tolist(), strict=True):
            width, height = index["source_sizes"][row].tolist()
            x_scale, y_scale, x, y = placement(width, height, how)
            boxes = column.array(row).reshape(-1, 4) * (x_scale, y_scale, x_scale, y_scale) + (x, y, x, y)
            boxes, kept = follow_boxes(boxes, crop, mirrored, self._size)
            served.append(torch.from_numpy(boxes.astype(np.float32)))
            all_kept.append(torch.from_numpy(kept))
        return {name: served, f"{name}{KEPT}": all_kept}

    def _read_masks(self, positions: Positions, served: Served) -> tuple[torch.Tensor, dict[int, ImageError]]:
        """uint8 [n, height, width], and why those that are not what was written are not: number -> error.

        Raises:
            DatasetError: a shard cannot be read.
        """
        out = torch.empty((len(positions), *sides(self._size)), dtype=torch.uint8)
        shards, rows = self._data.locate(positions)
        self._open(np.unique(shards).tolist())
        each = zip(positions.tolist(), shards.tolist(), rows.tolist(), *served, out.numpy(), strict=True)
        found = enumerate(self._pool.map(lambda one: self._read_mask(*one), each))
        return out, {number: error for number, error in found if error is not None}

    def _open(self, shards: list[int]) -> None:
        """Have these files of masks open, and of the others those used last."""
        for shard in shards:
            if shard not in self._mask_files:
                opener = FORMATS[self._data.kind].open_masks
                self._mask_files[shard] = self._data.read(shard, opener, with_index=True)
            self._mask_files.move_to_end(shard)
        while len(self._mask_files) > max(_OPEN_FILES, len(shards)):
            self._mask_files.popitem(last=False)[1].close()

    def _read_mask(
        self, position: int, shard: int, row: int, crop: npt.NDArray[Any], mirrored: bool, out: Pixels
    ) -> ImageError | None:
        """Put the mask into `out`, cropped, resized and mirrored as its picture was."""
        index, file = self._data.index, self._data.file(position)
        assert index is not None
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
        follow_mask(mask, crop, bool(mirrored), out)
        return None


def labels_of(data: SplitData, rows: Positions) -> torch.Tensor:
    """What `rows` are labelled with, see the module; on the CPU."""
    if data.index is None or data.index.targets is None:
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


Floats: TypeAlias = npt.NDArray[np.float64]


def follow_mask(mask: Pixels, crop: npt.NDArray[Any], mirrored: bool, out: Pixels) -> None:
    """Put the part `crop` (left, top, width, height) of a mask, uint8 [height, width], into `out`.

    Each pixel is that on which its centre lies: nearest neighbour, without values between two labels. What
    lies outside of the mask is 0.
    """
    left, top, width, height = crop.tolist()
    rows, inside_rows = _nearest(top, height, out.shape[0], mask.shape[0])
    columns, inside_columns = _nearest(left, width, out.shape[1], mask.shape[1])
    out[:] = mask[rows[:, None], columns] * (inside_rows[:, None] & inside_columns)
    if mirrored:
        out[:] = out[:, ::-1].copy()


def _nearest(
    start: float, length: float, count: int, side: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Which of `side` pixels each of `count` lies on, and whether it does; else the nearest one."""
    places = np.floor(start + (np.arange(count) + 0.5) * (length / count)).astype(np.int64)
    return places.clip(0, side - 1), (places >= 0) & (places < side)


def follow_boxes(
    boxes: npt.NDArray[Any], crop: npt.NDArray[Any], mirrored: bool, size: Size
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Boxes in the part `crop` (left, top, width, height) of their picture, resized to `size`.

    Args:
        boxes: [k, 4]: left, top, right, bottom in pixels of the stored picture.

    Returns:
        float64 [m, 4], those of which a part is inside, cut off at the edges; and int64 [m], their numbers.
    """
    left, top, width, height = crop.tolist()
    rows, columns = sides(size)
    moved = (boxes - (left, top, left, top)) * np.array([columns / width, rows / height] * 2)
    if mirrored:
        moved[:, [0, 2]] = columns - moved[:, [2, 0]]
    cut = np.clip(moved, 0, (columns, rows, columns, rows))
    kept = np.flatnonzero((cut[:, 2] > cut[:, 0]) & (cut[:, 3] > cut[:, 1]))
    return cut[kept], kept

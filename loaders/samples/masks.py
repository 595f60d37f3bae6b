"""Masks of a batch, read and transformed on the host for every backend: draws depend on ids alone."""

from collections import OrderedDict
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from loaders.augment.cpu import Boxes
from loaders.augment.follow import follow_mask
from loaders.batch import Positions
from loaders.dataset import SplitData
from loaders.delivery.threads import Pool
from loaders.settings import LoaderSpec
from precache.dataset.index import REMEDY
from precache.errors import ImageError
from precache.formats import FORMATS
from precache.formats.base import MaskFile
from precache.pictures import masks
from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import Size, sides

Served: TypeAlias = tuple[Boxes, npt.NDArray[np.bool_]]
"""What is served of each picture and whether it is mirrored, as `loaders.augment.cpu.Crops.of` says."""

_OPEN_FILES = 128


class MaskReader:
    """Reads the masks of samples, and crops, resizes and mirrors them as their pictures were."""

    def __init__(self, data: SplitData, spec: LoaderSpec, size: Size) -> None:
        self._data, self._size = data, size
        self._check = spec.reading.check != "never"
        self._pool = Pool(max(1, spec.workers), "mask")
        self._files: OrderedDict[int, MaskFile] = OrderedDict()

    def read(self, positions: Positions, served: Served) -> tuple[torch.Tensor, dict[int, ImageError]]:
        """uint8 [n, height, width], and why those that are not what was written are not: number -> error.

        Raises:
            DatasetError: a shard cannot be read.
        """
        out = torch.empty((len(positions), *sides(self._size)), dtype=torch.uint8)
        shards, rows = self._data.locate(positions)
        self._open(np.unique(shards).tolist())
        read = partial(self._read_one, positions, shards, rows, served, out.numpy())
        found = enumerate(self._pool.map(read, range(len(positions))))
        return out, {number: error for number, error in found if error is not None}

    def close(self) -> None:
        """End the threads, and close the files."""
        self._pool.close()
        while self._files:
            self._files.popitem()[1].close()

    def _open(self, shards: list[int]) -> None:
        """Have these files open, and of the others those used last."""
        opener = FORMATS[self._data.kind].open_masks
        for shard in shards:
            if shard not in self._files:
                self._files[shard] = self._data.read(shard, opener, with_index=True)
            self._files.move_to_end(shard)
        while len(self._files) > max(_OPEN_FILES, len(shards)):
            self._files.popitem(last=False)[1].close()

    def _read_one(
        self,
        positions: Positions,
        shards: Positions,
        rows: Positions,
        served: Served,
        out: Pixels,
        number: int,
    ) -> ImageError | None:
        position = int(positions[number])
        index, file = self._data.index, self._data.file(position)
        assert index is not None
        mask = self._files[int(shards[number])].read_mask(int(rows[number]))
        try:
            if isinstance(mask, bytes):
                height, width = self._data.shapes_at(slice(position, position + 1))[0].tolist()
                mask = masks.decode(mask, (height, width))
            if self._check:
                index.check_mask(position, mask, file)
        except (ImageError, ValueError) as error:
            if self._data.remote is not None:
                return index.error(position, file, self._data.remote.damaged(int(shards[number])))
            if isinstance(error, ImageError):
                return type(error)(error.path, error.reason)
            return index.error(position, file, f"its mask cannot be decoded ({error}); {REMEDY}")
        crops, mirrored = served
        follow_mask(mask, crops[number], bool(mirrored[number]), out[number])
        return None

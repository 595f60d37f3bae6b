"""Pictures that are kept: in main memory, where all ranks of a host share them, or on a device.

In main memory each picture has a mark, the checksum of its pixels, written behind them. Whoever reads a
picture that another process has decoded compares it first, once: what was broken off midway (`kill -9`), or
is not yet to be seen as a whole, does not have it. The mark of a picture of a raw tree goes by its file's
size and time, too: another process may have found another picture there.
"""

import os
import struct
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from loaders.backends.host_memory import HEADER_BYTES
from loaders.backends.share import Share
from loaders.batch import Positions
from loaders.dataset import RAW, SplitData
from loaders.deliver.devices import upload
from loaders.deliver.threads import Pool
from precache.dataset.index import checksum_of
from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import Size, sides

_MARK_BYTES = 8
_PAGE = 4096
_STATE = struct.Struct("<qqQ")  # size and time of a file, and a checksum


class Kept(Protocol):
    """What is kept of a split."""

    share: Share

    def there(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Bool [n]: which of these can be had from here; what once could always can."""

    def free(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Bool [n]: which of these would be kept, and nothing is in their places yet."""

    def keep(self, positions: Positions, images: torch.Tensor) -> None:
        """Keep those of these pictures that are in the share.

        Args:
            images: as of `loaders.batch.DecodedBatch`, one for each position, in the memory they are kept in.
        """

    def close(self) -> None:
        """Free the memory."""


def memory_bytes(share: Share) -> int:
    """What `HostPictures` needs behind the header; 0 where nothing is kept."""
    return _marks_bytes(share) + share.total_bytes if share.samples else 0


def _marks_bytes(share: Share) -> int:
    return -(-share.samples * _MARK_BYTES // _PAGE) * _PAGE


class HostPictures:
    """Pictures in main memory.

    Args:
        memory: header, marks and pictures, see the module.
        size: of all pictures; None where each has its own.
    """

    def __init__(
        self, data: SplitData, share: Share, memory: npt.NDArray[np.uint8], size: Size | None, threads: int
    ) -> None:
        self.share = share
        self._data = data
        first = HEADER_BYTES + _marks_bytes(share)
        self._marks = memory[HEADER_BYTES:][: share.samples * _MARK_BYTES].view(np.uint64)
        self._memory = memory[first : first + share.total_bytes]
        self._squares = (
            None if size is None else self._memory.reshape(share.samples, *sides(size), data.pixel_bytes)
        )
        self._known = np.zeros(share.samples, bool)
        self._pool = Pool(max(1, threads), "keep")

    def there(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """As of `Kept`."""
        numbers = self.share.find(positions)
        there = (numbers >= 0) & self._known[numbers]
        unknown = np.flatnonzero((numbers >= 0) & ~there)
        marked = unknown[self._marks[numbers[unknown]] != 0]
        for slot, picture in zip(marked.tolist(), self.pictures(positions[marked]), strict=True):
            whole = self._mark(int(positions[slot]), picture) == self._marks[numbers[slot]]
            there[slot] = self._known[numbers[slot]] = whole
        return there

    def free(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """As of `Kept`."""
        numbers = self.share.find(positions)
        free: npt.NDArray[np.bool_] = (numbers >= 0) & (self._marks[numbers] == 0)
        return free

    def keep(self, positions: Positions, images: torch.Tensor) -> None:
        """As of `Kept`."""
        numbers = self.share.find(positions)
        pictures = pictures_of(self._data, positions, images)
        slots = np.flatnonzero((numbers >= 0) & ~self._known[numbers])

        def keep_one(slot: int, place: Pixels) -> None:
            number = int(numbers[slot])
            mark = self._mark(int(positions[slot]), pictures[slot])
            # what another process has kept there meanwhile may be in use: nothing but the same is put there
            if self._marks[number] in (0, mark):
                np.copyto(place, pictures[slot])
                self._marks[number] = mark
                self._known[number] = True

        places = self.pictures(positions[slots])
        self._pool.map(lambda each: keep_one(*each), list(zip(slots.tolist(), places, strict=True)))

    def pictures(self, positions: Positions) -> list[Pixels]:
        """Where the pictures of these samples, all of the share, are kept: uint8 [height, width, bytes]."""
        if self._squares is not None:
            return [self._squares[number] for number in self.share.find(positions).tolist()]
        shapes = self._data.shapes_at(positions)
        starts, lengths = self.share.starts(positions), shapes.prod(axis=1) * self._data.pixel_bytes
        return [
            self._memory[start : start + length].reshape(height, width, self._data.pixel_bytes)
            for start, length, (height, width) in zip(
                starts.tolist(), lengths.tolist(), shapes.tolist(), strict=True
            )
        ]

    def copier(self, positions: Positions) -> Callable[[slice, Pixels], object] | None:
        """As `copy` of `loaders.backends.filler.Pictures`; None where each picture has a size of its own."""
        if (squares := self._squares) is None:
            return None
        numbers = self.share.find(positions)
        # clip: else NumPy fills memory of its own first, in case that a number is wrong
        return lambda part, out: np.take(squares, numbers[part], axis=0, out=out, mode="clip")

    def close(self) -> None:
        """As of `Kept`: the system has the memory back when the last process has closed it."""
        self._pool.close()
        self._memory = self._squares = None  # type: ignore[assignment]
        self._marks = np.empty(0, np.uint64)

    def _mark(self, position: int, picture: Pixels) -> int:
        """Never 0."""
        mark = checksum_of(np.ascontiguousarray(picture).reshape(-1))
        if self._data.kind == RAW:
            try:
                state = os.stat(self._data.files[position])
                mark = checksum_of(_STATE.pack(state.st_size, state.st_mtime_ns, mark))
            except OSError:  # it is gone: nobody else can find another picture there
                pass
        return mark or 1


class DevicePictures:
    """Pictures of one size in the memory of `device`, of this process alone."""

    def __init__(self, data: SplitData, share: Share, size: Size, device: torch.device) -> None:
        self.share = share
        self._device = device
        shape = (share.samples, *sides(size), data.pixel_bytes)
        self._images = torch.empty(shape, dtype=torch.uint8, device=device)
        self._known = np.zeros(share.samples, bool)

    def there(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """As of `Kept`."""
        numbers = self.share.find(positions)
        there: npt.NDArray[np.bool_] = (numbers >= 0) & self._known[numbers]
        return there

    def free(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """As of `Kept`."""
        numbers = self.share.find(positions)
        free: npt.NDArray[np.bool_] = (numbers >= 0) & ~self._known[numbers]
        return free

    def keep(self, positions: Positions, images: torch.Tensor) -> None:
        """As of `Kept`."""
        numbers = self.share.find(positions)
        kept = np.flatnonzero(numbers >= 0)
        if len(kept):
            if len(kept) < len(numbers):
                images = images[self._upload(kept)]
            self._images[self._upload(numbers[kept])] = images
            self._known[numbers[kept]] = True

    def gather(self, positions: Positions) -> torch.Tensor:
        """uint8 [n, height, width, bytes] of those that are there."""
        return self._images[self._upload(self.share.find(positions))]

    def close(self) -> None:
        """As of `Kept`."""
        self._images = torch.empty(0, dtype=torch.uint8)

    def _upload(self, rows: Positions) -> torch.Tensor:
        return upload(torch.from_numpy(rows), self._device)


def pictures_of(data: SplitData, positions: Positions, images: torch.Tensor) -> list[Pixels]:
    """Each uint8 [height, width, bytes], of `images` as of `loaders.batch.DecodedBatch`, on the CPU."""
    if images.ndim > 1:
        return list(images.numpy())
    shapes = data.shapes_at(positions).tolist()
    lengths = [height * width * data.pixel_bytes for height, width in shapes]
    parts = torch.split(images, lengths)
    return [part.numpy().reshape(*shape, data.pixel_bytes) for part, shape in zip(parts, shapes, strict=True)]

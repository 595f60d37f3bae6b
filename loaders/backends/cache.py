"""Keep what was decoded, in main memory or on the device: from the second epoch on a batch is a gather.

The cache sits between a backend's reader and the loader and changes neither order nor pixels. The
first epoch goes at the reader's pace and fills it; the reader is asked for what is not there, and rests as
long as everything is. Random crops are taken of what is kept, so that they differ from epoch to epoch. Main
memory is shared with the other ranks of this host: see `loaders.backends.host_memory`. What does not fit is
read each time: see `loaders.backends.share`.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from loaders.augment.cpu import Crops
from loaders.backends import decoding
from loaders.backends.filler import BatchFiller, Pictures
from loaders.backends.kept import DevicePictures, HostPictures, Kept, pictures_of
from loaders.backends.room import open_kept
from loaders.batch import DecodedBatch, Positions, Reader, Request
from loaders.dataset import RAW, SplitData
from loaders.deliver.devices import Lane, upload
from loaders.deliver.threads import Pool
from loaders.settings import LoaderSpec
from precache.dataset.columns import Column
from precache.errors import DatasetError, ImageError
from precache.pictures.jpeg import Pixels

_MOST_IDLE = 256  # batches on their way that the reader has no part in; then it is let go
OpenReader = Callable[[Crops], Reader]
"""Opens the backend's reader, which serves the part of stored pictures that it is told."""


def open_cached(
    open_reader: OpenReader, backend: str, spec: LoaderSpec, data: SplitData, crops: Crops, lane: Lane
) -> Reader:
    """What serves `crops`, behind the cache that the settings ask for; where `lane` is active.

    Raises:
        SettingError: as `loaders.backends.room.open_kept`.
    """
    if spec.reading.cache != "none" and crops.random and data.kind == RAW:
        data = with_shapes(data, spec.threads)
    served_crops = crops if crops.random else Crops(crops.size, crops.size)
    kept = open_kept(backend, spec, data, served_crops, crops.crop_ratio)
    if kept is None:
        return open_reader(crops)
    try:
        reader = open_reader(crops.whole if crops.random else crops)
    except BaseException:
        kept.close()
        raise
    return CachedReader(reader, kept, spec, data, served_crops, lane)


def with_shapes(data: SplitData, threads: int) -> SplitData:
    """A raw tree with the sizes of its pictures, as their headers say; each file is read once for that."""
    with closing(Pool(max(1, threads), "header")) as pool:
        shapes = pool.map(lambda path: decoding.read(path).shape, data.files)
    return replace(data, shapes=Column(np.array(shapes, np.int32).reshape(-1, 2)))


class CachedReader:
    """What `reader` decodes, pictures of `crops.stored`, kept and served as `crops` say."""

    def __init__(
        self, reader: Reader, kept: Kept, spec: LoaderSpec, data: SplitData, crops: Crops, lane: Lane
    ) -> None:
        self.random_access = reader.random_access
        self._reader = reader
        self._data = data
        self._kept = kept
        self._lane = lane
        self._refused: dict[int, ImageError] = {}  # what could not be decoded: id -> why
        self._whole = crops.random is None
        self._filler = BatchFiller(data, crops, spec.batch_size, spec.workers, spec.device)

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one batch per request; the reader is asked for what it takes."""
        for request in requests:
            if len(self._lacking(request)):
                yield from self._read_some(request, requests)
            else:
                yield self._serve(request)

    def _read_some(self, first: Request, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """`first`, and what follows until the reader has nothing to do for long."""
        waiting: deque[tuple[Request, Positions]] = deque()  # with the slots that the reader was asked for
        coming = np.zeros(self._kept.share.samples, bool)  # of those that are kept
        idle = 0

        def ask() -> Iterator[Request]:
            nonlocal idle
            for request in chain([first], requests):
                slots = self._lacking(request)
                numbers = self._kept.share.find(request.positions[slots])
                free = self._kept.free(request.positions[slots])
                slots = slots[~(free & coming[numbers])]
                waiting.append((request, slots))
                if len(slots):
                    coming[numbers[free]] = True
                    whole = len(slots) == len(request.positions)
                    yield request if whole else request.select(slots.tolist())
                else:
                    idle += 1
                    if idle >= _MOST_IDLE:  # it would look further and further ahead
                        return

        with closing(self._reader.read(ask())) as decoded:  # type: ignore[type-var]
            for batch in decoded:
                while not len(waiting[0][1]):
                    idle -= 1
                    yield self._serve(waiting.popleft()[0])
                request, slots = waiting.popleft()
                numbers = self._kept.share.find(request.positions[slots])
                coming[numbers[numbers >= 0]] = False
                yield self._take_in(request, slots, batch)
        while waiting:
            yield self._serve(waiting.popleft()[0])

    def close(self) -> None:
        """Free the cache."""
        self._filler.close()
        self._reader.close()
        self._kept.close()

    def _lacking(self, request: Request) -> Positions:
        """Which of a batch are neither there nor known to be undecodable."""
        return np.flatnonzero(~self._kept.there(request.positions) & ~self._is_refused(request.positions))

    def _is_refused(self, positions: Positions) -> npt.NDArray[np.bool_]:
        if not self._refused:
            return np.zeros(len(positions), bool)
        return np.isin(self._data.ids[positions], list(self._refused))

    def _take_in(self, request: Request, slots: Positions, batch: DecodedBatch) -> DecodedBatch:
        """Keep what the reader made of some slots of a batch, and serve all of it."""
        for sample_id, error in batch.refused.items():  # without what the error's traceback holds
            self._refused[sample_id] = type(error)(error.path, error.reason)
        slots = slots[~self._is_refused(request.positions[slots])]
        images = self._lane.take(batch.images, batch.ready)
        if isinstance(self._kept, HostPictures):
            images = images.to(torch.device("cpu"))  # of a backend that decodes on a GPU: waited for
        else:
            images = upload(images, self._lane.device)
        self._kept.keep(request.positions[slots], images)
        return self._serve(request, slots, images)

    def _serve(
        self, request: Request, slots: Positions | None = None, images: torch.Tensor | None = None
    ) -> DecodedBatch:
        """A batch of what is kept, and of `images`, those of `slots`."""
        if isinstance(self._kept, HostPictures):
            kept = ~self._is_refused(request.positions)
            pictures: dict[int, Pixels] = {}
            if slots is not None and images is not None:
                kept[slots] = False
                read = pictures_of(self._data, request.positions[slots], images)
                pictures.update(zip(slots.tolist(), read, strict=True))
            self._check_there(request, list(pictures))
            copy = self._kept.copier(request.positions) if self._whole and kept.all() else None
            if copy is None:
                found = self._kept.pictures(request.positions[kept])
                pictures.update(zip(np.flatnonzero(kept).tolist(), found, strict=True))
            picture_of = partial(self._picture, request.positions, pictures)
            return self._filler.fill(Pictures(request, picture_of, copy=copy))
        assert isinstance(self._kept, DevicePictures)
        refused = self._is_refused(request.positions)
        ids = self._data.ids[request.positions]
        served = request.positions[~refused]
        return DecodedBatch(
            self._gather(request.positions, refused, self._kept, slots, images),
            torch.from_numpy(self._data.labels[served]),
            torch.from_numpy(self._data.ids[served]),
            {i: self._refused[i] for i in ids[refused].tolist()},
        )

    def _gather(
        self,
        positions: Positions,
        refused: npt.NDArray[np.bool_],
        kept: DevicePictures,
        slots: Positions | None,
        images: torch.Tensor | None,
    ) -> torch.Tensor:
        """On the device; `images` are those of `slots`."""
        if slots is None or images is None or not len(slots):
            return kept.gather(positions[~refused])
        from_cache = ~refused
        from_cache[slots] = False
        if not from_cache.any():
            return images
        rows = np.cumsum(~refused) - 1  # of each slot in what is served
        served = torch.empty(
            (int((~refused).sum()), *images.shape[1:]), dtype=torch.uint8, device=self._lane.device
        )
        for chosen, part in (
            (slots, images),
            (np.flatnonzero(from_cache), kept.gather(positions[from_cache])),
        ):
            served[upload(torch.from_numpy(rows[chosen]), self._lane.device)] = part
        return served

    def _check_there(self, request: Request, read: list[int]) -> None:
        """DatasetError if what was on its way has come, but is not what another process has found."""
        lacking = np.setdiff1d(self._lacking(request), read)
        if len(lacking):
            raise DatasetError(
                f"{self._data.file(int(request.positions[lacking[0]]))}: has changed while it was read; "
                f"leave the dataset alone while it is trained with, and build the loader again"
            )

    def _picture(self, positions: Positions, pictures: dict[int, Pixels], slot: int) -> Pixels:
        if slot not in pictures:
            error = self._refused[int(self._data.ids[positions[slot]])]
            raise type(error)(error.path, error.reason)  # that which is kept would hold this frame
        return pictures[slot]

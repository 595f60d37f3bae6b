"""Cache decoded pictures in the GPU's memory: from the second epoch on a batch is a gather.

The cache sits between a backend's reader and the loader, and changes neither order nor pixels. The first
epoch runs at the reader's pace and fills it; afterwards the reader is asked only for samples that are not
cached. Random crops are cut out of the cached pictures, so that they differ from epoch to epoch.

If the split does not fit, the first samples in stored order are cached: a reader that goes from shard to
shard then never opens their shards again.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from copy import copy
from dataclasses import replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from loaders.augment.crops import Crops
from loaders.batch import DecodedBatch, Positions, Reader, Request
from loaders.dataset import SplitData
from loaders.device import upload
from loaders.settings import LoaderSpec
from precache.dataset.columns import Ints
from precache.errors import ImageError, SettingError, printable
from precache.pictures.images import sides

_FREE_SHARE = 0.1  # of the device's free memory, which is left to the training
_LOGGER = logging.getLogger(__name__)
# Once so many requests wait for which the reader has nothing to decode, it is stopped until a sample is
# missing again: it would otherwise consume requests for epochs ahead.
_MAX_IDLE = 256


class DevicePictures:
    """Pictures of one size in the memory of a device, those of the first samples of a split.

    Args:
        samples: samples of the split.
        images: memory for the pictures, uint8 [n, height, width, channels].

    Attributes:
        device: the device that holds them.
        count: how many can be cached.
        is_cached: bool [samples], whether each is cached; a cached one stays so.
    """

    def __init__(self, samples: int, images: torch.Tensor) -> None:
        self.device, self.count = images.device, len(images)
        self.is_cached = np.zeros(samples, np.bool_)
        self._images = images

    def serve(self, request: Request, slots: Ints, images: torch.Tensor | None) -> DecodedBatch:
        """Gather a batch on the device: newly decoded `images` at `slots`, cached pictures elsewhere.

        New pictures are cached if there is room.

        Args:
            images: decoded pictures, uint8 [m, height, width, channels], on `device`; None where there are
                no `slots`.
        """
        positions = request.positions
        # A sample that is not cached gets some other picture here, which its own one then replaces.
        served = self._images[self._upload(np.minimum(positions, self.count - 1))]
        if images is not None:
            served[self._upload(slots)] = images
            new_positions = positions[slots]
            with_room = np.flatnonzero(new_positions < self.count)
            stored_positions = new_positions[with_room]
            self._images[self._upload(stored_positions)] = images[self._upload(with_room)]
            self.is_cached[stored_positions] = True
        return DecodedBatch((served,))

    def close(self) -> None:
        """Free the device's memory."""
        self._images = torch.empty(0, dtype=torch.uint8)

    def _upload(self, indices: Ints) -> torch.Tensor:
        return upload(torch.from_numpy(indices), self.device)


def open_cached(
    open_reader: Callable[[Crops], Reader], spec: LoaderSpec, data: SplitData, crops: Crops
) -> Reader:
    """Open a reader of `crops` behind a cache, for the current stream.

    Args:
        open_reader: opens the backend's reader, which serves the given part of the stored pictures.

    Raises:
        SettingError: the device cannot hold the pictures.
    """
    # random crops of pictures of one size are cut out on the device, after the cache
    if crops.views[0].random is not None:
        raise SettingError(
            f"cache 'device' keeps pictures of one size, and those of {data.path} vary",
            remedy="run 'precache convert' with '--fit crop', or leave the cache out",
        )
    if crops.per_picture is not None:
        raise SettingError(
            "cache 'device' keeps pictures as they are stored, and augment=loaders.per_picture(...) makes "
            "others in each epoch",
            remedy="leave the cache out, or give a loaders.RandomAugmentation",
        )
    store = _reserve_memory(spec, data, crops)
    try:
        reader = open_reader(crops)
    except BaseException:
        store.close()
        raise
    return CachedReader(reader, store, len(data))


def _reserve_memory(spec: LoaderSpec, data: SplitData, crops: Crops) -> DevicePictures:
    """Reserve the device's memory for the pictures that fit; log a warning where those are not all."""
    free_bytes = int(torch.cuda.mem_get_info(spec.device)[0])
    picture_shape = (*sides(crops.views[0].size), data.channels)
    picture_bytes = math.prod(picture_shape)
    count = min(len(data), int(free_bytes * (1 - _FREE_SHARE)) // picture_bytes)
    if not count:
        raise SettingError(
            f"the cache of {data.path} has no room on {spec.device}, of which {free_bytes:,} bytes are free",
            remedy="leave the cache out, or serve a smaller size",
        )
    if count < len(data):
        _LOGGER.warning(
            "%s: cache 'device' keeps %s of %s samples, %.1f GiB, for which there is room; it reads the "
            "others each time",
            printable(str(data.path)),
            f"{count:,}",
            f"{len(data):,}",
            count * picture_bytes / 2**30,
        )
    return DevicePictures(
        len(data), torch.empty((count, *picture_shape), dtype=torch.uint8, device=spec.device)
    )


class CachedReader:
    """Serves cached pictures, and caches those that `reader` decodes."""

    def __init__(self, reader: Reader, store: DevicePictures, samples: int) -> None:
        self.random_access = reader.random_access
        self._reader = reader
        self._store = store
        self._samples = samples
        self._refused: dict[int, ImageError] = {}  # position -> why its picture cannot be decoded

    def read(self, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Yield one batch per request; the reader is asked for the samples that are not cached."""
        for request in requests:
            if len(self._missing_slots(request)):
                yield from self._read_missing(request, requests)
            else:
                yield self._serve(request)

    def _read_missing(self, first: Request, requests: Iterator[Request]) -> Iterator[DecodedBatch]:
        """Serve `first` and the requests after it, until the reader has next to nothing to do."""
        waiting: deque[tuple[Request, Ints]] = deque()  # with the slots that the reader decodes
        # Positions that an earlier request has the reader decode: they will be cached by then.
        coming = np.zeros(self._samples, np.bool_)
        idle = 0  # requests in `waiting` for which it decodes nothing

        def missing_requests() -> Iterator[Request]:
            nonlocal idle
            for request in chain([first], requests):
                slots = self._missing_slots(request)
                slots = slots[~coming[request.positions[slots]]]
                waiting.append((request, slots))
                if len(slots):
                    positions = request.positions[slots]
                    coming[positions[positions < self._store.count]] = True
                    yield request if len(slots) == len(request.positions) else request.select(slots)
                else:
                    idle += 1
                    if idle >= _MAX_IDLE:
                        return

        with closing(self._reader.read(missing_requests())) as decoded:  # type: ignore[type-var]
            for batch in decoded:
                while not len(waiting[0][1]):
                    idle -= 1
                    yield self._serve(waiting.popleft()[0])
                request, slots = waiting.popleft()
                yield self._store_and_serve(request, slots, batch)
        while waiting:
            yield self._serve(waiting.popleft()[0])

    def close(self) -> None:
        """Close the reader, and free the cache."""
        self._reader.close()
        self._store.close()

    def _missing_slots(self, request: Request) -> Ints:
        """Slots of the samples that are not cached, and may be decodable."""
        positions = request.positions
        return np.flatnonzero(~self._store.is_cached[positions] & ~self._is_refused(positions))

    def _is_refused(self, positions: Positions) -> npt.NDArray[np.bool_]:
        if not self._refused:
            return np.zeros(len(positions), np.bool_)
        return np.isin(positions, list(self._refused))

    def _store_and_serve(self, request: Request, slots: Ints, decoded: DecodedBatch) -> DecodedBatch:
        """Cache what the reader decoded of some slots of a batch, and serve all of the batch."""
        for decoded_slot, error in decoded.refused.items():
            self._refused[int(request.positions[slots[decoded_slot]])] = error
        # A sample may be refused in one batch and decoded in a later one, and is then in its `views`.
        decoded_slots = np.delete(slots, list(decoded.refused))
        images = upload(decoded.views[0], self._store.device)
        return self._serve(request, decoded_slots, images)

    def _serve(
        self, request: Request, slots: Ints | None = None, images: torch.Tensor | None = None
    ) -> DecodedBatch:
        """Serve a batch without the samples that are refused; arguments as of `DevicePictures.serve`."""
        slots = np.empty(0, np.int64) if slots is None else slots
        refused = self._is_refused(request.positions)
        refused[slots] = False
        served_slots = np.flatnonzero(~refused)
        batch = self._store.serve(request.select(served_slots), np.searchsorted(served_slots, slots), images)
        errors = {}
        for slot in np.flatnonzero(refused).tolist():
            # Copied, because raising it gives it a traceback, which would keep alive what its frames hold.
            errors[slot] = copy(self._refused[int(request.positions[slot])])
        return replace(batch, refused=errors)

"""One split on its way: read by a backend, sent to the device."""

from collections import deque
from collections.abc import Generator, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from loaders.batch import Batch, Reader, Request
from loaders.dataset import SplitData
from loaders.transfer import Sent, Transfer
from precache.errors import ImageError
from precache.pictures.sizes import Size


class Pipeline:
    """A reader, and what becomes of its batches.

    Attributes:
        lane: that of the loader.
        random_access: as of `Reader`.
        size: of what is served; None where only the first batch will tell.
    """

    def __init__(self, data: SplitData, reader: Reader, transfer: Transfer, size: Size | None) -> None:
        self.lane = transfer.lane
        self.size = size
        self.random_access = reader.random_access
        self._data = data
        self._reader = reader
        self._transfer = transfer

    def read(self, requests: Iterator[Request]) -> Generator[Sent, None, None]:
        """Yield one batch per request, where the lane is active."""
        asked: deque[Request] = deque()  # and not yet there

        def ask() -> Iterator[Request]:
            for request in requests:
                asked.append(request)
                yield request

        for decoded in self._reader.read(ask()):
            request = asked.popleft()
            padding, occurrences = None, request.occurrences
            if request.padding or occurrences is not None:
                kept = self.kept(request, decoded.refused)
                occurrences = None if occurrences is None else occurrences[kept]
                repeats = np.arange(len(kept)) >= len(kept) - request.padding
                padding = torch.from_numpy(repeats[kept]) if request.padding else None
            yield self._transfer.send(decoded, request.epoch, padding, occurrences)

    def receive(self, sent: Sent) -> Batch:
        """The batch, for use on the current stream."""
        return self._transfer.receive(sent)

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""
        self._reader.close()

    def kept(self, request: Request, refused: Mapping[int, ImageError]) -> npt.NDArray[np.bool_]:
        """Bool [n]: which of the samples asked for are there."""
        return ~np.isin(self._data.ids[request.positions], list(refused))

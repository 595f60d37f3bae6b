"""Batches on their way, read ahead by a thread."""

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from loaders.batch import DecodedBatch, Positions, Reader, Request
from loaders.order import EpochOrder
from loaders.prefetch import Prefetch
from loaders.transfer import Sent, Transfer

_AHEAD_BATCHES = 2


class Stream:
    """Epoch after epoch, without end. Knows no loader, so that a dropped loader takes it along.

    Attributes:
        place: epoch and number of the next batch.
    """

    def __init__(self, reader: Reader, transfer: Transfer, order: EpochOrder, place: tuple[int, int]) -> None:
        self.place = place
        self._epoch_batches = order.batch_count()
        self._batches = Prefetch(_send(reader, transfer, order, place), _AHEAD_BATCHES)
        self._peeked: Sent | None = None

    def peek(self) -> Sent:
        """The next batch, which `take` gives."""
        if self._peeked is None:
            self._peeked = next(self._batches)
        return self._peeked

    def take(self) -> Sent:
        """The next batch."""
        sent, self._peeked = self.peek(), None
        epoch, number = self.place
        self.place = (epoch, number + 1) if number + 1 < self._epoch_batches else (epoch + 1, 0)
        return sent

    def close(self) -> None:
        """End the thread."""
        self._peeked = None
        self._batches.close()


def _send(reader: Reader, transfer: Transfer, order: EpochOrder, place: tuple[int, int]) -> Iterator[Sent]:
    asked: deque[tuple[Request, int]] = deque()  # for, with its padding, and not yet there

    def ask() -> Iterator[Request]:
        epoch, start = place
        while batches := order.batches(epoch):
            for positions, padding in batches[start:]:
                request = Request(epoch, positions)
                asked.append((request, padding))
                yield request
            epoch, start = epoch + 1, 0

    with transfer.lane.active():
        for decoded in reader.read(ask()):
            request, padding = asked.popleft()
            repeats = _repeats(decoded, order.ids[request.positions], padding) if padding else None
            yield transfer.send(decoded, request.epoch, repeats)


def _repeats(decoded: DecodedBatch, ids: Positions, padding: int) -> torch.Tensor:
    """Bool [n]: which of `decoded` are among the last `padding` of the `ids` asked for."""
    repeats = np.arange(len(ids)) >= len(ids) - padding
    return torch.from_numpy(repeats[~np.isin(ids, list(decoded.refused))])

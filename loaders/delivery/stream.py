"""Batches on their way, read ahead by a thread."""

from collections.abc import Generator, Iterator
from typing import Protocol

from loaders.batch import Batch, Request
from loaders.delivery.devices import Lane
from loaders.delivery.prefetch import Prefetch
from loaders.order.order import Order
from loaders.transfer import Sent
from precache.pictures.sizes import Size

_AHEAD_BATCHES = 2


class Source(Protocol):
    """Where the batches come from: see `loaders.delivery.pipeline`.

    Attributes:
        lane: that of the loader.
        size: of what is served; None where only the first batch will tell.
    """

    lane: Lane
    size: Size | None

    def read(self, requests: Iterator[Request]) -> Generator[Sent, None, None]:
        """Yield one batch per request, where the lane is active; `requests` as of `Reader`."""

    def receive(self, sent: Sent) -> Batch:
        """The batch, for use on the current stream."""

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""


class Stream:
    """Epoch after epoch, without end. Knows no loader, so that a dropped loader takes it along.

    Attributes:
        place: epoch and number of the next batch.
    """

    def __init__(self, source: Source, order: Order, place: tuple[int, int]) -> None:
        self.place = place
        self._epoch_batches = len(order.cut)
        self._batches = Prefetch(_send(source, order, place), _AHEAD_BATCHES)
        self._peeked: Sent | None = None

    def peek(self) -> Sent:
        """The next batch, which `take` gives."""
        sent = self._peeked
        if sent is None:
            sent = self._peeked = next(self._batches)
        return sent  # another thread may have closed this

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


def _send(source: Source, order: Order, place: tuple[int, int]) -> Iterator[Sent]:
    def ask() -> Iterator[Request]:
        epoch, start = place
        while batches := order.batches(epoch):
            for number in range(start, len(batches)):
                positions, padding, occurrences = batches[number]
                yield Request(epoch, positions, padding, occurrences)
            epoch, start = epoch + 1, 0

    with source.lane.active():
        yield from source.read(ask())

"""The one loader: epochs, order, state and delivery, over any backend's `Reader`."""

import weakref
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from loaders.batch import Batch, LoaderSpec, Reader, Request
from loaders.dataset import SplitData
from loaders.order import EpochOrder, batch_count
from loaders.prefetch import prefetch
from loaders.skipping import ErrorPolicy
from loaders.transfer import Sent, Transfer
from precache.errors import SettingError, check_range

_AHEAD_BATCHES = 2


class EpochLoader:
    """Serves each epoch in the order that `(seed, epoch)` gives; see `loaders.batch.Loader`.

    The reader runs in a thread, `_AHEAD_BATCHES` ahead, over the end of an epoch into the next one:
    for a backend there are no epochs, only batches without end.
    """

    def __init__(
        self,
        spec: LoaderSpec,
        data: SplitData,
        reader: Reader,
        size: int,
        transfer: Transfer,
    ) -> None:
        self.spec = spec
        self.classes = data.classes
        self.samples = len(data.ids)
        self.size = size
        self._data = data
        self._reader = reader
        self._transfer = transfer
        self._error_policy = ErrorPolicy(spec.on_error)
        self._order = EpochOrder(
            ids=data.ids,
            shard_samples=data.shard_samples,
            kind=_shuffle_kind(spec, reader),
            seed=spec.seed,
            batch_size=spec.batch_size,
            last=spec.last,
            window_shards=data.window_shards(spec.memory_bytes),
            rank=spec.rank,
            world_size=spec.world_size,
        )
        self._epoch = 0
        self._served_batches = 0  # of this epoch, by the iterator that runs or by a loaded state
        self._resuming = False
        self._closed = False
        self._next_stream: _Stream | None = None  # stands at the start of an epoch
        # Weak, so that an iterator dropped in the middle ends its thread at once.
        self._running: weakref.ref[Any] | None = None

    def __len__(self) -> int:
        spec = self.spec
        return batch_count(self.samples, spec.batch_size, spec.last, spec.rank, spec.world_size)

    def __iter__(self) -> Iterator[Batch]:
        if self._closed:
            raise SettingError(f"the loader of {self._data.path} is closed; build another one")
        self._stop_running()
        if not self._resuming:
            self._served_batches = 0
        self._resuming = False
        iterator = self._serve(self._epoch, self._served_batches)
        self._running = weakref.ref(iterator)
        return iterator

    def set_epoch(self, epoch: int) -> None:
        """Serve epoch `epoch` next, from its start unless a loaded state stands in that epoch."""
        check_range("epoch", epoch, 0)
        if epoch != self._epoch:
            self._epoch, self._served_batches, self._resuming = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Epoch, batches served in it, and what they were served from: the same on every rank."""
        return {"epoch": self._epoch, "served_batches": self._served_batches, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, at the next iteration."""
        for name, ours in self._identity().items():
            if state.get(name) != ours:
                raise SettingError(
                    f"this state was taken with {name} {state.get(name)!r}, the loader has {ours!r}; "
                    f"build it with the same data and settings"
                )
        epoch, served = state.get("epoch"), state.get("served_batches")
        spec = self.spec  # another rank may have a batch more than this one
        most = batch_count(self.samples, spec.batch_size, spec.last, 0, spec.world_size)
        for name, value in (("epoch", epoch), ("served_batches", served)):
            if not isinstance(value, int) or value < 0 or (name == "served_batches" and value > most):
                raise SettingError(f"this state has {name} {value!r}; take one with state_dict()")
        self._stop_running()
        self._epoch, self._served_batches = int(epoch or 0), int(served or 0)
        self._resuming = True

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""
        if not self._closed:
            self._closed = True
            self._stop_running()
            if self._next_stream is not None:
                self._next_stream.close()
            self._reader.close()

    def __enter__(self) -> "EpochLoader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _serve(self, epoch: int, start: int) -> Iterator[Batch]:
        stream, self._next_stream = self._next_stream, None
        if stream is not None and (start > 0 or stream.epoch != epoch):
            stream.close()
            stream = None
        if stream is None:
            stream = _Stream(self._reader, self._transfer, self._order, epoch, start)
        try:
            for _ in range(start, len(self)):
                sent = next(stream.batches)
                self._error_policy.check(sent.refused, left=len(sent.batch.ids))
                batch = self._transfer.receive(sent)
                del sent
                # counted before it is handed out: a state taken in the loop body has it as served
                self._served_batches += 1
                yield batch
        except BaseException:  # GeneratorExit too: dropped in the middle
            stream.close()
            raise
        stream.epoch = epoch + 1
        self._next_stream = stream
        if self._epoch == epoch:  # unless set_epoch was called meanwhile
            self._epoch, self._served_batches = epoch + 1, 0

    def _identity(self) -> dict[str, Any]:
        return {
            "dataset": self._data.digest,
            "split": self.spec.split,
            "seed": self.spec.seed,
            "shuffle": self._order.kind,
            "global_batch_size": self.spec.batch_size * self.spec.world_size,
            "last": self.spec.last,
            **({"window_shards": self._order.window_shards} if self._order.kind == "window" else {}),
        }

    def _stop_running(self) -> None:
        iterator = None if self._running is None else self._running()
        if iterator is not None:
            iterator.close()


class _Stream:
    """Batches on their way, read ahead. Knows no loader, so that a dropped loader takes it along.

    Attributes:
        epoch: that the next batch is of.
        batches: epoch after epoch, without end.
    """

    def __init__(self, reader: Reader, transfer: Transfer, order: EpochOrder, epoch: int, start: int) -> None:
        self.epoch = epoch
        self.batches = prefetch(_send(reader, transfer, _requests(order, epoch, start)), _AHEAD_BATCHES)

    def close(self) -> None:
        """End the thread."""
        self.batches.close()


def _send(reader: Reader, transfer: Transfer, requests: Iterator[Request]) -> Iterator[Sent]:
    epochs: deque[int] = deque()  # of what is asked for and not yet there

    def ask() -> Iterator[Request]:
        for request in requests:
            epochs.append(request.epoch)
            yield request

    for decoded in reader.read(ask()):
        yield transfer.send(decoded, epochs.popleft())


def _requests(order: EpochOrder, epoch: int, start: int) -> Iterator[Request]:
    """The batches from number `start` of `epoch` on, epoch after epoch."""
    while batches := order.batches(epoch):
        for positions in batches[start:]:
            yield Request(epoch, positions)
        epoch, start = epoch + 1, 0


def _shuffle_kind(spec: LoaderSpec, reader: Reader) -> str:
    """`full`, `window` or `none`."""
    if spec.shuffle is True:
        return "full" if reader.random_access else "window"
    if spec.shuffle == "full" and not reader.random_access:
        raise SettingError(
            f"shuffle 'full' needs random access, which {spec.path} does not give; use 'window' or True"
        )
    return "none" if spec.shuffle is False else spec.shuffle

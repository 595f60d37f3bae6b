"""The one loader: epochs, order, state and delivery, over any backend's `Reader`."""

import os
import weakref
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace, TracebackType
from typing import Any, NoReturn

from torch.utils.data import IterableDataset

from loaders.batch import Batch, LoaderSpec, Reader, Request
from loaders.dataset import SplitData
from loaders.order import EpochOrder, batch_count
from loaders.prefetch import prefetch
from loaders.skipping import ErrorPolicy
from loaders.transfer import Sent, Transfer
from precache.errors import SettingError, check_range

_AHEAD_BATCHES = 2


class EpochLoader(IterableDataset[Batch]):
    """Serves each epoch in the order that `(seed, epoch)` gives; see `loaders.batch.Loader`.

    An IterableDataset, so that torch's DataLoader and torchdata's StatefulDataLoader take it as the
    dataset (`batch_size=None`, no workers of theirs).

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
        self._process = os.getpid()
        self._next_stream: _Stream | None = None  # stands at the start of an epoch
        # Weak, so that an iterator dropped in the middle ends its thread at once.
        self._running: weakref.ref[Any] | None = None

    def __len__(self) -> int:
        spec = self.spec
        return batch_count(self.samples, spec.batch_size, spec.last, spec.rank, spec.world_size)

    def __iter__(self) -> Iterator[Batch]:
        if self._closed:
            raise SettingError(f"the loader of {self._data.path} is closed; build another one")
        self._check_process()
        self._stop_running()
        if not self._resuming:
            if self._all_served():  # by an iterator that was not asked for more than `len()` batches
                self._epoch += 1
            self._served_batches = 0
        iterator = self._serve()
        self._running = weakref.ref(iterator)
        return iterator

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Lightning calls `batch_sampler.sampler.set_epoch` ahead of each epoch."""
        return SimpleNamespace(sampler=self)

    def set_epoch(self, epoch: int) -> None:
        """Serve epoch `epoch` next, from its start unless a loaded state stands in that epoch."""
        check_range("epoch", epoch, 0)
        if epoch != self._epoch or (self._all_served() and not self._resuming):
            self._epoch, self._served_batches, self._resuming = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Epoch, batches served in it, and what they were served from: the same on every rank.

        Of the last batch it says that the epoch's rest is empty; once the iterator has ended, that the
        next epoch starts. So does the state of torchdata's StatefulDataLoader.
        """
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
            if os.getpid() != self._process:
                return  # they are those of the process that built it
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

    def __reduce__(self) -> NoReturn:
        raise SettingError(
            f"the loader of {self._data.path} cannot be copied or sent to another process; "
            f"build it in the process that uses it"
        )

    def _serve(self) -> Iterator[Batch]:
        # Read at the first batch: an iterator that is not used takes nothing away, and Lightning calls
        # set_epoch after it.
        epoch, start, self._resuming = self._epoch, self._served_batches, False
        stream, self._next_stream = self._next_stream, None
        if stream is not None and (start > 0 or stream.epoch != epoch):
            stream.close()
            stream = None
        if stream is None:
            stream = _Stream(self._reader, self._transfer, self._order, epoch, start)
        try:
            for number in range(start, len(self)):
                self._check_process()
                sent = next(stream.batches)
                self._error_policy.check(sent.refused, left=len(sent.batch.ids))
                batch = self._transfer.receive(sent)
                del sent  # or the batch would be held until the next one is there
                # counted before it is handed out: a state taken in the loop body has it as served
                if self._epoch == epoch:  # unless set_epoch was called meanwhile
                    self._served_batches = number + 1
                if number + 1 == len(self):
                    self._keep(stream, epoch + 1)  # now: the caller need not ask for more
                yield batch
                del batch
        except BaseException:  # GeneratorExit too: dropped in the middle
            if stream is not self._next_stream:
                stream.close()
            raise
        self._keep(stream, epoch + 1)
        if self._epoch == epoch:
            self._epoch, self._served_batches = epoch + 1, 0

    def _keep(self, stream: "_Stream", epoch: int) -> None:
        stream.epoch, self._next_stream = epoch, stream

    def _all_served(self) -> bool:
        return 0 < len(self) <= self._served_batches

    def _check_process(self) -> None:
        """SettingError in a forked process: the threads and workers did not come along."""
        if os.getpid() != self._process:
            raise SettingError(
                f"the loader of {self._data.path} was built in process {self._process}, this is process "
                f"{os.getpid()}; build it in the process that uses it"
            )

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

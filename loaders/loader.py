"""The one loader: epochs, order, state and delivery, over any backend's `Reader`."""

import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np

from loaders.batch import Batch, DecodedBatch, LoaderSpec, Positions, Reader
from loaders.dataset import SplitData
from loaders.order import cut, full_order, window_order
from loaders.prefetch import prefetch
from loaders.transfer import deliver
from precache.errors import SettingError, check_range

_AHEAD_BATCHES = 2


class EpochLoader:
    """Serves each epoch in the order that `(seed, epoch)` gives; see `loaders.batch.Loader`."""

    def __init__(self, spec: LoaderSpec, data: SplitData, reader: Reader, size: int) -> None:
        self.spec = spec
        self.classes = data.classes
        self.samples = len(data.ids)
        self.size = size
        self._data = data
        self._reader = reader
        self._shuffle = _shuffle_kind(spec, reader)
        self._epoch = 0
        self._served_batches = 0  # of this epoch, by the iterator that runs or by a loaded state
        self._resuming = False
        self._closed = False
        # Weak, so that an iterator dropped in the middle ends its thread at once.
        self._running: weakref.ref[Any] = weakref.ref(self)

    def __len__(self) -> int:
        full, rest = divmod(self.samples, self.spec.batch_size)
        return full + (rest > 0 and self.spec.last == "partial")

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
            self._resuming = False
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Epoch, batches served in it, and what they were served from."""
        return {"epoch": self._epoch, "served_batches": self._served_batches, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, at the next iteration."""
        for name, ours in self._identity().items():
            if state.get(name) != ours:
                raise SettingError(
                    f"this state was taken with {name} {state.get(name)!r}, the loader has {ours!r}; "
                    f"build it with the same data and settings"
                )
        self._stop_running()
        self._epoch, self._served_batches = state["epoch"], state["served_batches"]
        self._resuming = True

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""
        if not self._closed:
            self._closed = True
            self._stop_running()
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
        batches = cut(self._order(epoch), self.spec.batch_size, self.spec.last)[start:]
        decoded: Iterator[DecodedBatch] = self._reader.read(batches)
        if self._reader.threaded:
            decoded = prefetch(decoded, _AHEAD_BATCHES)
        for batch in decoded:
            # counted before it is handed out: a state taken in the loop body counts it as served
            self._served_batches += 1
            yield deliver(batch, self.spec.device, self.spec.dtype)
        self._epoch, self._served_batches = epoch + 1, 0

    def _order(self, epoch: int) -> Positions:
        if self._shuffle == "full":
            return full_order(self._data.ids, self.spec.seed, epoch)
        if self._shuffle == "window":
            return window_order(self._data.shard_samples, self.spec.seed, epoch)
        return np.arange(self.samples)

    def _identity(self) -> dict[str, Any]:
        return {
            "dataset": self._data.digest,
            "split": self.spec.split,
            "seed": self.spec.seed,
            "shuffle": self._shuffle,
            "batch_size": self.spec.batch_size,
            "last": self.spec.last,
        }

    def _stop_running(self) -> None:
        iterator = self._running()
        if iterator is not None and iterator is not self:
            iterator.close()


def _shuffle_kind(spec: LoaderSpec, reader: Reader) -> str:
    """`full`, `window` or `none`."""
    if spec.shuffle is True:
        return "full" if reader.random_access else "window"
    if spec.shuffle == "full" and not reader.random_access:
        raise SettingError(
            f"shuffle 'full' needs random access, which {spec.path} does not give; use 'window' or True"
        )
    return "none" if spec.shuffle is False else spec.shuffle

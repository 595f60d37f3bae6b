"""The one loader: epochs, order, state and delivery, over any backend's `Reader`."""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import index
from types import TracebackType
from typing import Any, NoReturn, SupportsIndex

from torch.utils.data import IterableDataset

from loaders import frameworks
from loaders.batch import Batch
from loaders.dataset import SplitData
from loaders.delivery.iterations import Asked, Batches, Places
from loaders.delivery.prefetch import of_dead_worker
from loaders.delivery.skipping import ErrorPolicy
from loaders.delivery.stream import Source, Stream
from loaders.delivery.threads import Ending
from loaders.frameworks import Place
from loaders.mixture import MixedData
from loaders.order.order import Order
from loaders.settings import LoaderSpec
from loaders.transfer import Sent
from precache.errors import SettingError, WorkerError, check_range, printable
from precache.pictures.sizes import Size, as_size

_TURNS = 8  # of two iterations of one loader, before it says what they cost
_TAKING_S = 0.05  # for which closing waits, before it ends what another thread waits for
_LOGGER = logging.getLogger(__name__)
OpenSource = Callable[[LoaderSpec], Source]
"""Opens what serves as the settings say."""


class EpochLoader(IterableDataset[Batch]):
    """Serves each epoch in the order that `(seed, epoch)` gives; see `loaders.batch.Loader`.

    An IterableDataset, so that torch's DataLoader and torchdata's StatefulDataLoader take it as the
    dataset (`batch_size=None`, no workers of theirs). For what takes a loader for a DataLoader it has what
    such a one has: see `loaders.frameworks`.

    The reader runs in a thread, a few batches ahead, over the end of an epoch into the next one:
    for a backend there are no epochs, only batches without end.

    An iteration begins with its first batch: what is created and never asked, as Lightning does, takes
    no epoch away. Two may run in turns, each in its own epoch and place; there is one stream of batches
    for all, which is opened anew where one asks for another batch than the next. What it has read ahead of
    an iteration that was left midway is kept until then. They may run in threads of their own: these take
    turns, too.
    """

    # The loader shares each epoch out by itself: Accelerate has nothing to prepare.
    _is_accelerate_prepared = True
    # Of a DataLoader between the loader and the caller, for those who make one.
    num_workers, prefetch_factor, collate_fn = 0, None, staticmethod(frameworks.as_is)

    def __init__(
        self,
        spec: LoaderSpec,
        data: SplitData | MixedData,
        order: Order,
        source: Source,
        open_source: OpenSource,
    ) -> None:
        """`source`: what `open_source` gave for `spec`."""
        self.spec = spec
        self.classes = data.classes
        self.class_to_idx = {name: label for label, name in enumerate(data.classes)}
        self.samples = order.epochs.samples
        self.batch_size = spec.batch_size
        self.drop_last = spec.last == "drop"
        self.world_size = spec.world_size
        self._size = source.size
        self._data = data
        self._source, self._open_source = source, open_source
        self._error_policy = ErrorPolicy(spec.reading.on_error)
        self._order = order
        self._place: Place = (0, 0)  # epoch and batches served in it, by who was served last
        self._coming = 0  # the epoch of an iteration of which nothing is said
        self._asked: Asked | None = None
        self._latest: weakref.ref[Places] | None = None
        self._begun: list[weakref.ref[Places]] = []  # no WeakSet: Python code of that is run as one goes
        self._resized = False
        self._stream: Stream | None = None
        self._turns = 0
        self._closed = False
        self._taking = threading.RLock()  # again by a handler of signals, which may close it
        self._process = os.getpid()

    def __len__(self) -> int:
        return len(self._order.cut)

    def __iter__(self) -> Iterator[Batch]:
        self._check_usable()
        return Batches(self)

    @property
    def size(self) -> Size:
        """Of the served pictures; where only a function of the caller's knows it, of the first batch."""
        if self._size is None and len(self):
            self._check_usable()
            asked = self._asked
            place = (self._coming, 0) if asked is None else (asked.epoch, asked.served % len(self))
            with self._taking:
                self._size = as_size(*self._next_at(place, Stream.peek).batch.images.shape[-2:])
        return self._data.served_size(self.spec.size) if self._size is None else self._size

    @property
    def dataset(self) -> frameworks.SplitDataset:
        """The samples of the split: `len(loader.dataset)`, `loader.dataset.targets`."""
        return frameworks.SplitDataset(self, self._data)

    @property
    def sampler(self) -> frameworks.RankSampler:
        """What this rank serves; `loader.sampler.set_epoch` is the loader's."""
        return self.batch_sampler.sampler

    @property
    def batch_sampler(self) -> frameworks.RankBatchSampler:
        """The batches of an iteration; Lightning calls its `sampler.set_epoch` ahead of each epoch."""
        epoch = self._coming if self._asked is None else self._asked.epoch
        return frameworks.make_batch_sampler(self, self._order, epoch)

    def set_epoch(self, epoch: int) -> None:
        """Serve epoch `epoch` next, from its start unless a loaded state stands in that epoch."""
        check_range("epoch", epoch, 0)
        asked = self._asked
        if asked is None or not asked.loaded or asked.epoch != epoch:
            self._asked = Asked(epoch, 0, loaded=False)

    def set_size(self, size: Size) -> None:
        """Serve pictures of `size` from the next iteration on; as of `loaders.build`.

        Raises:
            SettingError: an iteration is under way, or this size cannot be served; then nothing changes.
        """
        self._check_usable()
        if self._midway():
            raise SettingError(
                f"set_size({size!r}) in the middle of an epoch, after {self._place[1]:,} of {len(self):,} "
                f"batches; call it between epochs: end the iteration, or drop its iterator"
            )
        spec = replace(self.spec, size=size)
        self._data.served_size(spec.size)  # refuses what is not stored
        if spec.size != self.spec.size:
            self._drop_stream()
            self._source.close()
            self._closed = True  # if opening fails
            self._source = self._open_source(spec)
            self._closed = False
            self.spec, self._size = spec, self._source.size
        self._resized = True

    def path_of(self, sample_id: SupportsIndex, dataset: SupportsIndex | None = None) -> str:
        """Path of the picture of a sample, one of `batch.ids`, relative to the source tree.

        Args:
            dataset: of several, which: of `batch.fields["dataset"]`.

        Raises:
            SettingError: no such sample is in the split.
        """
        try:
            return self._data.part(None if dataset is None else index(dataset)).path_of(index(sample_id))
        except TypeError:
            raise SettingError(f"sample {sample_id!r}: an id is an integer, one of batch.ids") from None

    def state_dict(self) -> dict[str, Any]:
        """Epoch, batches served in it, and what they were served from: the same on every rank.

        Of the last batch it says that the epoch's rest is empty; once the iterator has ended, that the
        next epoch starts. So does the state of torchdata's StatefulDataLoader. Of an iterator that was left
        midway it says how far it came, so that a program that was interrupted can go on there; of two
        that take turns, what was served last.
        """
        epoch, served = self._place
        asked, latest = self._asked, None if self._latest is None else self._latest()
        if asked is not None:
            runs = latest is not None and not latest.ended and latest.epoch == asked.epoch == epoch
            if asked.loaded or not runs:  # else the call is about the iteration after this one
                epoch, served = asked.epoch, asked.served
        size = {"size": self.spec.size} if self._resized else {}
        return {"epoch": epoch, "served_batches": served, **size, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, at the next iteration, with the size that `set_size` had set."""
        if not isinstance(state, Mapping):
            raise SettingError(f"a state is what state_dict() gave, got {state!r}")
        for name, ours in self._identity().items():
            if state.get(name) != ours:
                raise SettingError(
                    f"this state was taken with {name} {state.get(name)!r}, the loader has {ours!r}; "
                    f"build it with the same data and settings"
                )
        epoch, served = state.get("epoch"), state.get("served_batches")
        for name, value in (("epoch", epoch), ("served_batches", served)):
            most = len(self) if name == "served_batches" else None
            if not isinstance(value, int) or value < 0 or (most is not None and value > most):
                raise SettingError(f"this state has {name} {value!r}; take one with state_dict()")
        if "size" in state:
            size = state["size"]
            self.set_size(as_size(*size) if isinstance(size, list) and len(size) == 2 else size)
        self._asked = Asked(int(epoch or 0), int(served or 0), loaded=True)

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""
        if not self._closed:
            self._closed = True
            if os.getpid() != self._process:
                return  # they are those of the process that built it
            while not self._taking.acquire(timeout=_TAKING_S):  # by a thread that waits for a batch
                if (stream := self._stream) is not None:
                    stream.close()
            try:
                for end in (self._drop_stream, self._source.close):
                    try:
                        end()
                    except RuntimeError as error:  # see `Batches`: of a worker that died, and is not needed
                        if of_dead_worker(error) is None:
                            raise
                        end()
            finally:
                self._taking.release()

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

    def __repr__(self) -> str:
        spec = self.spec
        rank = f", rank {spec.rank} of {spec.world_size}" if spec.world_size > 1 else ""
        return (
            f"<loaders.Loader {self._data.kind} {self._data.path}: {spec.split}, {self.samples:,} samples, "
            f"batches of {spec.batch_size:,}, {len(self):,} per epoch{rank}>"
        )

    def places(self) -> Iterator[Place]:
        """Epoch and number of each batch of an iteration, which begins, and finds its epoch, at the first."""
        return Places(self)

    def begin(self, places: Places) -> tuple[int, int]:
        """Epoch and first batch of an iteration that begins."""
        asked, self._asked = self._asked, None
        self._place = (self._coming, 0) if asked is None else (asked.epoch, asked.served)
        self._latest = weakref.ref(places)
        self._begun = [*self._midway(), self._latest]
        self._coming = self._place[0] + 1
        return self._place

    def end(self) -> None:
        """An iteration has served its last batch."""
        self._place = (self._coming, 0)

    def take_next(self, places: Places) -> Batch:
        """The batch of the next of `places`."""
        self._check_usable()
        with self._taking:
            return self.take(next(places))

    def take(self, place: Place) -> Batch:
        """The batch of that epoch and number, ready for the current stream."""
        self._check_usable()  # before the lock, which a thread may have held when this process was forked
        with self._taking:
            sent = self._next_at(place, Stream.take)
            batch = self._source.receive(sent)
            if self._size is None:
                self._size = as_size(*batch.images.shape[-2:])
            # counted before it is handed out: a state taken in the loop body has it as served
            self._place = (place[0], place[1] + 1)
            return batch

    def _next_at(self, place: Place, take: Callable[[Stream], Sent]) -> Sent:
        """What `take` gets from the stream, of which the next batch is that of `place`."""
        self._check_usable()  # another thread may have closed it
        try:
            sent = take(self._stream_at(place))
            self._error_policy.check(sent.refused, left=len(sent.batch.ids))
        except (StopIteration, Ending) as ended:  # a stream has no end but that another thread closes it
            self._drop_stream()
            self._check_usable()
            if isinstance(ended, Ending):  # the program's
                raise
            raise WorkerError(f"{self._data.path}: reading ended before the epoch did") from None
        except BaseException:
            self._drop_stream()
            raise
        return sent

    def _stream_at(self, place: Place) -> Stream:
        """The stream of batches, of which the next one is that of `place`."""
        stream = self._stream
        if stream is not None and stream.place == place:
            return stream
        if stream is not None and place[1] > 0:
            self._turns += 1
            if self._turns == _TURNS:
                _LOGGER.warning(
                    "%s: two iterations of one loader take turns, which restarts reading at each turn; "
                    "build one loader for each",
                    printable(str(self._data.path)),
                )
        self._drop_stream()
        self._stream = Stream(self._source, self._order, place)
        return self._stream

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None  # not before: closing may be broken off

    def _midway(self) -> list["weakref.ref[Places]"]:
        """The iterations that are begun and neither ended nor thrown away."""
        return [known for known in self._begun if (places := known()) is not None and not places.ended]

    def _check_usable(self) -> None:
        """SettingError where it is closed, or in a forked process: the threads did not come along."""
        if self._closed:
            raise SettingError(f"the loader of {self._data.path} is closed; build another one")
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
            "global_batch_size": self.spec.batch_size * self.spec.world_size,
            "last": self.spec.last,
            **self._order.identity(),
        }

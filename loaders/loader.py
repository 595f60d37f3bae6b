"""The one loader: epochs, order, state and reading ahead, over any backend's `Reader`.

Beside it is what frameworks look for at a loader that they take for torch's DataLoader: data set and
samplers. Who puts a DataLoader together out of them, as Accelerate's `skip_first_batches` does, gets the
loader's own batches: `RankBatchSampler` names them, and `SplitDataset` hands them over.
"""

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import index
from typing import Any, NamedTuple, NoReturn, SupportsIndex, TypeAlias

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, SequentialSampler

from loaders.batch import Batch, Request
from loaders.converting import Converting
from loaders.dataset import RAW, SplitData, reason_with_remedy, served_size
from loaders.deliver import Ending, Prefetch, dead_worker_error
from loaders.mixture import Mixture
from loaders.order import Order
from loaders.settings import LoaderSpec
from loaders.transfer import Pipeline, receive
from precache.errors import ImageError, SettingError, WorkerError, check_range, printable
from precache.pictures.sizes import Size, as_size

_AHEAD_BATCHES = 2
_TURNS = 8  # of two iterations of one loader, before it says what they cost
_TAKING_S = 0.05  # for which closing waits, before it ends what another thread waits for
_LOGGER = logging.getLogger(__name__)
Source: TypeAlias = Pipeline | Converting | Mixture
Place: TypeAlias = tuple[int, int]
"""Epoch and number of a batch."""


class _Start(NamedTuple):
    """Where the next iteration starts, and who says so: a `state`, `set_epoch` or nobody."""

    epoch: int
    served: int = 0
    said_by: str = ""


class Iteration(Iterator[Batch]):
    """One iteration of a loader, which begins with its first batch; over after an error.

    Attributes:
        epoch: that it serves; -1 before it has begun.
        ended: whether it has served its last batch.
    """

    def __init__(self, loader: "Loader") -> None:
        self.epoch, self._number = -1, -1
        self.ended = False
        self._loader = loader

    def __next__(self) -> Batch:
        try:
            self._loader._check_usable()
            with self._loader._taking:
                if (place := self.next_place()) is None:
                    raise StopIteration
                return self._loader.take(place)
        except BaseException as error:
            self.ended = True
            # torch's handler of SIGCHLD, which any DataLoader sets up, raises wherever this thread is
            if isinstance(error, RuntimeError) and (death := dead_worker_error(error)) is not None:
                raise death from error
            raise

    def next_place(self) -> Place | None:
        """Epoch and number of the next batch; None: it has served the last one."""
        loader = self._loader
        if not self.ended and self._number < 0:
            self.epoch, self._number = loader.begin(self)
        if not self.ended and self._number == len(loader):
            self.ended = True
            loader._place = loader._next.epoch, 0
        if self.ended:
            return None
        self._number += 1
        return self.epoch, self._number - 1


class SplitDataset(Dataset[Any]):
    """The samples of a split: how many, of which classes.

    Attributes:
        classes: class names.
        class_to_idx: class name -> label.
    """

    total_dataset_length = 0  # Accelerate need not cut anything off what it gathers of the last batch

    def __init__(self, loader: "Loader") -> None:
        self.classes, self.class_to_idx = loader.classes, loader.class_to_idx
        self._loader = loader

    @property
    def targets(self) -> list[Any]:
        """What each sample is labelled with, in stored order: an index, a number, or a list of them."""
        return [target for part in self._loader._parts for target in part.targets()]

    def __len__(self) -> int:
        return sum(map(len, self._loader._parts))

    def __repr__(self) -> str:
        kind, path, split = self._loader._kind, self._loader._path, self._loader.spec.split
        return (
            f"<loaders.SplitDataset {kind} {path}: {split}, {len(self):,} samples, "
            f"{len(self.classes):,} classes>"
        )

    def __getitem__(self, position: Any) -> Any:
        raise SettingError(
            f"the loader of {self._loader._path} serves whole batches, and divides them among processes by "
            f"itself; iterate over the loader, pass it to accelerator.prepare(), or pass on its `dataset` "
            f"and `batch_sampler` together, unchanged"
        )

    def __getitems__(self, asked: list[int]) -> Batch:
        """The batch that `RankBatchSampler` named."""
        if isinstance(asked, BatchPlace) and asked.follows():
            return self._loader.take(asked.place)
        return self[asked]  # type: ignore[no-any-return]  # raises


class BatchPlace(list[int]):
    """The samples of a batch, as positions in stored order, and where in an iteration it is served."""

    def __init__(self, positions: list[int], place: Place, taken: list[int]) -> None:
        super().__init__(positions)
        self.place = place
        self._samples = len(positions)
        self._taken = taken  # the number of the batch taken before in the same iteration

    def follows(self) -> bool:
        """Whether it is whole and next: none between the one before and this one was given to another."""
        number = self.place[1]
        follows = len(self) == self._samples and (not self._taken or number == self._taken[0] + 1)
        self._taken[:] = [number]
        return follows


class RankSampler(Sampler[int]):
    """The positions that this rank serves in the coming epoch; who sets its epoch sets the loader's."""

    def __init__(self, loader: "Loader", epoch: int) -> None:
        self._loader, self._epoch = loader, epoch

    def set_epoch(self, epoch: int) -> None:
        """See `loaders.Loader.set_epoch`."""
        self._loader.set_epoch(epoch)
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for request in self._loader._order.batches(self._epoch):
            yield from request.positions.tolist()

    def __len__(self) -> int:
        return self._loader._order.rank_samples()


class InStoredOrder(RankSampler, SequentialSampler):
    """Of a loader that does not shuffle: Lightning's `overfit_batches` wants a SequentialSampler."""


class RankBatchSampler:
    """Names the batches of one iteration of the loader, as torch's `BatchSampler` names samples."""

    def __init__(self, loader: "Loader", sampler: RankSampler) -> None:
        self.sampler = sampler
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """See `loaders.Loader.set_epoch`."""
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[BatchPlace]:
        taken: list[int] = []
        requests: Iterator[Request] | None = None
        iteration = self._loader.__iter__()
        while (place := iteration.next_place()) is not None:
            requests = requests or self._loader._order.batches(*place)
            yield BatchPlace(next(requests).positions.tolist(), place, taken)

    def __len__(self) -> int:
        return len(self._loader)


def as_is(batch: torch.Tensor) -> torch.Tensor:
    """What is served is collated."""
    return batch


class Loader(IterableDataset[Batch]):
    """What `loaders.build` returns.

    Iterating serves one epoch, each sample of the split once over all ranks; `last` of `loaders.Sampling`
    says what happens to those that fill no batch. The next iteration serves the next epoch, also where this
    one was left midway, as that of torch's DataLoader draws anew; `set_epoch` or a loaded state say
    otherwise. An iteration begins with its first batch: what is created and never asked, as Lightning does,
    takes no epoch away. Two may run in turns, also in threads of their own; a loader each is faster, since
    there is one stream of batches for all, which is opened anew where one asks for another batch than the
    next.

    The reader runs in a thread, a few batches ahead, over the end of an epoch into the next one: for a
    backend there are no epochs, only batches without end. What it has read ahead of an iteration that was
    left midway is kept until another batch than the next is asked for.

    An IterableDataset, so that torch's DataLoader and torchdata's StatefulDataLoader take it as the
    dataset (`batch_size=None`, no workers of theirs). For what takes a loader for a DataLoader it has what
    such a one has: see `SplitDataset` and `RankBatchSampler`.

    Attributes:
        spec: the settings.
        classes: class names; none where samples are labelled with numbers, or not at all.
        class_to_idx: class name -> label, or column of the labels.
        samples: of an epoch.
        batch_size: of one rank.
        drop_last: whether samples that fill no batch are left out.
        num_workers: 0, for who makes a DataLoader of this loader's parts; `workers` of `Reading` is another.
    """

    # The loader shares each epoch out by itself: Accelerate has nothing to prepare.
    _is_accelerate_prepared = True
    # Of a DataLoader between the loader and the caller, for those who make one.
    num_workers, prefetch_factor, collate_fn = 0, None, staticmethod(as_is)

    def __init__(
        self,
        spec: LoaderSpec,
        parts: Sequence[SplitData],
        order: Order,
        source: Source,
        open_source: Callable[[LoaderSpec], Source],
    ) -> None:
        """`parts`: each with the classes of all; `open_source` opens what serves by settings: `source`."""
        self.spec = spec
        self._path = " + ".join(str(part.path) for part in parts)
        self.classes = parts[0].classes
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        self.samples = order.epochs.samples
        self.batch_size = spec.batch_size
        self.drop_last = spec.last == "drop"
        self._size = source.size
        self._parts = parts
        self._source, self._open_source = source, open_source
        self._left_out: set[str] = set()  # files of which a warning said so
        self._order = order
        self._place: Place = (0, 0)  # epoch and batches served in it, by who was served last
        self._next = _Start(0)
        self._iterations: list[weakref.ref[Iteration]] = []  # that have begun; the latest is last
        self._resized = False
        self._ahead: Prefetch[Batch] | None = None
        self._ahead_place: Place = (0, 0)  # of the next batch that it gives
        self._peeked: tuple[Place, Batch] | None = None  # the one before that, until it is served
        self._turns = 0
        self._closed = False
        self._taking = threading.RLock()  # again by a handler of signals, which may close it
        self._process = os.getpid()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iteration:
        self._check_usable()
        return Iteration(self)

    @property
    def size(self) -> Size:
        """Of the served pictures; where only a function of the caller's knows it, of the first batch."""
        if self._size is None and len(self):
            self._check_usable()
            place = self._next.epoch, self._next.served % len(self)
            with self._taking:
                self._size = as_size(*self._peek(place).images.shape[-2:])
        return served_size(self._parts, self.spec.size) if self._size is None else self._size

    @property
    def dataset(self) -> SplitDataset:
        """The samples of the split: `len(loader.dataset)`, `loader.dataset.targets`."""
        return SplitDataset(self)

    @property
    def sampler(self) -> RankSampler:
        """What this rank serves; `loader.sampler.set_epoch` is the loader's."""
        return self.batch_sampler.sampler

    @property
    def batch_sampler(self) -> RankBatchSampler:
        """The batches of an iteration; Lightning calls its `sampler.set_epoch` ahead of each epoch."""
        kind = RankSampler if self.spec.shuffle else InStoredOrder
        return RankBatchSampler(self, kind(self, self._next.epoch))

    def set_epoch(self, epoch: int) -> None:
        """Serve epoch `epoch` next, from its start unless a loaded state stands in that epoch."""
        epoch = check_range("epoch", epoch, 0)
        if self._next.said_by != "state" or self._next.epoch != epoch:
            self._next = _Start(epoch, said_by="set_epoch")

    def set_size(self, size: Size) -> None:
        """Serve pictures of `size` from the next iteration on (progressive resizing), as of `loaders.build`.

        The state carries it. What `Reading(cache=...)` holds is read anew, worker processes are started anew.

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
        if spec.size != self.spec.size:
            self._drop_ahead()
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
        number = 0 if dataset is None and len(self._parts) == 1 else dataset
        if number is None or number not in range(len(self._parts)):
            raise SettingError(
                f"dataset {dataset!r}: ids are those of one of {self._path}; give its number as dataset=, of "
                f"batch.fields['dataset'], from 0 to {len(self._parts) - 1}"
            )
        with suppress(TypeError):  # what is no integer is in no split either
            sample_id = index(sample_id)
        return self._parts[index(number)].path_of(sample_id)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, batches served in it, and what they were served from: JSON values, the same on every rank.

        Of the last batch it says that the epoch's rest is empty; once the iterator has ended, that the
        next epoch starts. So does the state of torchdata's StatefulDataLoader. Of an iterator that was left
        midway it says how far it came, so that a program that was interrupted can go on there; of two
        that take turns, what was served last.
        """
        epoch, served = self._place
        latest = self._iterations[-1]() if self._iterations else None
        if self._next.said_by:
            runs = latest is not None and not latest.ended and latest.epoch == self._next.epoch == epoch
            if self._next.said_by == "state" or not runs:  # else it is said of the iteration after this one
                epoch, served, _ = self._next
        size = {"size": self.spec.size} if self._resized else {}
        return {"epoch": epoch, "served_batches": served, **size, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, at the next iteration, with the size that `set_size` had set.

        Raises:
            SettingError: it is no state, or one of other data or settings.
        """
        if not isinstance(state, Mapping):
            raise SettingError(f"a state is what state_dict() gave, got {state!r}")
        for name, ours in self._identity().items():
            if state.get(name) != ours:
                raise SettingError(
                    f"this state was taken with {name} {state.get(name)!r}, the loader has {ours!r}; "
                    f"build it with the same data and settings"
                )
        try:
            epoch = check_range("epoch", state.get("epoch"), 0)  # type: ignore[arg-type]  # it looks
            served = check_range("served_batches", state.get("served_batches"), 0, len(self))  # type: ignore[arg-type]
        except SettingError as error:
            raise SettingError(f"{error} in this state; take one with state_dict()") from None
        if "size" in state:
            size = state["size"]
            self.set_size(as_size(*size) if isinstance(size, list) and len(size) == 2 else size)
        self._next = _Start(epoch, served, "state")

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""
        if not self._closed:
            self._closed = True
            if os.getpid() != self._process:
                return  # they are those of the process that built it
            while not self._taking.acquire(timeout=_TAKING_S):  # by a thread that waits for a batch
                if (ahead := self._ahead) is not None:
                    ahead.close()
            try:
                for end in (self._drop_ahead, self._source.close):
                    try:
                        end()
                    except RuntimeError as error:  # see `Iteration`: of a worker that died, and is not needed
                        if dead_worker_error(error) is None:
                            raise
                        end()
            finally:
                self._taking.release()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise SettingError(
            f"the loader of {self._path} cannot be copied or sent to another process; "
            f"build it in the process that uses it"
        )

    @property
    def _kind(self) -> str:
        return self._parts[0].kind if len(self._parts) == 1 else "mixture"

    def __repr__(self) -> str:
        spec = self.spec
        rank = f", rank {spec.rank} of {spec.world_size}" if spec.world_size > 1 else ""
        return (
            f"<loaders.Loader {self._kind} {self._path}: {spec.split}, {self.samples:,} samples, "
            f"batches of {spec.batch_size:,}, {len(self):,} per epoch{rank}>"
        )

    def begin(self, iteration: Iteration) -> Place:
        """Epoch and first batch of an iteration that begins."""
        epoch, served, _ = self._next
        self._place, self._next = (epoch, served), _Start(epoch + 1)
        self._iterations = [*self._midway(), weakref.ref(iteration)]
        return self._place

    def take(self, place: Place) -> Batch:
        """The batch of that epoch and number, ready for the current stream."""
        self._check_usable()  # before the lock, which a thread may have held when this process was forked
        with self._taking:
            batch = receive(self._peek(place), self._source.lane.device)
            self._peeked = None
            if self._size is None:
                self._size = as_size(*batch.images.shape[-2:])
            # counted before it is handed out: a state taken in the loop body has it as served
            self._place = (place[0], place[1] + 1)
            return batch

    def _peek(self, place: Place) -> Batch:
        """The batch of that place, which is the next one still."""
        self._check_usable()  # another thread may have closed it
        try:
            peeked = self._peeked
            if peeked is None or peeked[0] != place:
                batch = next(self._ahead_at(place))
                epoch, number = place
                self._ahead_place = (epoch, number + 1) if number + 1 < len(self) else (epoch + 1, 0)
                peeked = self._peeked = place, batch
            self._check_refused(peeked[1])
        except (StopIteration, Ending) as ended:  # it has no end but that another thread closes it
            self._drop_ahead()
            self._check_usable()
            if isinstance(ended, Ending):  # the program's
                raise
            raise WorkerError(f"{self._path}: reading ended before the epoch did") from None
        except BaseException:
            self._drop_ahead()
            raise
        return peeked[1]

    def _ahead_at(self, place: Place) -> Prefetch[Batch]:
        """What reads ahead, of which the next batch is that of `place`."""
        ahead = self._ahead
        if ahead is not None and self._ahead_place == place:
            return ahead
        if ahead is not None and place[1] > 0:
            self._turns += 1
            if self._turns == _TURNS:
                _LOGGER.warning(
                    "%s: two iterations of one loader take turns, which restarts reading at each turn; "
                    "build one loader for each",
                    printable(self._path),
                )
        self._drop_ahead()
        self._ahead_place = place
        self._ahead = ahead = Prefetch(_read(self._source, self._order, place), _AHEAD_BATCHES)
        return ahead

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._peeked = None
            self._ahead.close()
            self._ahead = None  # not before: closing may be broken off

    def _check_refused(self, batch: Batch) -> None:
        """Log what a batch lacks, each file once; raise it unless "skip" is set and others are left."""
        for error in batch.refused.values():
            if self.spec.reading.on_error != "skip":
                raise self._with_remedy(
                    error, 'to train without it, build with reading=loaders.Reading(on_error="skip")'
                )
            if not len(batch.ids):
                raise self._with_remedy(
                    error, "no other picture of its batch is left; what is listed is left out from the start"
                )
            if error.path not in self._left_out:
                self._left_out.add(error.path)
                _LOGGER.warning("%s; left out of its batch", error)

    def _with_remedy(self, error: ImageError, what: str) -> ImageError:
        """`error`; of a picture of a raw tree with `what` to do about it."""
        for part in self._parts:
            if part.kind == RAW and error.path.startswith(f"{part.path}/"):
                return ImageError(error.path, reason_with_remedy(error, part.path, part.class_depth, what))
        return error

    def _midway(self) -> list["weakref.ref[Iteration]"]:
        """The iterations that have begun and neither ended nor been thrown away."""
        begun = [(known, known()) for known in self._iterations]
        return [known for known, iteration in begun if iteration is not None and not iteration.ended]

    def _check_usable(self) -> None:
        """SettingError where it is closed, or in a forked process: the threads did not come along."""
        if self._closed:
            raise SettingError(f"the loader of {self._path} is closed; build another one")
        if os.getpid() != self._process:
            raise SettingError(
                f"the loader of {self._path} was built in process {self._process}, this is process "
                f"{os.getpid()}; build it in the process that uses it"
            )

    def _identity(self) -> dict[str, Any]:
        digests = [part.digest for part in self._parts]
        together = hashlib.sha256(" ".join(digests).encode()).hexdigest()
        return {
            "dataset": digests[0] if len(digests) == 1 else together,
            "split": self.spec.split,
            "seed": self.spec.seed,
            "global_batch_size": self.spec.batch_size * self.spec.world_size,
            "last": self.spec.last,
            **self._order.identity(),
        }


def _read(source: Source, order: Order, place: Place) -> Iterator[Batch]:
    """Batch after batch from `place` on, without end; knows no loader, so that it goes with a dropped one."""

    def ask() -> Iterator[Request]:
        epoch, start = place
        while len(order):
            yield from order.batches(epoch, start)
            epoch, start = epoch + 1, 0

    with source.lane.active():
        yield from source.read(ask())

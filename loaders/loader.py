"""The one loader of all backends: epochs, order, state, and reading ahead."""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from operator import index
from typing import Any, NamedTuple, NoReturn, SupportsIndex

from torch.utils.data import IterableDataset, get_worker_info

from loaders.batch import Batch, Request, Step
from loaders.dataset import RAW, SplitData, picture_remedy, served_size
from loaders.frameworks import (
    RankBatchSampler,
    RankSampler,
    SequentialRankSampler,
    SplitDataset,
    return_unchanged,
)
from loaders.order import RankBatches
from loaders.settings import LoaderSpec
from loaders.threads import Ending, Prefetch, dead_worker_error
from loaders.transfer import Pipeline, receive
from precache.errors import ImageError, SettingError, WorkerError, check_range, printable
from precache.pictures.images import Size, as_size

_AHEAD_BATCHES = 3
_MAX_EPOCH = 2**32  # far below where the hashes and generators that draw an epoch overflow
_WARN_TURNS = 8  # turns that two iterations of one loader take before a warning says what they cost
_TAKING_S = 0.05  # how long closing waits for another thread's batch before it ends the reading
_LOGGER = logging.getLogger(__name__)


class _Start(NamedTuple):
    """Start of the next iteration.

    Attributes:
        epoch: epoch that it serves.
        served: number of batches of the epoch that have been served.
        set_by: "state" or "set_epoch", which set it; empty if it follows from the last iteration.
    """

    epoch: int
    served: int = 0
    set_by: str = ""


class Iteration(Iterator[Batch]):
    """Iteration over a loader, which begins when its first batch is taken and is over after an error.

    Attributes:
        epoch: epoch that it serves; -1 before it has begun.
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
                if (step := self.next_step()) is None:
                    raise StopIteration
                return self._loader._take(step)
        except BaseException as error:
            self.ended = True
            # torch's handler of SIGCHLD, which any DataLoader sets up, raises wherever this thread is
            if isinstance(error, RuntimeError) and (death := dead_worker_error(error)) is not None:
                raise death from error
            raise

    def next_step(self) -> Step | None:
        """Return epoch and number of the next batch, and count it as served; None after the last one."""
        loader = self._loader
        if not self.ended and self._number < 0:
            self.epoch, self._number = loader._begin(self)
        if not self.ended and self._number == len(loader):
            self.ended = True
            loader._served = loader._next.epoch, 0
        if self.ended:
            return None
        self._number += 1
        return self.epoch, self._number - 1


class Loader(IterableDataset[Batch]):
    """Iterable of `Batch` over a split, made by `loaders.build`; one iteration serves one epoch.

    An epoch serves each sample of the split once over all ranks; `last` of `loaders.Sampling` says what
    happens to those that fill no batch. What comes next, by what has happened to a loader of 3 batches an
    epoch; `1 0` is epoch 1 and 0 batches served of it:

        STATE                  HISTORY                    state_dict  GOES ON  NEW ITERATION  set_size
        fresh                  -                          0 0         -        0 0            yes
        iterator unused        iter                       0 0         0 0      0 0            yes
        iterating              take 1                     0 1         0 1      1 0            refused
        all batches served     take 3                     0 3         end      1 0            refused
        between epochs         take 4                     1 0         end      1 0            yes
        left midway            take 1, drop               0 1         -        1 0            yes
        two take turns         take 1, other 2            1 2         0 1      2 0            refused
        epoch set              set_epoch 5                5 0         -        5 0            yes
        set while iterating    take 1, set_epoch 5        5 0         0 1      5 0            refused
        the running one set    take 1, set_epoch 0        0 1         0 1      0 0            refused
        the one left set       take 1, drop, set_epoch 0  0 0         -        0 0            yes
        state loaded           load 2 1                   2 1         -        2 1            yes
        its epoch set          load 2 1, set_epoch 2      2 1         -        2 1            yes
        another epoch set      load 2 1, set_epoch 4      4 0         -        4 0            yes
        loaded in iteration    take 1, load 2 1           2 1         0 1      2 1            refused
        resized                take 3, drop, set_size 16  0 3         -        1 0            yes
        closed                 take 1, close              0 1         refused  refused        refused
        in a forked process    take 1, fork               0 1         refused  refused        refused

    So an epoch that was left midway is not gone on with, as torch's DataLoader shuffles anew, and an iterator
    that is created and never used, as by Lightning, skips no epoch. Two iterations may take turns, in
    different threads, too. One loader for each is faster: a loader reads one stream of batches, which
    restarts whenever a batch is not the next one.

    The backend reads in a thread, a few batches ahead, past the end of an epoch into the next one. Batches
    read ahead for an iteration that was left midway are kept until a batch that is not the next one is
    needed.

    It is an IterableDataset, so that torch's DataLoader and torchdata's StatefulDataLoader take it as the
    dataset (`batch_size=None`, no workers of theirs). It also has the attributes of a DataLoader that
    frameworks read, see `loaders.frameworks`.

    Attributes:
        spec: the loader's settings.
        classes: class names; empty if samples have numbers as labels, or none.
        class_to_idx: class name -> label, or column of the labels.
        samples: number of samples in an epoch, over all ranks.
        batch_size: samples in a batch of one rank.
        drop_last: whether samples that fill no batch are left out.
        num_workers: 0, for a DataLoader that a framework makes of this loader's parts; `workers` of
            `loaders.Reading` is another number.
    """

    # tells Accelerate that there is nothing to prepare: the loader divides each epoch among ranks by itself
    _is_accelerate_prepared = True
    # settings for a DataLoader that a framework makes of this loader's parts
    num_workers, prefetch_factor, collate_fn = 0, None, staticmethod(return_unchanged)

    def __init__(
        self,
        spec: LoaderSpec,
        data: SplitData,
        batches: RankBatches,
        pipeline: Pipeline,
        open_pipeline: Callable[[LoaderSpec], Pipeline],
    ) -> None:
        """Make a loader; `loaders.build` does so.

        Args:
            data: split to serve.
            pipeline: serves the batches; the loader closes it.
            open_pipeline: opens another pipeline, for other settings.
        """
        self.spec = spec
        self._path = str(data.path)
        self.classes = data.classes
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        self.samples = batches.order.samples
        self.batch_size = spec.batch_size
        self.drop_last = spec.sampling.last == "drop"
        self._size = pipeline.size
        self._data = data
        self._pipeline, self._open_pipeline = pipeline, open_pipeline
        self._left_out: set[str] = set()  # files that a warning named
        self._batches = batches
        self._served = (0, 0)  # epoch, and batches served in it, of the iteration served last
        self._next = _Start(0)
        self._iterations: list[weakref.ref[Iteration]] = []  # those that have begun; the latest is last
        self._resized = False
        self._prefetch: Prefetch[Batch] | None = None
        self._prefetch_step: Step | None = None  # of the next batch that it yields; None: it has to restart
        self._peeked: tuple[Step, Batch] | None = None  # the batch before that, until it is served
        self._turns = 0
        self._closed = False
        self._taking = threading.RLock()  # reentrant: a signal handler may close the loader
        self._process = os.getpid()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iteration:
        self._check_usable()
        return Iteration(self)

    @property
    def size(self) -> Size:
        """Size of the served pictures; if only an `augment` function decides it, that of the first batch."""
        if self._size is None and len(self):
            self._check_usable()
            step = self._next.epoch, self._next.served % len(self)
            with self._taking:
                self._size = as_size(*self._peek(step).views[0].shape[-2:])
        return served_size(self._data, self.spec.size) if self._size is None else self._size

    @property
    def dataset(self) -> SplitDataset:
        """Dataset of the split's samples: their number, `targets` and `ids`, see `SplitDataset`."""
        return SplitDataset(self._data, self._take)

    @property
    def sampler(self) -> RankSampler:
        """Sampler of this rank's positions; its `set_epoch` sets the loader's epoch."""
        return self.batch_sampler.sampler

    @property
    def batch_sampler(self) -> RankBatchSampler:
        """Batch sampler of one iteration; Lightning calls its `sampler.set_epoch` before each epoch."""
        kind = RankSampler if self.spec.shuffle else SequentialRankSampler
        sampler = kind(self._batches, self._next.epoch, self.set_epoch)
        return RankBatchSampler(sampler, self._batches, self.batch_size, self.drop_last, self._iterate_steps)

    def _iterate_steps(self) -> Iterator[Step]:
        """Begin an iteration, and yield epoch and number of each of its batches, which counts as served."""
        iteration = self.__iter__()
        while (step := iteration.next_step()) is not None:
            yield step

    def set_epoch(self, epoch: int) -> None:
        """Serve epoch `epoch` next, from its start unless a loaded state is in the middle of that epoch."""
        epoch = check_range("epoch", epoch, 0, _MAX_EPOCH)
        if self._next.set_by != "state" or self._next.epoch != epoch:
            self._next = _Start(epoch, set_by="set_epoch")

    def set_size(self, size: Size) -> None:
        """Serve pictures of another size from the next iteration on (progressive resizing).

        The state carries the size. Caches of `loaders.Reading` are filled anew, and worker processes restart.

        Args:
            size: see `loaders.build`.

        Raises:
            SettingError: an iteration is under way, or this size cannot be served; then nothing changes.
        """
        self._check_usable()
        if self._running_iterations():
            raise SettingError(
                f"set_size({size!r}) in the middle of an epoch, after {self._served[1]:,} of {len(self):,} "
                f"batches",
                remedy="call it between epochs: end the iteration, or drop its iterator",
            )
        spec = replace(self.spec, size=size)
        if spec.size != self.spec.size:
            self._drop_prefetch()
            self._pipeline.close()
            self._closed = True  # in case that opening fails
            try:
                self._pipeline = self._open_pipeline(spec)
            except SettingError:
                self._pipeline = self._open_pipeline(self.spec)
                self._closed = False
                raise
            self._closed = False
            self.spec, self._size = spec, self._pipeline.size
        self._resized = True

    def path_of(self, sample_id: SupportsIndex) -> str:
        """Return the path of a sample's picture, relative to the source tree of its dataset.

        Args:
            sample_id: id of the sample, one of `batch.ids`.

        Raises:
            SettingError: no such sample is in the split.
        """
        with suppress(TypeError):  # what is no integer is the id of no sample
            sample_id = index(sample_id)
        return self._data.path_of(sample_id)

    def state_dict(self) -> dict[str, Any]:
        """Return a state to go on from: epoch, batches served in it, and the identity of data and settings.

        It holds JSON values, the same on every rank. After the last batch of an epoch the state is at its
        end; once the iterator has ended, at the start of the next epoch, as with torchdata's
        StatefulDataLoader. If the iterator was left midway, the state is where it was left, so that an
        interrupted program can go on there; if two take turns, where the one served last is.
        """
        epoch, served = self._served
        latest = self._iterations[-1]() if self._iterations else None
        if self._next.set_by:
            is_running = latest is not None and not latest.ended and latest.epoch == epoch
            if self._next.set_by == "state" or not is_running or self._next.epoch != epoch:
                epoch, served, _ = self._next
            # else `set_epoch` named the running epoch for the iteration after this one
        size = {"size": self.spec.size} if self._resized else {}
        return {"epoch": epoch, "served_batches": served, **size, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, from the next iteration on, with the size that `set_size` had set.

        Raises:
            SettingError: it is no state, or one of other data or settings.
        """
        if not isinstance(state, Mapping):
            raise SettingError(f"a state is what state_dict() gave, got {state!r}")
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise SettingError(
                    f"this state was taken with {name} {state.get(name)!r}, the loader has {value!r}",
                    remedy="build it with the same data and settings",
                )
        try:
            epoch = check_range("epoch", state.get("epoch"), 0, _MAX_EPOCH)  # type: ignore[arg-type]  # None raises
            served = check_range("served_batches", state.get("served_batches"), 0, len(self))  # type: ignore[arg-type]
        except SettingError as error:
            raise SettingError(f"{error} in this state", remedy="take one with state_dict()") from None
        if "size" in state:
            size = state["size"]
            self.set_size(as_size(*size) if isinstance(size, list) and len(size) == 2 else size)
        self._next = _Start(epoch, served, "state")

    def close(self) -> None:
        """Free threads, processes and files; idempotent."""
        if not self._closed:
            self._closed = True
            if os.getpid() != self._process:
                return  # threads and files are those of the process that built the loader
            while not self._taking.acquire(timeout=_TAKING_S):  # another thread waits for a batch
                if (prefetch := self._prefetch) is not None:
                    prefetch.close()
            try:
                for free in (self._drop_prefetch, self._pipeline.close):
                    try:
                        free()
                    except RuntimeError as error:  # see `Iteration`; the dead worker is not needed any more
                        if dead_worker_error(error) is None:
                            raise
                        free()
            finally:
                self._taking.release()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise SettingError(
            f"the loader of {self._path} cannot be copied or sent to another process",
            remedy="build it in the process that uses it",
        )

    def __repr__(self) -> str:
        spec = self.spec
        rank = f", rank {spec.rank} of {spec.world_size}" if spec.world_size > 1 else ""
        return (
            f"<loaders.Loader {self._data.kind} {self._path}: {self._data.split}, {self.samples:,} samples, "
            f"batches of {spec.batch_size:,}, {len(self):,} per epoch{rank}>"
        )

    def _begin(self, iteration: Iteration) -> Step:
        """Register an iteration that begins, and return epoch and number of its first batch."""
        epoch, served, _ = self._next
        self._served, self._next = (epoch, served), _Start(epoch + 1)
        self._iterations = [*self._running_iterations(), weakref.ref(iteration)]
        return self._served

    def _take(self, step: Step) -> Batch:
        """Return the batch of that epoch and number, ready for the current stream, and count it as served."""
        self._check_usable()  # before the lock, which a thread may have held when this process was forked
        with self._taking:
            batch = receive(self._peek(step), self._pipeline.lane.device)
            self._peeked = None
            if self._size is None:
                self._size = as_size(*batch.views[0].shape[-2:])
            # before the batch is returned, so that a state taken in the loop body counts it as served
            self._served = (step[0], step[1] + 1)
            return batch

    def _peek(self, step: Step) -> Batch:
        """Return the batch of that epoch and number without counting it as served."""
        self._check_usable()  # another thread may have closed it
        try:
            peeked = self._peeked
            if peeked is None or peeked[0] != step:
                batch = next(self._prefetch_from(step))
                epoch, number = step
                self._prefetch_step = (epoch, number + 1) if number + 1 < len(self) else (epoch + 1, 0)
                peeked = self._peeked = step, batch
            self._check_refused(peeked[1])
        except BaseException as error:
            self._peeked = self._prefetch_step = None
            if (prefetch := self._prefetch) is not None:
                prefetch.leave()
            if isinstance(error, StopIteration | Ending):  # reading has no end, unless ...
                self._check_usable()  # another thread closes the loader,
            if isinstance(error, StopIteration):  # or the program ends, which Ending says
                raise WorkerError("reading ended before the epoch did", path=self._path) from None
            raise
        return peeked[1]

    def _prefetch_from(self, step: Step) -> Prefetch[Batch]:
        """Return the prefetch, restarted if its next batch is not that of `step`."""
        if self._prefetch is not None and self._prefetch.ended:  # by a Ctrl-C in `set_size`, or at its start
            self._drop_prefetch()
        prefetch = self._prefetch  # a signal handler may close the loader meanwhile
        if prefetch is not None and self._prefetch_step == step:
            return prefetch
        if prefetch is None:
            prefetch = self._prefetch = Prefetch(_AHEAD_BATCHES)
        elif step[1] > 0:
            self._turns += 1
            if self._turns == _WARN_TURNS:
                _LOGGER.warning(
                    "%s: two iterations of one loader take turns, which restarts reading at each turn; "
                    "build one loader for each",
                    printable(self._path),
                )
        self._peeked = self._prefetch_step = None  # in case that an exception breaks restarting off
        prefetch.restart(_read_batches(self._pipeline, self._batches, step))
        self._prefetch_step = step
        return prefetch

    def _drop_prefetch(self) -> None:
        if (prefetch := self._prefetch) is not None:
            self._peeked = self._prefetch_step = None
            prefetch.close()
            self._prefetch = None  # not earlier: an exception may break closing off

    def _check_refused(self, batch: Batch) -> None:
        """Log or raise the errors of pictures that the batch lacks.

        With `on_error="skip"` each file is logged once, unless no picture of the batch is left.
        """
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

    def _with_remedy(self, error: ImageError, advice: str) -> ImageError:
        """Return `error`; for a picture of a raw tree with `advice` as a remedy."""
        for dataset in self._data.datasets:
            if self._data.kind == RAW and error.path.startswith(f"{dataset.path}/"):
                remedy = picture_remedy(error, dataset.path, dataset.class_depth, advice)
                return ImageError(error.path, error.reason, remedy=remedy)
        return error

    def _running_iterations(self) -> list["weakref.ref[Iteration]"]:
        """Return references to the iterations that have begun and neither ended nor been collected."""
        running = []
        for reference in self._iterations:
            iteration = reference()
            if iteration is not None and not iteration.ended:
                running.append(reference)
        return running

    def _check_usable(self) -> None:
        """Raise SettingError if the loader is closed, or in a forked process, which lacks its threads."""
        if self._closed:
            raise SettingError(f"the loader of {self._path} is closed", remedy="build another one")
        if os.getpid() != self._process:
            is_worker = get_worker_info() is not None
            raise SettingError(
                f"the loader of {self._path} was built in process {self._process}, this is process "
                f"{os.getpid()}",
                remedy="give the DataLoader num_workers=0, since the loader has workers of its own"
                if is_worker
                else "build it in the process that uses it",
            )

    def _identity(self) -> dict[str, Any]:
        """Return JSON values that differ for other data, or settings that change the batches."""
        return {
            "dataset": self._data.digest,
            "split": self._data.split,
            "seed": self.spec.seed,
            "global_batch_size": self.spec.batch_size * self.spec.world_size,
            "last": self.spec.sampling.last,
            **self._batches.identity(),
        }


def _read_batches(pipeline: Pipeline, batches: RankBatches, step: Step) -> Iterator[Batch]:
    """Yield batch after batch from `step` on, without end.

    It has no reference to the loader, so that a loader that nobody uses any more is collected with it.
    """

    def requests() -> Iterator[Request]:
        epoch, start = step
        while len(batches):
            yield from batches.requests(epoch, start)
            epoch, start = epoch + 1, 0

    with pipeline.lane.active():
        yield from pipeline.read(requests())

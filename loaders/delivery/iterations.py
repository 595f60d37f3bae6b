"""One iteration of a loader: which batches, and an error ends it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from loaders.batch import Batch
from loaders.delivery.prefetch import of_dead_worker
from loaders.frameworks import Place


@dataclass(frozen=True, slots=True)
class Asked:
    """Where the next iteration starts, by a call: `loaded` as a state, else by `set_epoch`."""

    epoch: int
    served: int
    loaded: bool


class Iterated(Protocol):
    """What is needed of a loader."""

    def __len__(self) -> int: ...

    def begin(self, places: "Places") -> Place:
        """Epoch and first batch of an iteration that begins."""

    def end(self) -> None:
        """An iteration has served its last batch."""

    def take_next(self, places: "Places") -> Batch:
        """The batch of the next of the places; one thread at a time."""


class Places(Iterator[Place]):
    """Epoch and number of each batch of an iteration of `loader`, which begins with the first."""

    def __init__(self, loader: Iterated) -> None:
        self.epoch, self._number = -1, -1  # not begun
        self.ended = False
        self._loader = loader

    def __next__(self) -> Place:
        if self.ended:
            raise StopIteration
        if self._number < 0:
            self.epoch, self._number = self._loader.begin(self)
        if self._number == len(self._loader):
            self.ended = True
            self._loader.end()
            raise StopIteration
        self._number += 1
        return self.epoch, self._number - 1


class Batches(Iterator[Batch]):
    """The batches of an iteration of `loader`; over after an error.

    Not a generator: when one is thrown away midway, Python code of it is run, in which the KeyboardInterrupt
    of Ctrl-C would reach nobody.
    """

    def __init__(self, loader: Iterated) -> None:
        self._loader = loader
        self._places = Places(loader)

    def __next__(self) -> Batch:
        try:
            return self._loader.take_next(self._places)
        except BaseException as error:
            self._places.ended = True
            # torch's handler of SIGCHLD, which any DataLoader sets up, raises wherever this thread is
            if isinstance(error, RuntimeError) and (death := of_dead_worker(error)) is not None:
                raise death from error
            raise

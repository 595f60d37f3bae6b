"""Memory for batches that is used again once nobody holds it."""

import math
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from precache.pictures.sizes import Size, sides

_KEPT = 8  # free buffers: more than are ever on their way at a time


class _Loan(weakref.ref["_Borrower"]):
    """What is given back when a borrower goes.

    Attributes:
        memory: that it showed.
        number: of the buffer.
    """

    __slots__ = ("memory", "number")

    memory: npt.NDArray[np.uint8]
    number: int


class _Borrower:
    """Shows memory to torch, which keeps this until no tensor needs it, and then gives the memory back.

    `give_back`, called with the loan, is to be written in C, as is all that leads to it. A Python function,
    such as that of `weakref.finalize`, would take the KeyboardInterrupt of Ctrl-C, and lose it: what is
    raised while an object goes reaches nobody.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_loan")

    def __init__(
        self, memory: npt.NDArray[np.uint8], give_back: Callable[[Any], object], number: int = 0
    ) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._loan = _Loan(self, give_back)
        self._loan.memory = memory
        self._loan.number = number


class BufferPool:
    """Batch buffers, uint8 [samples, height, width, bytes].

    Fresh memory costs as much as filling it: the system clears each page first. A buffer comes back by
    itself when the last tensor or array that shows a part of it is gone, so that what is served stays
    the caller's as long as he keeps it.
    """

    def __init__(self, samples: int, size: Size, device: torch.device, pixel_bytes: int = 3) -> None:
        self._shape = (samples, *sides(size), pixel_bytes)
        # torch's own allocator of pinned memory keeps a buffer until the copies out of it are done:
        # https://pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers
        self._pinned = device.type == "cuda"
        self._free: deque[_Loan] = deque(maxlen=_KEPT)

    def take(self, samples: int) -> torch.Tensor:
        """uint8 [samples, height, width, bytes] of any content; at most as many as the pool has."""
        if self._pinned:
            return torch.empty((samples, *self._shape[1:]), dtype=torch.uint8, pin_memory=True)
        try:
            memory = self._free.pop().memory
        except IndexError:
            memory = np.empty(self._shape, np.uint8)
        return _lend(_Borrower(memory, self._free.append), samples)


class SharedBuffers:
    """Batch buffers that worker processes fill, forked after this is made.

    Otherwise each batch costs them fresh memory, and this process its pages. Anonymous, since /dev/shm is
    small in containers. Memory is taken when a buffer is first used; there are no buffers where the machine
    would not have it.
    """

    def __init__(self, buffers: int, samples: int, size: Size) -> None:
        try:
            memory = mmap.mmap(-1, buffers * samples * math.prod(sides(size)) * 3)
        except (OSError, OverflowError):  # batches that this machine cannot hold: perhaps none is full
            buffers = samples = 0
            memory = mmap.mmap(-1, 1)
        shape = (buffers, samples, *sides(size), 3)
        self.memory = np.frombuffer(memory, np.uint8, math.prod(shape)).reshape(shape)
        self._free = deque(range(buffers))
        self._returned: deque[_Loan] = deque()
        self._filling: set[int] = set()

    def take(self) -> int | None:
        """The number of a free buffer, to be filled; None: all are in use."""
        while self._returned:
            self._free.append(self._returned.pop().number)
        if not self._free:
            return None
        number = self._free.pop()
        self._filling.add(number)
        return number

    def serve(self, number: int, samples: int) -> torch.Tensor:
        """The first `samples` of a filled buffer, which comes back when the last tensor of it is gone."""
        self._filling.discard(number)
        return _lend(_Borrower(self.memory[number], self._returned.append, number), samples)

    def reclaim(self) -> None:
        """Take back what was to be filled; nobody may be filling it."""
        self._free.extend(self._filling)
        self._filling.clear()


def _lend(borrower: _Borrower, samples: int) -> torch.Tensor:
    return torch.from_numpy(np.asarray(borrower))[:samples]

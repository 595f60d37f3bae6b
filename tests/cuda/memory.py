"""What the two caching allocators of torch lend, and when they lend it again.

Device memory belongs to the stream that was current when it was asked for. Given back, it is free at once
for what that stream does next; other streams count if `record_stream` has named them. Pinned memory is free
when the copies out of it are done. https://pytorch.org/docs/stable/notes/cuda.html#cuda-memory-management
"""

import weakref
from typing import Any

import numpy as np
import torch

from tests.cuda.streams import Stream, current_device, current_stream, world

POISON = 0xAB
_SMALLEST = 512
Uses = list[tuple[Stream, int]]
_free: dict[object, list[tuple[np.ndarray, Uses]]] = {}
_pinned: dict[int, Uses] = {}  # address -> copies out of it


def forget() -> None:
    """All that was lent."""
    _free.clear()
    _pinned.clear()


def _find(key: object) -> np.ndarray | None:
    ready = _free.setdefault(key, [])
    for number, (memory, uses) in enumerate(ready):
        if all(stream.done >= position for stream, position in uses):
            del ready[number]
            return memory
    return None


class Block:
    """Memory of a device; it goes back with the last tensor that shows it.

    Attributes:
        owner: the stream that was current.
        others: streams that use it, too.
    """

    def __init__(self, device: int, size: int) -> None:
        self.owner = current_stream(device)
        self.others: set[Stream] = set()
        size = max(_SMALLEST, size)
        key = (device, self.owner, size)
        with world().lock:
            found = _find(key)
            memory = np.full(size, POISON, np.uint8) if found is None else found
            if found is not None:
                self.owner.put(lambda: memory.fill(POISON))
            self.memory = memory
            weakref.finalize(self, _give_back, world().lock, _free[key], memory, self.others).atexit = False


def _give_back(
    lock: Any, ready: list[tuple[np.ndarray, Uses]], memory: np.ndarray, others: set[Stream]
) -> None:
    with lock:
        ready.append((memory, [(stream, len(stream.queue)) for stream in others]))


class _Lender:
    """Shows pinned memory to NumPy, which keeps this as long as it shows it."""

    def __init__(self, memory: np.ndarray) -> None:
        self.__array_interface__ = memory.__array_interface__


def pinned(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of any content in pinned memory."""
    world().used.add(current_device())  # its context is made there
    count = int(np.prod(size))
    needed = max(_SMALLEST, count * dtype.itemsize)
    with world().lock:
        memory = _find(("pinned", needed))
        if memory is None:
            memory = np.full(needed, POISON, np.uint8)
        lender = _Lender(memory)
        uses: Uses = []
        address = memory.ctypes.data
        _pinned[address] = uses
        weakref.finalize(lender, _unpin, world().lock, address, memory, uses).atexit = False
    flat = torch.from_numpy(np.asarray(lender))
    return flat[: count * dtype.itemsize].view(dtype).reshape(size)


def _unpin(lock: Any, address: int, memory: np.ndarray, uses: Uses) -> None:
    with lock:
        _pinned.pop(address, None)
        _free.setdefault(("pinned", len(memory)), []).append((memory, uses))


def uses_of(tensor: torch.Tensor) -> Uses | None:
    """The copies out of a tensor's pinned memory; None: it is pageable."""
    return _pinned.get(tensor.untyped_storage().data_ptr())


def shaped(memory: np.ndarray, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """The beginning of `memory` as a tensor of the CPU."""
    whole = torch.from_numpy(memory)
    return whole[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(size, stride)

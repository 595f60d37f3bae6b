"""Simulated allocators of device memory and of pinned memory, which reuse memory as torch's do.

Device memory belongs to the stream that was current when it was allocated. Once freed, it is reused at once
for later work of that stream; work of other streams counts only if `record_stream` has named them. Pinned
memory is reused when the copies out of it are done.
https://pytorch.org/docs/stable/notes/cuda.html#cuda-memory-management
"""

import weakref
from typing import Any

import numpy as np
import torch

from tests.cuda.streams import Stream, current_device, current_stream, world

POISON = 0xAB
_SMALLEST = 512
Uses = list[tuple[Stream, int]]
"""Streams that use a memory, each with the position in its queue up to which it does."""
_free: dict[object, list[tuple[np.ndarray, Uses]]] = {}
_pinned: dict[int, Uses] = {}  # address -> copies out of it


def reset() -> None:
    """Forget all memory that was allocated."""
    _free.clear()
    _pinned.clear()


def _reuse(key: object) -> np.ndarray | None:
    """Take freed memory of this kind and size that no stream uses any more; None if there is none."""
    freed = _free.setdefault(key, [])
    for number, (memory, uses) in enumerate(freed):
        if all(stream.done >= position for stream, position in uses):
            del freed[number]
            return memory
    return None


class Block:
    """Memory of a device, which is freed with the last tensor that shows it.

    Attributes:
        owner: the stream that was current when it was allocated.
        others: other streams that use it, by `record_stream`.
    """

    def __init__(self, device: int, size: int) -> None:
        self.owner = current_stream(device)
        self.others: set[Stream] = set()
        size = max(_SMALLEST, size)
        key = (device, self.owner, size)
        with world().lock:
            reused = _reuse(key)
            if reused is None:
                memory = np.full(size, POISON, np.uint8)
            else:
                memory = reused
                self.owner.put(lambda: memory.fill(POISON))
            self.memory = memory
            weakref.finalize(self, _free_block, world().lock, _free[key], memory, self.others).atexit = False


def _free_block(
    lock: Any, freed: list[tuple[np.ndarray, Uses]], memory: np.ndarray, others: set[Stream]
) -> None:
    with lock:
        freed.append((memory, [(stream, len(stream.queue)) for stream in others]))


class _PinnedMemory:
    """Pinned memory for NumPy, whose arrays keep this object alive as long as they show it."""

    def __init__(self, memory: np.ndarray) -> None:
        self.__array_interface__ = memory.__array_interface__


def allocate_pinned(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor of any content in pinned memory."""
    world().used.add(current_device())  # allocating makes a context on the current device
    count = int(np.prod(size))
    needed = max(_SMALLEST, count * dtype.itemsize)
    with world().lock:
        memory = _reuse(("pinned", needed))
        if memory is None:
            memory = np.full(needed, POISON, np.uint8)
        owner = _PinnedMemory(memory)
        uses: Uses = []
        address = memory.ctypes.data
        _pinned[address] = uses
        weakref.finalize(owner, _unpin, world().lock, address, memory, uses).atexit = False
    flat = torch.from_numpy(np.asarray(owner))
    return flat[: count * dtype.itemsize].view(dtype).reshape(size)


def _unpin(lock: Any, address: int, memory: np.ndarray, uses: Uses) -> None:
    with lock:
        _pinned.pop(address, None)
        _free.setdefault(("pinned", len(memory)), []).append((memory, uses))


def uses_of(tensor: torch.Tensor) -> Uses | None:
    """Copies out of a tensor's pinned memory; None if its memory is pageable."""
    return _pinned.get(tensor.untyped_storage().data_ptr())


def tensor_in(memory: np.ndarray, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """Show the beginning of `memory` as a tensor of the CPU."""
    whole = torch.from_numpy(memory)
    return whole[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(size, stride)

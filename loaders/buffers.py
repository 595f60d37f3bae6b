"""Memory for batches that is used again once nobody holds it."""

import weakref
from collections import deque

import numpy as np
import torch

_KEPT = 8  # free buffers: more than are ever on their way at a time


class BufferPool:
    """Batch buffers, uint8 [samples, size, size, 3].

    Fresh memory costs as much as filling it: the system clears each page first. A buffer comes back by
    itself when the last tensor or array that shows a part of it is gone, so that what is served stays
    the caller's as long as he keeps it.
    """

    def __init__(self, samples: int, size: int, device: torch.device) -> None:
        self._shape = (samples, size, size, 3)
        # torch's own allocator of pinned memory keeps a buffer until the copies out of it are done:
        # https://pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers
        self._pinned = device.type == "cuda"
        self._free: deque[np.ndarray] = deque(maxlen=_KEPT)

    def take(self, samples: int) -> torch.Tensor:
        """uint8 [samples, size, size, 3] of any content; at most as many as the pool is made for."""
        if self._pinned:
            return torch.empty((samples, *self._shape[1:]), dtype=torch.uint8, pin_memory=True)
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(self._shape, np.uint8)
        lease = memory.view()  # torch holds this very object until no tensor needs its memory
        weakref.finalize(lease, self._free.append, memory).atexit = False
        return torch.from_numpy(lease)[:samples]

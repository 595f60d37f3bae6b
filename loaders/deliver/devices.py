"""The device that a loader serves on, and the stream that its work there is queued on.

On CUDA a loader has one stream of its own, a lane. All that its reading thread does on the device is queued
there, ahead of the training: copies, gathers, augmentation, normalising. What was made on another stream is
waited for there, by an event, and what is served is waited for by the training's stream; no thread waits:
https://pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from precache.errors import SettingError

_LENT = 2  # batches of another library that are being read at a time


def find_device(name: str | torch.device) -> torch.device:
    """The device called `name`: `cpu`, `cuda` (the current one), `cuda:N`, or `auto`, a GPU if there is one.

    Returns:
        On CUDA with its index, which stays the same whatever device is made the current one later.

    Raises:
        SettingError: an unknown name, or a device that torch does not find.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(name)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise SettingError(f"unknown device {str(name)!r}; choose from: auto, cpu, cuda, cuda:0, ...")
    if found.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SettingError(f"device {str(name)!r} asked for, but torch finds no GPU; use 'cpu'")
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= (count := torch.cuda.device_count()):
        there = ", ".join(f"cuda:{number}" for number in range(count))
        raise SettingError(
            f"device {str(name)!r} asked for, but torch finds {there}; use one of them or 'cpu'"
        )
    return torch.device("cuda", index)


class Lane:
    """Where a loader's work on `device` is queued; on the CPU it is done at once, and this does nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def active(self) -> AbstractContextManager[object]:
        """Make it the current stream, and `device` the current device, of this thread."""
        return torch.cuda.stream(self.stream)

    def mark(self) -> torch.cuda.Event | None:
        """An event behind all that is queued."""
        return None if self.stream is None else self.stream.record_event()

    def drain(self) -> None:
        """Wait until all that is queued is done."""
        if self.stream is not None:
            self.stream.synchronize()

    def drain_device(self) -> None:
        """Wait for all streams of the device."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)

    def take(self, tensor: torch.Tensor, ready: torch.cuda.Event | None) -> torch.Tensor:
        """`tensor`, for work here: behind `ready`, recorded where it was made."""
        if self.stream is not None and ready is not None:
            self.stream.wait_event(ready)
            tensor.record_stream(self.stream)  # its memory is reused only after what is queued here
        return tensor


class Borrowed:
    """Takes tensors of a library's own memory, and gives them back when they have been read."""

    def __init__(self) -> None:
        self._lent: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()  # and when it has been read

    def take(self, lent: Any) -> torch.Tensor:
        """What `lent` shows by DLPack, for work on the current stream; of the CPU shared, not copied."""
        shown: torch.Tensor = from_dlpack(lent)
        if not shown.is_cuda:
            return shown
        # on a GPU its owner knows nothing of the streams that still read what torch has dropped
        copied = shown.clone()
        self._lent.append((shown, torch.cuda.current_stream(shown.device).record_event()))
        self.give_back(_LENT)
        return copied

    def give_back(self, most: int = 0) -> None:
        """All but so many of them."""
        while len(self._lent) > most:
            self._lent[0][1].synchronize()
            self._lent.popleft()  # not before: then its owner has it


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, of the CPU, on `device`; on CUDA by the current stream, and no thread waits for it.

    Of pageable memory the driver makes a copy first, and waits; torch's pinned memory is not reused until
    the copies out of it are done: https://pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(device, non_blocking=True)
    return tensor.to(device)

"""Work of a loader on its device: which one, on which stream, and how tensors get there.

On CUDA a loader has one stream of its own, a lane. All that its reading thread does on the device is queued
there, ahead of the training: copies, gathers, augmentation, normalising. The training's stream waits by an
event for the batch that is served; no thread waits:
https://pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from precache.errors import SettingError

_MAX_BORROWED = 2  # batches of another library's memory that are being read at a time


def find_device(name: str | torch.device) -> torch.device:
    """Return the device called `name`: `cpu`, `cuda` (the current GPU), `cuda:N`, or `auto`, a GPU if any.

    Returns:
        The device, on CUDA with its index, so that it stays the same when another one becomes the current.

    Raises:
        SettingError: the name is unknown, or torch does not find the device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise SettingError(f"unknown device {str(name)!r}; choose from: auto, cpu, cuda, cuda:0, ...")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SettingError(f"device {str(name)!r} asked for, but torch finds no GPU", remedy="use 'cpu'")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= (count := torch.cuda.device_count()):
        devices = ", ".join(f"cuda:{number}" for number in range(count))
        raise SettingError(
            f"device {str(name)!r} asked for, but torch finds {devices}", remedy="use one of them or 'cpu'"
        )
    return torch.device("cuda", index)


class Lane:
    """CUDA stream on which a loader queues its work; does nothing on the CPU, where work is done at once.

    Attributes:
        device: the loader's device.
        stream: its CUDA stream; None on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def active(self) -> AbstractContextManager[object]:
        """Make the stream and its device the current ones of this thread, for the duration of the block."""
        return torch.cuda.stream(self.stream)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event behind all that is queued; None on the CPU."""
        return None if self.stream is None else self.stream.record_event()


class BorrowedTensors:
    """Copies tensors out of another library's GPU memory, which goes back to it when they have been read."""

    def __init__(self) -> None:
        # tensors of the other library, each with the event behind the work that reads it
        self._borrowed: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def take(self, exported: Any) -> torch.Tensor:
        """Return `exported` (DLPack) as a tensor for the current stream: on a GPU a copy, else a view."""
        borrowed: torch.Tensor = from_dlpack(exported)
        if not borrowed.is_cuda:
            return borrowed
        # on a GPU its owner does not know the streams that still read what torch has dropped
        copy = borrowed.clone()
        self._borrowed.append((borrowed, torch.cuda.current_stream(borrowed.device).record_event()))
        self.give_back(_MAX_BORROWED)
        return copy

    def give_back(self, keep: int = 0) -> None:
        """Wait until all but the latest `keep` tensors have been read, and drop them."""
        while len(self._borrowed) > keep:
            read_event = self._borrowed[0][1]
            read_event.synchronize()
            self._borrowed.popleft()  # only now: its owner may reuse the memory from here on


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor`, which is on the CPU, on `device`; on CUDA the copy is queued and no thread waits.

    Pageable memory is pinned first, since the driver would copy it and wait. torch does not reuse its pinned
    memory until the copies out of it are done:
    https://pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(device, non_blocking=True)
    return tensor if tensor.device == device else tensor.to(device)

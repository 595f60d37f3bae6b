"""Replace torch's CUDA by the simulated one."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from tests.cuda import memory, streams
from tests.cuda.memory import uses_of
from tests.cuda.streams import SCHEDULES, SimulatedCuda, current_stream, index_of
from tests.cuda.tensors import DeviceTensor, allocate, to_device

_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randint", "zeros")
_real = {name: getattr(torch, name) for name in _FACTORIES}
_real_to = torch.Tensor.to


@contextmanager
def simulated(schedule: str, free_bytes: int = 2**34) -> Iterator[SimulatedCuda]:
    """Simulate a machine with two GPUs until the end of the block; tensors of it are of no use afterwards.

    Args:
        schedule: name of one of SCHEDULES, which says whose work is late.
        free_bytes: free memory of each GPU.
    """
    torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]
    world = SimulatedCuda(SCHEDULES[schedule])
    before = set(threading.enumerate())
    memory.reset()
    with streams.activate(world), ExitStack() as stack:
        for patch in _patches(free_bytes):
            stack.enter_context(patch)
        yield world
        gc.collect()
        for thread in set(threading.enumerate()) - before:  # of loaders that nobody has closed
            thread.join(10)


def _patches(free_bytes: int) -> list[Any]:
    of_cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: streams.DEVICES,
        "current_device": streams.current_device,
        "set_device": streams.set_device,
        "Stream": streams.Stream,
        "stream": streams.on_stream,
        "current_stream": current_stream,
        "synchronize": streams.synchronize,
        "mem_get_info": lambda device=None: (free_bytes, 2**34),
    }
    of_tensor: dict[str, Any] = {
        "to": _to,
        "pin_memory": lambda tensor, *_: _pin(tensor),
        "is_pinned": lambda tensor, *_: uses_of(tensor) is not None,
    }
    return [
        *(mock.patch.object(torch.cuda, name, value) for name, value in of_cuda.items()),
        *(mock.patch.object(torch.Tensor, name, value) for name, value in of_tensor.items()),
        *(mock.patch.object(torch, name, _factory(name)) for name in _FACTORIES),
    ]


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _factory(name: str) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.pop("pin_memory", False):
            tensor = _real[name](*args, **kwargs)
            return memory.allocate_pinned(tensor.shape, tensor.dtype) if name == "empty" else _pin(tensor)
        if not _is_cuda(kwargs.get("device")):
            return _real[name](*args, **kwargs)  # type: ignore[no-any-return]
        device = index_of(kwargs.pop("device"))
        content = _real[name](*args, **kwargs)
        tensor = allocate(content.size(), content.stride(), content.dtype, device)
        if name != "empty":
            current_stream(device).put(lambda: tensor.shown.copy_(content))
        return tensor

    return make


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    streams.world().pinned.append(tensor.nbytes)
    return memory.allocate_pinned(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    for argument in args:
        if isinstance(argument, (str, torch.device)):
            device = argument
        elif isinstance(argument, torch.dtype):
            dtype = argument
    if isinstance(tensor, DeviceTensor):
        if _is_cuda(device) and index_of(device) == tensor.device.index:
            device = None
        if device is None:
            same = dtype in (None, tensor.dtype)
            return tensor if same else torch.ops.aten._to_copy(tensor, dtype=dtype)  # type: ignore[no-any-return]
        return torch.ops.aten._to_copy(tensor, device=torch.device(device), dtype=dtype)  # type: ignore[no-any-return]
    if _is_cuda(device):
        return to_device(tensor, index_of(device), dtype, bool(kwargs.get("non_blocking")))
    return _real_to(tensor, *args, **kwargs)

"""Simulated tensors on a device; operations on them are queued on the current stream."""

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.cuda.memory import Block, tensor_in, uses_of
from tests.cuda.streams import current_stream, world

# Operations whose result the host needs, so that it waits.
_SYNCHRONISING = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
_real_to = torch.Tensor.to
_shape_cache: dict[Any, Any] = {}


class DeviceTensor(torch.Tensor):
    """A tensor on a simulated device.

    Attributes:
        shown: the same memory as a tensor of the CPU; its content is right once the work is done.
        block: the memory that it lies in.
    """

    shown: torch.Tensor
    block: Block

    @staticmethod
    def __new__(cls, shown: torch.Tensor, block: Block) -> "DeviceTensor":
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            shown.size(),
            strides=shown.stride(),
            storage_offset=shown.storage_offset(),
            dtype=shown.dtype,
            device=block.owner.device,
        )
        tensor.shown, tensor.block = shown, block
        return tensor

    def __init__(self, shown: torch.Tensor, block: Block) -> None:
        pass

    def record_stream(self, stream: Any) -> None:
        if stream is not self.block.owner:
            self.block.others.add(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _launch(func, args, dict(kwargs or {}))


def allocate(size: Any, stride: Any, dtype: torch.dtype, device: int) -> DeviceTensor:
    """Allocate a tensor on the device; its content is POISON."""
    elements = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    block = Block(device, elements * dtype.itemsize)
    return DeviceTensor(tensor_in(block.memory, size, stride, dtype), block)


def to_host(tensor: DeviceTensor) -> torch.Tensor:
    """Simulate `tensor.cpu()`, for which the thread waits."""
    world().record_wait("copy to the host")
    stream = current_stream(tensor.device)
    stream.run(len(stream.queue))
    return tensor.shown.clone()


def to_device(
    tensor: torch.Tensor, device: int, dtype: torch.dtype | None, non_blocking: bool
) -> DeviceTensor:
    """Copy a tensor of the CPU to the device; only a copy from pinned memory does not wait."""
    source = _real_to(tensor, dtype or tensor.dtype).contiguous(memory_format=torch.preserve_format)
    target = allocate(source.size(), source.stride(), source.dtype, device)
    stream = current_stream(device)
    uses = uses_of(source)
    if uses is not None and non_blocking:
        stream.put(lambda: target.shown.copy_(source))
        uses.append((stream, len(stream.queue)))
        return target
    staged = source.clone()
    stream.put(lambda: target.shown.copy_(staged))
    world().record_wait("copy from pageable memory" if uses is None else "copy that blocks")
    stream.run(len(stream.queue))
    return target


def _launch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Queue an operation of torch on the current stream, or do it at once if the host needs its result."""
    name = func._schema.name
    tensors: list[DeviceTensor] = []
    tree_map_only(DeviceTensor, tensors.append, (args, kwargs))
    device = _one_device(name, tensors)
    if name in _SYNCHRONISING:
        world().record_wait(name)
        return func(*tree_map_only(DeviceTensor, _when_done, args), **kwargs)
    if name in ("aten::index", "aten::index_put_"):
        for index in args[1]:
            no_mask = index is None or index.dtype not in (torch.bool, torch.uint8)
            assert no_mask, "masks are not simulated: the host waits to know how many they take"
            assert isinstance(index, DeviceTensor | None), "indices of the host are copied: not simulated"
    if name == "aten::_to_copy":
        wanted = torch.device(kwargs.get("device") or tensors[0].device)
        if wanted.type == "cpu":
            return func(to_host(tensors[0]), **kwargs)
        assert wanted.index in (None, device), "copies between devices are not simulated"
    on_device = name != "aten::copy_" or all(isinstance(tensor, DeviceTensor) for tensor in args[:2])
    assert on_device, "copy_ between host and device is not simulated"
    kwargs.pop("device", None)
    plain = tree_map_only(DeviceTensor, lambda tensor: tensor.shown, (args, kwargs))
    written = [argument.name for argument in func._schema.arguments if _is_written(argument.alias_info)]
    if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):  # a view
        views = func(*plain[0], **plain[1])
        return tree_map_only(torch.Tensor, lambda view: DeviceTensor(view, tensors[0].block), views)
    if written:
        current_stream(device).put(lambda: func(*plain[0], **plain[1]))
        return kwargs.get("out", args[0])
    return _compute(func, plain, device)


def _compute(func: Any, plain: Any, device: int) -> Any:
    """Queue an operation that makes new tensors; only their shapes are known before it is done."""
    shapes = _shapes(func, plain)
    results = tree_map_only(torch.Tensor, lambda t: allocate(t.size(), t.stride(), t.dtype, device), shapes)
    targets: list[torch.Tensor] = []
    tree_map_only(DeviceTensor, lambda tensor: targets.append(tensor.shown), results)

    def work() -> None:
        values: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, values.append, func(*plain[0], **plain[1]))
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)

    current_stream(device).put(work)
    return results


def _shapes(func: Any, plain: Any) -> Any:
    """Results of an operation on the device `meta`; computed once for all tensors of the same form."""
    leaves, structure = tree_flatten(plain)
    key = (func, structure, tuple(map(_form, leaves)))
    if key not in _shape_cache:
        args, kwargs = tree_map_only(torch.Tensor, _shape_of, plain)
        _shape_cache[key] = func(*args, **kwargs)
    return _shape_cache[key]


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.size(), leaf.stride(), leaf.dtype
    return type(leaf), leaf  # 1, 1.0 and True are equal


def _one_device(name: str, tensors: list[DeviceTensor]) -> int:
    devices = {tensor.device.index for tensor in tensors}
    if len(devices) != 1:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {sorted(devices)}")
    return int(devices.pop())


def _when_done(tensor: DeviceTensor) -> torch.Tensor:
    stream = current_stream(tensor.device)
    stream.run(len(stream.queue))
    return tensor.shown


def _is_written(alias: Any) -> bool:
    return alias is not None and bool(alias.is_write)


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

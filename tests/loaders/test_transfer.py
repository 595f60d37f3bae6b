"""Memory of batches: used again, but never while somebody still looks at it, on the host or the device."""

import gc
from pathlib import Path

import pytest
import torch

from loaders.read.filler import BufferPool
from tests.building import build_loader

CPU = torch.device("cpu")


def test_a_buffer_comes_back_when_the_last_view_of_it_is_gone() -> None:
    pool = BufferPool(8, 4, CPU)
    first = pool.take(8)
    address = first.data_ptr()
    view = first[2:].permute(0, 3, 1, 2)
    del first
    other = pool.take(8)
    assert other.data_ptr() != address, "the view still shows it"
    del view
    assert pool.take(8).data_ptr() == address


def test_what_autograd_or_numpy_holds_is_not_used_again() -> None:
    pool = BufferPool(2, 4, CPU)
    batch = pool.take(2)
    array, address = batch.numpy(), batch.data_ptr()
    del batch
    taken = [pool.take(2) for _ in range(4)]
    assert address not in {tensor.data_ptr() for tensor in taken}
    weight = torch.ones(2, 4, 4, 3, requires_grad=True)
    batch = pool.take(2).fill_(3)
    address = batch.data_ptr()
    result = (weight * batch).sum()  # keeps the batch for backward
    del batch
    again = [pool.take(2).fill_(9) for _ in range(4)]
    assert address not in {tensor.data_ptr() for tensor in again}
    result.backward()
    assert weight.grad is not None
    assert (weight.grad == 3).all()
    assert array.shape == (2, 4, 4, 3)


def test_the_pool_does_not_keep_more_than_a_few_free_buffers() -> None:
    pool = BufferPool(2, 4, CPU)
    many = [pool.take(2) for _ in range(50)]
    del many
    assert len(pool._free) <= 8


def test_batches_that_are_dropped_share_few_buffers(converted: dict[str, Path]) -> None:
    with build_loader(converted["shards"], batch_size=8, workers=2) as loader:
        addresses = {batch.images.data_ptr() for _ in range(5) for batch in loader}
    assert len(addresses) <= 6, "of 45 batches"


def test_a_buffer_outlives_its_loader(converted: dict[str, Path]) -> None:
    with build_loader(converted["shards"], batch_size=70, shuffle=False) as loader:
        kept = next(iter(loader)).images
    copy = kept.clone()
    del loader
    gc.collect()
    with build_loader(converted["shards"], batch_size=70, shuffle="full") as other:
        list(other)
    assert torch.equal(kept, copy)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["shards", "webdataset", "dali", "nvjpeg", "cache"])
def test_a_slow_stream_still_finds_its_batches(converted: dict[str, Path], backend: str) -> None:
    """Kernels that read a batch are queued behind a long one, and the batch is dropped at once.

    Whoever used its memory again before they ran, the pinned buffer or the device's, would change the
    sums.
    """
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    path = converted["shards" if backend in ("shards", "cache") else "webdataset"]
    settings = {"cache": "device"} if backend == "cache" else {"backend": backend}
    sums: dict[bool, list[float]] = {}
    for slow in (False, True):
        with build_loader(path, batch_size=4, device="cuda", shuffle=False, **settings) as loader:
            found = []
            for batch in (batch for _ in range(4) for batch in loader):
                if slow:
                    torch.cuda._sleep(20_000_000)  # some 10 ms
                found.append(batch.images.sum(dtype=torch.int64))
                del batch
            torch.cuda.synchronize()
            sums[slow] = [int(total) for total in found]
    assert sums[True] == sums[False]

"""The CUDA that is not there does what CUDA may do: it is late, and lends memory again."""

import pytest
import torch

from tests.cuda.simulator import simulated

CUDA = torch.device("cuda", 0)


def test_what_is_late_is_done_when_somebody_waits() -> None:
    with simulated("all late") as world:
        made = torch.zeros(4, device=CUDA) + 1
        assert made.shown.tolist() != [1] * 4  # type: ignore[attr-defined]
        assert world.syncs == []
        assert made.tolist() == [1] * 4
        assert len(world.syncs) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_does_not_wait_for_another_reads_what_is_not_there(waits: bool) -> None:
    with simulated("loader late"):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            made = torch.zeros(4, device=CUDA) + 1
        if waits:
            torch.cuda.current_stream().wait_event(side.record_event())
        read = made + 1
        torch.cuda.synchronize()
        assert (read.tolist() == [2] * 4) == waits


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_is_lent_again_while_a_stream_that_nobody_named_still_reads_it(recorded: bool) -> None:
    with simulated("training late"):
        side, training = torch.cuda.Stream(), torch.cuda.current_stream()
        with torch.cuda.stream(side):
            made = torch.ones(4, device=CUDA)
        training.wait_event(side.record_event())
        read = made + 1
        if recorded:
            made.record_stream(training)
        del made
        with torch.cuda.stream(side):
            torch.zeros(4, device=CUDA)
        torch.cuda.synchronize()
        assert (read.tolist() == [2] * 4) == recorded


def test_pinned_memory_is_lent_again_when_it_has_been_copied() -> None:
    with simulated("all late"):
        pinned = torch.ones(4).pin_memory()
        address = pinned.data_ptr()
        copied = pinned.to(CUDA, non_blocking=True)
        del pinned
        other = torch.zeros(4).pin_memory()
        assert other.data_ptr() != address, "the copy is still to come"
        torch.cuda.synchronize()
        assert copied.tolist() == [1] * 4
        assert torch.zeros(4).pin_memory().data_ptr() == address


def test_copies_from_pageable_memory_answers_and_masks_make_the_host_wait() -> None:
    with simulated("all late") as world:
        made = torch.arange(4, device=CUDA)
        for wait in (
            lambda: torch.ones(4).to(CUDA),
            lambda: torch.ones(4).pin_memory().to(CUDA),
            lambda: torch.tensor([1.0], device=CUDA),
            lambda: bool((made > 2).any()),
            lambda: made[made > 2],
            lambda: made[torch.tensor([1, 2])],
            made.cpu,
            torch.cuda.synchronize,
        ):
            before = len(world.syncs)
            wait()
            assert len(world.syncs) > before


def test_devices_have_their_own_streams_and_their_tensors_do_not_mix() -> None:
    with simulated("all late") as world:
        with torch.cuda.stream(torch.cuda.Stream(1)):
            assert torch.cuda.current_device() == 1
            made = torch.ones(4, device="cuda")
            assert made.device == torch.device("cuda", 1)
        assert torch.cuda.current_device() == 0
        assert world.used == {1}
        with pytest.raises(RuntimeError, match="same device"):
            made + torch.ones(4, device=CUDA)


def test_torch_is_as_before_behind_it() -> None:
    def patched() -> tuple[object, ...]:
        return torch.empty, torch.tensor, torch.Tensor.to, torch.cuda.Stream, torch.cuda.is_available

    before = patched()
    with simulated("at once"):
        assert not set(before) & set(patched())
    assert patched() == before

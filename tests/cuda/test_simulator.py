"""The CUDA that is not there does what CUDA may do: it is late, and lends memory again."""

import pytest
import torch

from tests.cuda.simulator import simulated

CUDA = torch.device("cuda", 0)


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

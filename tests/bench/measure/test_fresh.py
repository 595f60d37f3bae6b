"""Processes of their own: how they start and end, and what is said where memory is too small."""

import multiprocessing
import os

import pytest

from bench.measure.fresh import DoesNotFit, in_one_line, run_fresh
from precache.errors import WorkerError


def process() -> tuple[int, str]:
    return os.getpid(), multiprocessing.get_start_method()


def test_each_trial_is_a_process_of_its_own_and_one_that_dies_is_an_error_with_the_remedy() -> None:
    found = [run_fresh(process) for _ in range(2)]
    assert len({pid for pid, _ in found} | {os.getpid()}) == 3
    assert {method for _, method in found} == {multiprocessing.get_start_method()}, "as a training has it"
    with pytest.raises(WorkerError, match=r"the process of a trial died; .*: use fewer workers or a smaller"):
        run_fresh(os._exit, 1)


def test_too_little_memory_is_one_line_with_the_remedy_and_other_errors_stay_what_they_are() -> None:
    for said in (  # as users have reported them
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at ...",
        "FIND was unable to find an engine to execute this computation after trying 7 plans.",
    ):
        with pytest.raises(DoesNotFit, match=r"^batch_size 8 of 32x32 .*; choose a"), in_one_line(8, 32):
            raise RuntimeError(said)
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError) as other, in_one_line(8, 32):
        raise error
    assert other.value is error

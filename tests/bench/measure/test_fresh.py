"""Processes of their own: how they start and end, and what is said where memory is too small."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch

from bench.measure.fresh import DoesNotFit, in_one_line, out_of_memory, run_fresh
from bench.measure.trainers import EmulatedTrainer, ModelTrainer
from bench.measure.trial import measure_trainer
from loaders.batch import Batch
from precache.errors import SettingError, WorkerError
from tests.bench.settings import quick

# as users have reported them
TOO_LITTLE: list[Exception] = [
    MemoryError(),
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of ..."),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at ..."),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if ... out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("FIND was unable to find an engine to execute this computation after trying 7 plans."),
    RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
]
OTHERS: list[Exception] = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a view"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("out of memory"),
]


def process() -> tuple[int, str]:
    return os.getpid(), multiprocessing.get_start_method()


def test_each_trial_is_a_process_of_its_own_and_one_that_dies_is_an_error_with_the_remedy() -> None:
    found = [run_fresh(process) for _ in range(2)]
    assert len({pid for pid, _ in found} | {os.getpid()}) == 3
    assert {method for _, method in found} == {multiprocessing.get_start_method()}, "as a training has it"
    with pytest.raises(WorkerError, match=r"the process of a trial died; .*: use fewer workers or a smaller"):
        run_fresh(os._exit, 1)


@contextmanager
def failing(error: Exception) -> Iterator[None]:
    """Trainers raise `error`, in the process of a trial."""

    def step(trainer: object, batch: Batch) -> None:
        raise error

    with patch.object(EmulatedTrainer, "step", step):
        yield


def test_too_little_memory_is_one_line_with_the_remedy_and_other_errors_stay_what_they_are() -> None:
    for error in TOO_LITTLE:
        with pytest.raises(DoesNotFit) as raised:
            measure_trainer(quick(trainer="emulated:100", around=partial(failing, error)))
        assert str(raised.value) == "batch_size 8 of 32x32 does not fit into memory; choose a smaller one"
    for error in OTHERS:
        assert not out_of_memory(error)
        with pytest.raises(type(error)) as other, in_one_line(8, 32):
            raise error
        assert other.value is error


@pytest.mark.slow
def test_a_model_that_cannot_be_compiled_is_one_line(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here for want of a compiler."""
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    monkeypatch.setattr(config, "force_disable_caches", True)
    trainer = ModelTrainer(tiny, torch.device("cpu"), 2, compiled=True)
    batch = Batch(torch.rand(2, 3, 8, 8), torch.arange(2), torch.arange(2))
    said = r"torch.compile failed \(.*ompiler.*\); fix that, or leave out"
    with pytest.raises(SettingError, match=said), in_one_line(2, 8):
        trainer.step(batch)

"""Too little memory and what cannot be compiled, by the exceptions that torch, cuDNN and cuBLAS raise."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from bench.commands import sweep
from bench.measure import sweep_trial
from bench.measure.comparison import Arm, RunSettings, compare
from bench.measure.refusals import DoesNotFit, in_one_line, out_of_memory
from bench.measure.run import measure, measure_trainer
from bench.measure.spec import TrialSpec
from bench.measure.trainers import EmulatedTrainer, ModelTrainer
from bench.report.grid import Point
from bench.report.sweep_file import SweepFile
from loaders.batch import Batch
from precache.errors import SettingError
from tests.bench.settings import sweep_settings

# as users have reported them
TOO_LITTLE: list[Exception] = [
    MemoryError(),
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of ..."),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at ..."),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if ... out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
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
CPU = torch.device("cpu")


@contextmanager
def failing(error: Exception) -> Iterator[None]:
    """Trainers raise `error`, in the process of a trial."""

    def step(trainer: object, batch: Batch) -> None:
        raise error

    with patch.object(EmulatedTrainer, "step", step):
        yield


@pytest.mark.parametrize("error", TOO_LITTLE, ids=lambda error: str(error)[:50])
def test_too_little_memory_is_one_line_with_the_batch_size_and_the_remedy(
    converted: dict[str, Path], error: Exception
) -> None:
    spec = TrialSpec(
        backend="shards", path=converted["shards"], trainer="emulated:100", classes=5, batch_size=8,
        workers=1, size=32, warmup=1, batches=2, device=CPU, around=partial(failing, error),
    )  # fmt: skip
    for run in (measure, measure_trainer):
        with pytest.raises(DoesNotFit) as raised:
            run(spec)
        assert str(raised.value) == "batch_size 8 of 32x32 does not fit into memory; choose a smaller one"


def test_torch_tells_that_main_memory_is_too_small() -> None:
    with pytest.raises(DoesNotFit), in_one_line(8, 32):
        torch.empty(1 << 50)
    with pytest.raises(DoesNotFit), in_one_line(8, 32):
        torch.empty(1 << 31, 1 << 31, 8)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: str(error)[:50])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert not out_of_memory(error)
    with pytest.raises(type(error)) as raised, in_one_line(8, 32):
        raise error
    assert raised.value is error


def test_a_comparison_ends_with_that_line(converted: dict[str, Path]) -> None:
    spec = RunSettings(
        trainers=("emulated:100",), batch_size=8, workers=1, size=32, warmup=1, batches=2, repeats=1,
        device=CPU,
    )  # fmt: skip
    arms = [Arm("shards", converted["shards"])]
    around = partial(failing, TOO_LITTLE[3])
    with pytest.raises(SettingError, match="batch_size 8 of 32x32 does not fit into memory"):
        compare(arms, spec, around=around)


@pytest.mark.parametrize("error", TOO_LITTLE[:4], ids=lambda error: str(error)[:50])
def test_in_a_sweep_it_is_a_finding_about_the_point(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    path = str(converted["shards"])
    point = Point("shards", path, 8, None, None, 1)
    settings = sweep_settings(trainer="emulated:100", size=32, warmup=1, batches=2)
    monkeypatch.setattr(sweep_trial, "run_fresh", lambda function, spec: function(spec))
    file = SweepFile(tmp_path / "sweep.jsonl", {"machine": {}, "data": {}, "settings": {}})
    with failing(error):
        sweep.run([point], settings, file, {path: 5})
    assert file.failed == {point: "batch 8 does not fit into memory"}


@pytest.mark.slow
def test_a_model_that_cannot_be_compiled_is_one_line(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here for want of a compiler."""
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    monkeypatch.setattr(config, "force_disable_caches", True)
    trainer = ModelTrainer(tiny, CPU, 2, compiled=True)
    batch = Batch(torch.rand(2, 3, 8, 8), torch.arange(2), torch.arange(2))
    failed = pytest.raises(
        SettingError, match=r"torch.compile failed \(.*ompiler.*\); fix that, or leave out"
    )
    with failed, in_one_line(2, 8):
        trainer.step(batch)

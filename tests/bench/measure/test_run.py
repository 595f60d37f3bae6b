"""One measured run with the settings that practitioners use: precision, compiling, caches."""

from pathlib import Path

import pytest
import torch

from bench.cli import main
from bench.measure import sweep_trial
from bench.measure.device import choose_warmup
from bench.measure.full_batches import LAST
from bench.measure.run import measure
from bench.measure.spec import TrialSpec
from bench.measure.trainers import EmulatedTrainer
from bench.report.grid import Point
from precache.console import commandline
from tests.bench.settings import sweep_settings
from tests.building import build_loader

CPU = torch.device("cpu")


def spec(path: Path, **settings: object) -> TrialSpec:
    defaults = {
        "backend": "shards", "path": path, "trainer": "emulated:100000", "classes": 5, "batch_size": 8,
        "workers": 1, "size": 32, "warmup": 1, "batches": 4, "device": CPU,
    }  # fmt: skip
    return TrialSpec(**{**defaults, **settings})


@pytest.mark.parametrize("cache", ["ram", "device"])
def test_a_cache_is_full_before_the_first_timed_batch(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    """The trainer gets the first batch, then those of the second epoch, when nothing is decoded any more."""
    served: list[list[int]] = []
    monkeypatch.setattr(EmulatedTrainer, "step", lambda _, batch: served.append(batch.ids.tolist()))
    measure(spec(converted["shards"], cache=cache))
    with build_loader(converted["shards"], batch_size=8, size=32, last=LAST) as loader:
        first, second = [[batch.ids.tolist() for batch in loader] for _ in range(2)]
    assert served == [first[0], *second[: 1 + 4]]


@pytest.mark.parametrize("amp", ["bf16", "fp16", "off"])
def test_the_loader_serves_the_dtype_of_the_trainers_precision(
    converted: dict[str, Path], tiny: str, amp: str
) -> None:
    run = measure(spec(converted["shards"], trainer=tiny, amp=amp, batch_size=4))
    assert run.served is not None
    dtype = {"bf16": "bfloat16", "fp16": "float16", "off": "float32"}[amp]
    assert run.served.shapes == (f"3x32x32 torch.{dtype}",)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_compiling_is_over_with_the_first_step(converted: dict[str, Path], tiny: str) -> None:
    run = measure(spec(converted["shards"], trainer=tiny, compiled=True))
    assert run.first_step_s > 10 * max(run.step_s)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_a_trial_of_a_sweep_compiles_and_caches(converted: dict[str, Path], tiny: str) -> None:
    settings = sweep_settings(trainer=tiny, size=32, warmup=1, batches=2, compiled=True, cache="ram")
    point = Point("shards", str(converted["shards"]), 8, "bf16", None, 1)
    found = sweep_trial.both(sweep_trial.at_point(settings, point, 5))
    assert found["trainer"] > 0
    assert found["together"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("compiler")
def test_bench_loaders_compiles_in_half_precision_from_a_cache(
    converted: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--batch-size", 2, "--size", 32, "--workers", 1, "--warmup", 0, "--batches", 1, "--repeats", 1)
    options = ("--trainer", "resnet18", "--amp", "bf16", "--compile", "--cache", "device", "--device", "cpu")
    arguments = ["loaders", converted["shards"], "--backend", "shards", *options, *sizes]
    assert commandline.run(main, "bench", [*map(str, arguments), "--details"]) == 0
    shown = capfd.readouterr().out
    assert "trainer resnet18, bf16, compiled; " in shown
    assert "; cache device; " in shown


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bench_loaders_feeds_the_vision_transformer(
    raw_tree: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--batch-size", 2, "--workers", 1, "--warmup", 0, "--batches", 1, "--repeats", 1)
    arguments = ["loaders", raw_tree, "--backend", "pytorch", "--trainer", "vit_s_16", "--device", "cpu"]
    assert commandline.run(main, "bench", [*map(str, (*arguments, *sizes)), "--details"]) == 0
    assert "trainer vit_s_16; batch 2 of 224x224" in capfd.readouterr().out


def test_the_default_warm_up_is_longer_on_a_gpu() -> None:
    assert choose_warmup(None, CPU) < choose_warmup(None, torch.device("cuda"))
    assert choose_warmup(0, torch.device("cuda")) == 0


@pytest.mark.parametrize("command", ["loaders", "sweep", "profile", "ddp", "recommend"])
def test_the_help_names_the_source_of_each_preset(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert commandline.run(main, "bench", [command, "--help"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "emulated:h100 7,158 ResNet-50, MLPerf Training v4.0, MXNet" in shown
    assert "emulated:a100 2,470 ResNet-50, NVIDIA DeepLearningExamples, PyTorch, AMP" in shown
    assert "emulated:mlperf-storage-h100 1,786 ResNet-50, the sleep of MLPerf Storage" in shown
    assert "PyTorch without MXNet's tuning is slower: --trainer-rate" in shown
    assert "x8" in shown

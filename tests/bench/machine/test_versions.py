"""What a result says about the machine that it was measured on."""

import re

import pytest
import torch

from bench.machine import hardware
from bench.machine.hardware import accelerator_of, describe_machine, versions_of
from bench.report import table as report
from tests.bench.rich_result import rich_result

GPU_VERSIONS = {"driver", "cuda", "cudnn", "nccl"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The machine with a GPU, whose name and driver alone are made up: torch tells what it was built with."""
    if torch.version.cuda is None:
        pytest.skip("torch was built without CUDA")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(hardware, "driver_version", lambda: "570.133.20")
    return describe_machine(torch.device("cuda"))


def test_a_machine_with_a_gpu_tells_what_drives_it(gpu: dict[str, str]) -> None:
    assert gpu.keys() >= GPU_VERSIONS
    assert gpu["cuda"] == torch.version.cuda
    assert re.fullmatch(r"\d{1,2}(\.\d{1,2}){2}", gpu["cudnn"])
    found = int("{:d}{:02d}{:02d}".format(*map(int, gpu["cudnn"].split("."))))
    assert found == torch.backends.cudnn.version()
    assert accelerator_of(gpu).startswith(f"NVIDIA H200 (driver 570.133.20, CUDA {gpu['cuda']}, cuDNN ")


def test_a_machine_without_one_tells_nothing_of_that() -> None:
    machine = describe_machine(torch.device("cpu"))
    assert not machine.keys() & GPU_VERSIONS
    assert accelerator_of(machine) == "none"


def test_what_cannot_be_read_is_left_out(gpu: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "driver_version", lambda: None)
    assert "driver" not in describe_machine(torch.device("cuda"))


def test_versions_stand_where_the_machine_does(gpu: dict[str, str]) -> None:
    result = rich_result()
    assert "accelerator: NVIDIA H100;" in report.conditions(result), "an older result has the name alone"
    result.machine.update(gpu)
    assert f"accelerator: {accelerator_of(gpu)};" in report.conditions(result)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_all_versions_are_read_from_a_gpu() -> None:
    pytest.importorskip("pynvml")
    machine = describe_machine(torch.device("cuda"))
    assert machine.keys() >= GPU_VERSIONS


def test_pillow_simd_goes_by_its_own_name() -> None:
    machine = {"torch": "2.15.0", "pillow": "12.1.1", "pillow_flavour": "pillow-simd"}
    assert versions_of(machine, ("python", "torch", "pillow")) == ["torch 2.15.0", "pillow-simd 12.1.1"]
    assert versions_of({"pillow": "13.0.0"}, ("pillow",)) == ["pillow 13.0.0"], "an old result"

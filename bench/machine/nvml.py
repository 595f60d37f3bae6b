"""Readings of an NVIDIA GPU through its management library."""

from collections.abc import Callable
from typing import Any

import torch


class Gpu:
    """One device; `sample` reads what it offers."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        readings: dict[str, Callable[[], float]] = {
            "gpu_share": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu_memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "gpu_memory_share": lambda: _used_share(nvml.nvmlDeviceGetMemoryInfo(handle)),
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "gpu_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "gpu_memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        }
        self.missing: dict[str, str] = {}
        self._readings = {}
        for name, read in readings.items():
            try:
                read()
            except nvml.NVMLError as error:  # slices of a GPU have no utilisation, some cards no power
                self.missing[name] = str(error)
            else:
                self._readings[name] = read

    def sample(self) -> dict[str, float]:
        """The readings now."""
        return {name: float(read()) for name, read in self._readings.items()}


def open_gpu(device: torch.device, missing: dict[str, str]) -> Gpu | None:
    """The GPU that torch calls `device`; what cannot be read is added to `missing`, with the reason."""
    try:
        import pynvml
    except ImportError:
        missing["gpu"] = "nvidia-ml-py is not installed; run 'pip install nvidia-ml-py'"
        return None
    try:
        pynvml.nvmlInit()
        # the two number devices differently: CUDA_VISIBLE_DEVICES hides some from torch alone
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        gpu = Gpu(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except pynvml.NVMLError as error:
        missing["gpu"] = f"the GPU cannot be read: {error}"
        return None
    missing |= gpu.missing
    return gpu


def driver_version() -> str | None:
    """Of the GPUs; None where nvidia-ml-py is not installed, or finds none."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def _used_share(memory: Any) -> float:
    return float(memory.used / memory.total)


def energy_j(device: torch.device) -> float | None:
    """What the GPU has taken since its driver was loaded, joules; None where that cannot be read."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    except ImportError:
        return None
    except pynvml.NVMLError:  # cards before Volta, slices of a card
        return None

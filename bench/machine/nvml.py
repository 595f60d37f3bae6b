"""Readings of an NVIDIA GPU through its management library."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class _Unreadable(Exception):
    """There is no GPU to read, or no library to read it with; says which."""


@contextmanager
def _library() -> Iterator[Any]:
    """NVIDIA's library, started; what it cannot do within the block raises _Unreadable."""
    try:
        import pynvml
    except ImportError as error:
        raise _Unreadable("nvidia-ml-py is not installed; run 'pip install nvidia-ml-py'") from error
    try:
        pynvml.nvmlInit()
        yield pynvml
    except pynvml.NVMLError as error:
        raise _Unreadable(f"the GPU cannot be read: {error}") from error


def _find(nvml: Any, device: torch.device) -> Any:
    """What `nvml` calls `device`: it counts devices that CUDA_VISIBLE_DEVICES hides from torch."""
    uuid = torch.cuda.get_device_properties(device).uuid
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


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


def _used_share(memory: Any) -> float:
    return float(memory.used / memory.total)


def open_gpu(device: torch.device, missing: dict[str, str]) -> Gpu | None:
    """The GPU that torch calls `device`; what cannot be read is added to `missing`, with the reason."""
    try:
        with _library() as nvml:
            gpu = Gpu(nvml, _find(nvml, device))
    except _Unreadable as error:
        missing["gpu"] = str(error)
        return None
    missing |= gpu.missing
    return gpu


def driver_version() -> str | None:
    """Of the GPUs; None where it cannot be read."""
    with suppress(_Unreadable), _library() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion())
    return None


def energy_j(device: torch.device) -> float | None:
    """What the GPU has taken since its driver was loaded, joules; None where that cannot be read."""
    if device.type == "cuda":
        with suppress(_Unreadable), _library() as nvml:  # cards before Volta and slices of a card do not tell
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(_find(nvml, device))) / 1e3
    return None

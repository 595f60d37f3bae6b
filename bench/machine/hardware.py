"""What machine this is."""

import platform
from datetime import date
from importlib import metadata
from pathlib import Path

import psutil
import torch

from precache.codecs import made_by
from precache.executors import available_cpus

_PACKAGES = ("torch", "torchvision", "numpy", "webdataset", "nvidia-dali-cuda120")


def describe_machine(device: torch.device) -> dict[str, str]:
    """Machine, versions and date, as text: they go with every figure."""
    return {
        "date": date.today().isoformat(),
        "cpu": f"{_cpu_model()}, {available_cpus()} CPUs",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES if _installed(name)},
        **made_by(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True

"""What machine this is."""

import platform
from datetime import date
from importlib import metadata
from pathlib import Path

import psutil
import torch

from precache.engines import available_cpus
from precache.packages import DALI
from precache.pictures.codecs import made_by

_PACKAGES = ("torch", "torchvision", "numpy", "webdataset", *DALI, "torchcodec")


def describe_machine(device: torch.device) -> dict[str, str]:
    """Machine, versions and date, as text: they go with every figure."""
    return {
        "date": date.today().isoformat(),
        "cpu": f"{_cpu_model()}, {available_cpus()} CPUs",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        **(_gpu_versions() if device.type == "cuda" else {}),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES if _installed(name)},
        **made_by(),
    }


def _gpu_versions() -> dict[str, str]:
    """Of what runs on the GPU; what cannot be read is left out."""
    number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    cudnn = f"{number // 10_000}.{number // 100 % 100}.{number % 100}" if number else None  # of 92600: 9.26.0
    driver = Path("/sys/module/nvidia/version")
    has_nccl = torch.distributed.is_nccl_available()
    nccl = torch.cuda.nccl.version() if has_nccl else None  # type: ignore[no-untyped-call]
    found = {
        "driver": driver.read_text().strip() if driver.exists() else None,
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
    }
    return {name: version for name, version in found.items() if version is not None}


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

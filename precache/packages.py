"""Packages that the core does without, looked up without importing them."""

import shlex
import sys
from importlib import metadata

DALI = ("nvidia-dali-cuda120", "nvidia-dali-cuda130")
"""For CUDA 12 and CUDA 13; the same modules."""
OF_EXTRAS = frozenset(("cv2", "plotly", "psutil", "torch", "torchvision", "webdataset"))
"""Modules that the extras `loaders` and `bench` bring."""
TORCHCODEC = (0, 16)
"""The first version of torchcodec with a JPEG decoder for GPUs."""
_CUDA_13_DRIVER = 580  # https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/


def version_of(package: str) -> str | None:
    """The installed version; None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def dali_package(driver: str | None = None) -> str:
    """The build of DALI that is installed, else that for this version of the driver, else for CUDA 12."""
    installed = [name for name in DALI if version_of(name)]
    major = (driver or "").partition(".")[0]
    newer = major.isdigit() and int(major) >= _CUDA_13_DRIVER
    return (installed or [DALI[1] if newer else DALI[0]])[0]


def install_extra(extra: str) -> str:
    """The command line that installs what the extra brings into the running Python."""
    return pip_install(f"precache[{extra}]")


def pip_install(*arguments: str) -> str:
    """The command line that installs `arguments` into the running Python."""
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])

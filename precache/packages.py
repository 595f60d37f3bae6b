"""Look up optional packages without importing them, and give the commands that install them."""

import shlex
import sys
from dataclasses import dataclass
from importlib import metadata

from precache.errors import MissingDependencyError
from precache.imports import OUR_PACKAGES, hiding_error, hiding_files

DALI = ("nvidia-dali-cuda120", "nvidia-dali-cuda130")
"""Builds of DALI for CUDA 12 and CUDA 13, with the same modules."""
_CUDA_13_DRIVER = 580  # https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/


def installed_version(package: str) -> str | None:
    """Return the installed version of `package`; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def dali_package(driver: str | None = None) -> str:
    """Return the installed build of DALI, else the one for this version of the driver, else for CUDA 12."""
    for name in DALI:
        if installed_version(name):
            return name
    major = (driver or "").partition(".")[0]
    supports_cuda_13 = major.isdigit() and int(major) >= _CUDA_13_DRIVER
    return DALI[1] if supports_cuda_13 else DALI[0]


def install_command(extra: str) -> str:
    """Return the command line that installs precache's `extra` into the running Python."""
    return pip_command(f"precache[{extra}]")


def pip_command(*arguments: str) -> str:
    """Return the command line that installs `arguments` into the running Python."""
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def check_package(error: ImportError, user: str, extra: str = "") -> None:
    """Raise MissingDependencyError if a third-party package causes `error`: missing, broken, too old, hidden.

    Args:
        user: the program or module that needs the package.
        extra: the extra that installs it; by default precache itself does.
    """
    name = (error.name or "").partition(".")[0]
    # an installed package that fails to import may have imported a file of the working folder instead
    hiding = hiding_files(sys.path, [name] if isinstance(error, ModuleNotFoundError) else ())
    if hiding:
        raise hiding_error(hiding, f"{user}: {error}") from None
    if name and name not in OUR_PACKAGES:
        command = install_command(extra) if extra else pip_command("precache")
        raise MissingDependencyError(
            f"{user} needs the package {name} ({error})", remedy=f"run: {command}"
        ) from None


def pillow_install_command(name: str) -> str:
    """Return the command line that installs `pillow` or `pillow-simd`, and removes the other.

    Both contain the package PIL, and uninstalling one breaks the other, so the command uninstalls both. It
    first downloads and compiles the new one, so that a failure there changes nothing. It does not use pip's
    cache: a wheel there may have been compiled before headers were installed that Pillow can use.
    """
    pip = shlex.join([sys.executable, "-m", "pip"])
    return (
        f'wheels=$(mktemp -d) && {pip} wheel --no-deps --no-cache-dir --wheel-dir "$wheels" {name} && '
        f"{pip} uninstall -y pillow pillow-simd && "
        f'{pip} install --no-deps --no-index --find-links "$wheels" {name}'
    )


@dataclass(frozen=True, slots=True)
class PillowFault:
    """The reason why PIL cannot be imported, and the command line that repairs it."""

    problem: str
    command: str


def pillow_fault() -> PillowFault | None:
    """Return why PIL cannot be imported; None if it can."""
    try:
        from PIL import Image, features  # noqa: F401
    except Exception as error:  # a package that lacks files may raise anything
        name = "pillow-simd" if installed_version("pillow-simd") else "pillow"
        return PillowFault(f"Pillow is missing or broken ({error})", pillow_install_command(name))
    return None


def check_pillow() -> None:
    """Raise MissingDependencyError if PIL cannot be imported."""
    fault = pillow_fault()
    if fault is not None:
        raise MissingDependencyError(fault.problem, remedy=f"run: {fault.command}")

"""Packages that the core does without, looked up without importing them."""

import shlex
import sys
from importlib import metadata

from precache.errors import MissingDependencyError
from precache.imports import OURS, explain_hiding, hiding_files

DALI = ("nvidia-dali-cuda120", "nvidia-dali-cuda130")
"""For CUDA 12 and CUDA 13; the same modules."""
_CUDA_13_DRIVER = 580  # https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/


def installed_version(package: str) -> str | None:
    """The installed version; None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def dali_package(driver: str | None = None) -> str:
    """The build of DALI that is installed, else that for this version of the driver, else for CUDA 12."""
    installed = [name for name in DALI if installed_version(name)]
    major = (driver or "").partition(".")[0]
    newer = major.isdigit() and int(major) >= _CUDA_13_DRIVER
    return (installed or [DALI[1] if newer else DALI[0]])[0]


def install_command(extra: str) -> str:
    """The command line that installs what the extra brings into the running Python."""
    return pip_command(f"precache[{extra}]")


def pip_command(*arguments: str) -> str:
    """The command line that installs `arguments` into the running Python."""
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def check_package(error: ImportError, user: str, extra: str = "") -> None:
    """Raise MissingDependencyError where `error` is of a package of others: missing, broken, too old, hidden.

    Args:
        user: what needs it.
        extra: that brings it; else precache itself does.
    """
    name = (error.name or "").partition(".")[0]
    # what is there and cannot be imported may itself import a file that lies in the way
    hiding = hiding_files(sys.path, [name] if isinstance(error, ModuleNotFoundError) else ())
    if hiding:
        raise MissingDependencyError(f"{user}: {error}; {explain_hiding(hiding)}") from None
    if name and name not in OURS:
        command = install_command(extra) if extra else pip_command("precache")
        raise MissingDependencyError(f"{user} needs the package {name} ({error}); run: {command}") from None


def pillow_install_command(name: str) -> str:
    """The command line that gives the running Python `pillow` or `pillow-simd`, and removes the other.

    Both are the package PIL, so that removing one breaks the other: both are removed, whichever is there. The
    new one is downloaded, and compiled, before that: where that fails, nothing has changed. It is compiled
    anew: what pip may have in its cache does not know of headers that were installed later.
    """
    pip = shlex.join([sys.executable, "-m", "pip"])
    return (
        f'wheels=$(mktemp -d) && {pip} wheel --no-deps --no-cache-dir --wheel-dir "$wheels" {name} && '
        f"{pip} uninstall -y pillow pillow-simd && "
        f'{pip} install --no-deps --no-index --find-links "$wheels" {name}'
    )


def pillow_fault() -> tuple[str, str] | None:
    """What is wrong with PIL if it cannot be imported, and the command line that repairs it; else None."""
    try:
        from PIL import Image, features  # noqa: F401
    except Exception as error:  # half a package may raise anything
        name = "pillow-simd" if installed_version("pillow-simd") else "pillow"
        return f"Pillow is missing or broken ({error})", pillow_install_command(name)
    return None


def check_pillow() -> None:
    """Raise MissingDependencyError if PIL cannot be imported."""
    if fault := pillow_fault():
        raise MissingDependencyError("; run: ".join(fault))

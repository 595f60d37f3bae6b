"""Find packages: the versions of optional ones, the commands that install them, and what hides them."""

import os
import shlex
import sys
import sysconfig
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from precache.errors import MissingDependencyError

DALI = ("nvidia-dali-cuda120", "nvidia-dali-cuda130")
"""Builds of DALI for CUDA 12 and CUDA 13, with the same modules."""
_OUR_PACKAGES = ("bench", "loaders", "precache")
_PIP = shlex.join([sys.executable or "python", "-m", "pip"])  # a program may have Python built in
_ROOT = Path(__file__).resolve().parent.parent


def installed_version(package: str) -> str | None:
    """Return the installed version of `package`; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def install_command(extra: str) -> str:
    """Return the command line that installs precache's `extra` into the running Python."""
    return _pip_command(f"precache[{extra}]")


def _pip_command(requirement: str) -> str:
    return f"{_PIP} install {shlex.quote(requirement)}"


def check_package(error: ImportError, user: str, extra: str = "") -> None:
    """Raise MissingDependencyError if a third-party package causes `error`: missing, broken, too old, hidden.

    Args:
        user: the program or module that needs the package.
        extra: the extra that installs it; by default precache itself does.
    """
    name = (error.name or "").partition(".")[0]
    hiding = _hiding_path(name)
    if hiding is not None:
        raise MissingDependencyError(
            f"{user}: {error}; {hiding} hides the package {name}",
            remedy="rename it, or run from another folder",
        ) from None
    if name and name not in _OUR_PACKAGES:
        command = install_command(extra) if extra else _pip_command("precache")
        raise MissingDependencyError(
            f"{user} needs the package {name} ({error})", remedy=f"run: {command}"
        ) from None


def _hiding_path(name: str) -> Path | None:
    """Return the user's own file or folder that Python imports as `name`; None if it is an installed one."""
    spec = PathFinder.find_spec(name) if name else None
    if spec is None:
        return None
    paths = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    path = Path(paths[0]).resolve()
    path = path.parent if path.name == "__init__.py" else path
    standard_library = Path(sysconfig.get_path("stdlib")).resolve()
    is_ours = path.parent == _ROOT and name in _OUR_PACKAGES
    return None if is_ours or _is_installed(path) or path.is_relative_to(standard_library) else path


def _is_installed(path: Path) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in path.parts)


def child_environment() -> dict[str, str]:
    """Return an environment in which Python finds our packages, and imports nothing of its working folder.

    Python 3.10 ignores PYTHONSAFEPATH, and still looks in the working folder.
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    if not _is_installed(_ROOT):
        inherited = os.environ.get("PYTHONPATH")
        others = [entry for entry in inherited.split(os.pathsep) if entry != str(_ROOT)] if inherited else []
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *others])
    return environment


def pillow_install_command(name: str) -> str:
    """Return the command line that installs `pillow` or `pillow-simd`, and removes the other.

    Both contain the package PIL, and uninstalling one breaks the other, so the command uninstalls both. It
    first downloads and compiles the new one, so that a failure there changes nothing. It does not use pip's
    cache: a wheel there may have been compiled before headers were installed that Pillow can use.
    """
    return (
        f'wheels=$(mktemp -d) && {_PIP} wheel --no-deps --no-cache-dir --wheel-dir "$wheels" {name} && '
        f"{_PIP} uninstall -y pillow pillow-simd && "
        f'{_PIP} install --no-deps --no-index --find-links "$wheels" {name}'
    )


def pillow_fault() -> MissingDependencyError | None:
    """Return the error that says why PIL cannot be imported, and how to repair it; None if it can."""
    try:
        from PIL import Image, features  # noqa: F401
    except Exception as error:  # a package that lacks files may raise anything
        name = "pillow-simd" if installed_version("pillow-simd") else "pillow"
        remedy = f"run: {pillow_install_command(name)}"
        return MissingDependencyError(f"Pillow is missing or broken ({error})", remedy=remedy)
    return None

"""What this machine has for the project, and the command that installs what it lacks.

torch is looked up, not imported: the answer comes at once.
"""

import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

import PIL

from precache import codecs

_SIMD_NEEDS = "a C compiler and the headers of libjpeg and zlib"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `install` is the command that mends what is missing, or None."""

    subject: str
    found: str
    install: str | None = None


def examine() -> list[Finding]:
    """Look at this machine; takes under a second."""
    return [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        _pillow(),
        Finding("simplejpeg", f"{metadata.version('simplejpeg')} (libjpeg-turbo)"),
        _package("backend pytorch", "torch", "torchvision"),
        _package("backend shards", "torch", "safetensors"),
        _package("backend webdataset", "torch", "webdataset"),
        _package("backend dali", "torch", "nvidia-dali-cuda120"),
        *_gpu(),
    ]


def pip_install(*arguments: str) -> str:
    """The command line that installs `arguments` into the running Python."""
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def _pillow() -> Finding:
    installed = [name for name in ("pillow", "pillow-simd") if _version(name)]
    if codecs.pillow_is_simd():
        found = f"Pillow-SIMD {PIL.__version__}, {codecs.pillow_jpeg()}"
        if "pillow" in installed:
            found += "; Pillow is recorded as installed too, pip may put it back"
        return Finding("pillow", found)
    found = (
        f"Pillow {PIL.__version__}, {codecs.pillow_jpeg()} (Pillow-SIMD resizes faster; needs {_SIMD_NEEDS})"
    )
    uninstall = shlex.join([sys.executable, "-m", "pip", "uninstall", "-y", "pillow"])
    return Finding("pillow", found, f"{uninstall} && {pip_install('--no-deps', 'pillow-simd')}")


def _package(subject: str, *packages: str) -> Finding:
    versions = {name: _version(name) for name in packages}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Finding(subject, f"missing {', '.join(missing)}", pip_install(*missing))
    return Finding(subject, ", ".join(f"{name} {version}" for name, version in versions.items()))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpu() -> list[Finding]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [Finding("gpu", "none found (nvidia-smi is missing or found no GPU)")]
    findings = [Finding("gpu", line.strip()) for line in answer.splitlines() if line.strip()]
    if _version("nvidia-ml-py") is None:
        findings.append(Finding("gpu readings", "missing nvidia-ml-py", pip_install("nvidia-ml-py")))
    return findings

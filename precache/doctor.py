"""What this machine has for the project, and the command that installs what it lacks.

torch is looked up, not imported: the answer comes at once.
"""

import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass

import PIL

from precache import codecs
from precache.packages import TORCHCODEC, dali_package, version_of

_SIMD_NEEDS = "a C compiler and the headers of libjpeg and zlib"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `install` is the command that mends what is missing, or None."""

    subject: str
    found: str
    install: str | None = None


def examine() -> list[Finding]:
    """Look at this machine; takes under a second."""
    driver, gpus = _gpu()
    return [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        _pillow(),
        Finding("simplejpeg", f"{version_of('simplejpeg')} (libjpeg-turbo)"),
        _package("backend pytorch", "torch", "torchvision"),
        _package("backend shards", "torch", "safetensors"),
        _package("backend webdataset", "torch", "webdataset"),
        _package("backend dali", "torch", dali_package(driver)),
        _nvjpeg(),
        *gpus,
    ]


def pip_install(*arguments: str) -> str:
    """The command line that installs `arguments` into the running Python."""
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def _pillow() -> Finding:
    installed = [name for name in ("pillow", "pillow-simd") if version_of(name)]
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
    versions = {name: version_of(name) for name in packages}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Finding(subject, f"missing {', '.join(missing)}", pip_install(*missing))
    return Finding(subject, ", ".join(f"{name} {version}" for name, version in versions.items()))


def _nvjpeg() -> Finding:
    subject, torchcodec = "backend nvjpeg", version_of("torchcodec")
    if torchcodec and tuple(map(int, torchcodec.split(".")[:2])) >= TORCHCODEC:
        return Finding(subject, f"torchcodec {torchcodec}")
    if (torchvision := version_of("torchvision")) is None:
        return Finding(subject, "missing torchcodec", pip_install("torchcodec"))
    older = f", torchcodec {torchcodec} is too old" if torchcodec else ""
    found = f"torchvision {torchvision}, which will drop it{older}"
    return Finding(subject, found, pip_install("--upgrade", "torchcodec"))


def _gpu() -> tuple[str | None, list[Finding]]:
    """The driver's version, and what is said of each GPU."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None, [Finding("gpu", "none found (nvidia-smi is missing or found no GPU)")]
    findings = [Finding("gpu", line.strip()) for line in answer.splitlines() if line.strip()]
    driver = findings[0].found.rpartition(",")[2].strip() if findings else None
    if version_of("nvidia-ml-py") is None:
        findings.append(Finding("gpu readings", "missing nvidia-ml-py", pip_install("nvidia-ml-py")))
    return driver, findings

"""`precache doctor`: what this machine has for the project, and the command that installs what it lacks.

torch is looked up, not imported: the answer comes at once. It runs where Pillow does not.
"""

import os
import platform
import subprocess
import sys
from dataclasses import dataclass

import click

from precache import engines
from precache.cli.commandline import Command
from precache.errors import printable
from precache.imports import hiding_files
from precache.packages import (
    DALI,
    dali_package,
    install_command,
    installed_version,
    pillow_fault,
    pillow_install_command,
)

_SIMD_NEEDS = "a C compiler and the headers of libjpeg and zlib"


@click.command(name="doctor", cls=Command)
def doctor_command() -> None:
    """Show what this machine has, and which command installs what is missing."""
    findings = examine()
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        click.echo(f"{finding.subject:<{width}}  {printable(finding.found)}")
        if finding.install:
            click.echo(f"{'':<{width}}  install: {finding.install}")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `install` is the command that installs what is missing, or None."""

    subject: str
    found: str
    install: str | None = None


def examine() -> list[Finding]:
    """Look at this machine; takes under a second."""
    driver, gpus = _gpu()
    dali = dali_package(driver)
    return [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("cpus", str(engines.available_cpus())),
        _pillow(),
        _packages("heic pictures", "pictures", "pillow-heif"),
        Finding("simplejpeg", f"{installed_version('simplejpeg')} (libjpeg-turbo)"),
        _packages("backend pytorch", "loaders", "torch", "torchvision", "opencv-python-headless"),
        _packages("backend shards", "loaders", "torch"),
        _packages("backend webdataset", "loaders", "torch"),
        _packages("backend dali", "dali-cuda13" if dali == DALI[1] else "dali", "torch", dali),
        _packages("bench", "bench", "plotly", "webdataset"),
        _packages("tables in Parquet", "table", "pyarrow"),
        _packages("datasets of Hugging Face", "hf", "datasets"),
        _packages("tensorboard", "tensorboard", "tensorboard"),
        *gpus,
        *_hiding_files(),
    ]


def _hiding_files() -> list[Finding]:
    """Files that a program in the working folder would import instead of what has their name."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # it was removed
        return []
    return [
        Finding("in the way", f"{file}: a program beside it that imports {file.stem} gets this; rename it")
        for file in hiding_files([folder, *sys.path])
    ]


def _pillow() -> Finding:
    if fault := pillow_fault():
        return Finding("pillow", *fault)
    import PIL

    from precache.pictures import kinds

    found = f"{kinds.pillow_name()} {PIL.__version__}, {kinds.pillow_jpeg()}"
    lost = kinds.kinds_lost()
    if lost:
        found += f"; scripts cannot read {', '.join(lost)} with it, as they can with stock Pillow"
        if plugged := [kind for kind in lost if kind not in kinds.kinds_without_decoder()]:
            found += f" ({', '.join(plugged)} where they import its plugin, as precache does)"
    if not kinds.pillow_is_simd():
        faster = f"{found}; Pillow-SIMD resizes faster, and needs {_SIMD_NEEDS} to be installed"
        return Finding("pillow", faster, pillow_install_command("pillow-simd"))
    if installed_version("pillow"):
        found += "; pip also lists Pillow, and may install it over this"
    return Finding("pillow", found, pillow_install_command("pillow") if lost else None)


def _packages(subject: str, extra: str, *packages: str) -> Finding:
    versions = {name: installed_version(name) for name in packages}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return _missing(subject, extra, *missing)
    return Finding(subject, ", ".join(f"{name} {version}" for name, version in versions.items()))


def _missing(subject: str, extra: str, *packages: str) -> Finding:
    them = "it" if len(packages) == 1 else "them"
    found = f"missing {', '.join(packages)}; install {them} with the extra '{extra}'"
    return Finding(subject, found, install_command(extra))


def _gpu() -> tuple[str | None, list[Finding]]:
    """The driver's version, and what is said of each GPU."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None, [Finding("gpu", "none (nvidia-smi is missing, or finds no GPU)")]
    findings = [Finding("gpu", line.strip()) for line in answer.splitlines() if line.strip()]
    driver = findings[0].found.rpartition(",")[2].strip() if findings else None
    if installed_version("nvidia-ml-py") is None:
        findings.append(_missing("gpu readings", "gpu", "nvidia-ml-py"))
    return driver, findings

"""The command `precache doctor`: show what is installed, and the commands that install what is missing.

Packages are looked up without importing them, so that the answer comes at once. It runs without Pillow, too.
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
        click.echo(f"{finding.subject:<{width}}  {printable(finding.text)}")
        if finding.install:
            click.echo(f"{'':<{width}}  install: {finding.install}")


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report; `install` is the command that installs what is missing, or None."""

    subject: str
    text: str
    install: str | None = None


def examine() -> list[Finding]:
    """Return the lines of the report on this machine; takes under a second."""
    driver, gpus = _examine_gpus()
    dali = dali_package(driver)
    return [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("cpus", str(engines.available_cpus())),
        _examine_pillow(),
        _examine_packages("heic pictures", "pictures", "pillow-heif"),
        Finding("simplejpeg", f"{installed_version('simplejpeg')} (libjpeg-turbo)"),
        _examine_packages("backend pytorch", "loaders", "torch", "torchvision", "opencv-python-headless"),
        _examine_packages("backend shards", "loaders", "torch"),
        _examine_packages("backend webdataset", "loaders", "torch"),
        _examine_packages("backend dali", "dali-cuda13" if dali == DALI[1] else "dali", "torch", dali),
        _examine_packages("bench", "bench", "plotly", "webdataset"),
        _examine_packages("tables in Parquet", "table", "pyarrow"),
        _examine_packages("datasets of Hugging Face", "hf", "datasets"),
        _examine_packages("tensorboard", "tensorboard", "tensorboard"),
        *gpus,
        *_hiding_files(),
    ]


def _hiding_files() -> list[Finding]:
    """Return a line for each file that a program in the working folder would import instead of a module."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # it was removed
        return []
    return [
        Finding("in the way", f"{file}: a program beside it that imports {file.stem} gets this; rename it")
        for file in hiding_files([folder, *sys.path])
    ]


def _examine_pillow() -> Finding:
    fault = pillow_fault()
    if fault is not None:
        return Finding("pillow", fault.problem, fault.command)
    import PIL

    from precache.pictures import kinds

    text = f"{kinds.pillow_name()} {PIL.__version__}, {kinds.pillow_jpeg()}"
    unreadable = kinds.kinds_not_built_in()
    if unreadable:
        text += f"; scripts cannot read {', '.join(unreadable)} with it, as they can with stock Pillow"
        with_plugin = [kind for kind in unreadable if kind not in kinds.kinds_without_decoder()]
        if with_plugin:
            text += f" ({', '.join(with_plugin)} where they import its plugin, as precache does)"
    if not kinds.pillow_is_simd():
        text += f"; Pillow-SIMD resizes faster, and needs {_SIMD_NEEDS} to be installed"
        return Finding("pillow", text, pillow_install_command("pillow-simd"))
    if installed_version("pillow"):
        text += "; pip also lists Pillow, and may install it over this"
    return Finding("pillow", text, pillow_install_command("pillow") if unreadable else None)


def _examine_packages(subject: str, extra: str, *packages: str) -> Finding:
    versions = {name: installed_version(name) for name in packages}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return _missing_packages(subject, extra, *missing)
    return Finding(subject, ", ".join(f"{name} {version}" for name, version in versions.items()))


def _missing_packages(subject: str, extra: str, *packages: str) -> Finding:
    pronoun = "it" if len(packages) == 1 else "them"
    text = f"missing {', '.join(packages)}; install {pronoun} with the extra '{extra}'"
    return Finding(subject, text, install_command(extra))


def _examine_gpus() -> tuple[str | None, list[Finding]]:
    """Return the version of the GPUs' driver, and a line for each GPU."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None, [Finding("gpu", "none (nvidia-smi is missing, or finds no GPU)")]
    findings = [Finding("gpu", line.strip()) for line in answer.splitlines() if line.strip()]
    driver = findings[0].text.rpartition(",")[2].strip() if findings else None
    if installed_version("nvidia-ml-py") is None:
        findings.append(_missing_packages("gpu readings", "gpu", "nvidia-ml-py"))
    return driver, findings

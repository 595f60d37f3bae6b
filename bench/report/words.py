"""Formatting of figures and machines as text. Everything here is pure, except `say`, which prints."""

import textwrap
from collections.abc import Iterable, Mapping

import click

from precache.errors import printable

WIDTH = 100
"""Characters of a line that text and tables fit into."""
_PERIODS = (
    ("years", 31_557_600.0),
    ("days", 86_400.0),
    ("h", 3600.0),
    ("min", 60.0),
    ("s", 1.0),
    ("ms", 1e-3),
)
_GPU = {"driver": "driver", "cuda": "CUDA", "cudnn": "cuDNN", "nccl": "NCCL"}


def number(value: float) -> str:
    """Write a number with three digits, or all digits before the point: 0.154, 11.6, 1,867."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def percent(share: float) -> str:
    """Write a share, 0 to 1, in whole per cent; below 1% with one more digit; as 100% only from 99.95%."""
    if 0 < share < 0.01:
        return f"{share:.1%}"
    return f"{share:.0%}" if share >= 0.9995 else f"{min(share, 0.994):.0%}"


def duration(seconds: float | None) -> str:
    """Write a time in the unit that suits it: 5.20 ms, 12.3 s, 4.1 h, 3.2 years; '-' for None."""
    if seconds is None:
        return "-"
    for unit, length_s in _PERIODS:
        if seconds >= 2 * length_s:
            return f"{number(seconds / length_s)} {unit}"
    unit, length_s = _PERIODS[-1]
    return f"{number(seconds / length_s)} {unit}"


def accelerator_of(machine: Mapping[str, str]) -> str:
    """Name the accelerator of a machine, with the versions of its driver and libraries.

    Args:
        machine: description by `bench.machine.hardware.describe_machine`.
    """
    versions = ", ".join(f"{title} {machine[name]}" for name, title in _GPU.items() if name in machine)
    return f"{machine['accelerator']} ({versions})" if versions else machine["accelerator"]


def versions_of(machine: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """List versions like 'torch 2.15.0' of the packages that the machine has; Pillow-SIMD by its own name."""
    titles = {"pillow": machine.get("pillow_flavour", "pillow")}
    return [f"{titles.get(name, name)} {machine[name]}" for name in names if name in machine]


def machine_line(machine: Mapping[str, str], versions: Iterable[str] = ("torch", "pillow")) -> str:
    """Write the line that goes with every figure: machine, accelerator, versions and date."""
    gpu = accelerator_of(machine)
    parts = [machine["cpu"], machine["memory"], "no accelerator" if gpu == "none" else gpu]
    return ", ".join([*parts, *versions_of(machine, versions), machine["date"]])


def say(text: str) -> None:
    """Print a text on lines of at most WIDTH characters; longer words are not broken."""
    click.echo(textwrap.fill(printable(text), WIDTH, break_long_words=False, break_on_hyphens=False))


def milliseconds(seconds: float) -> str:
    """Write a time in milliseconds: 5.2 ms, 250 ms."""
    return f"{seconds * 1e3:,.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"

"""Figures and machines as people read them. Pure, but for `say`, which prints."""

import textwrap
from collections.abc import Iterable, Mapping

import click

from precache.errors import printable

WIDTH = 100
"""Columns of a terminal that text and tables fit into."""
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
    """Three digits, or all before the point: 0.154, 11.6, 1,867."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def percent(share: float) -> str:
    """Whole per cent; below 1% one digit more, and 100% only of what is."""
    if 0 < share < 0.01:
        return f"{share:.1%}"
    return f"{share:.0%}" if share >= 0.9995 else f"{min(share, 0.994):.0%}"


def duration(seconds: float | None) -> str:
    """A time in the unit that suits it: 5.20 ms, 12.3 s, 4.1 h, 3.2 years; '-' for None."""
    if seconds is None:
        return "-"
    unit, length = next(((u, n) for u, n in _PERIODS if seconds >= 2 * n), _PERIODS[-1])
    return f"{number(seconds / length)} {unit}"


def accelerator_of(machine: Mapping[str, str]) -> str:
    """The accelerator of `bench.machine.hardware.describe_machine`, with what drives it."""
    versions = ", ".join(f"{title} {machine[name]}" for name, title in _GPU.items() if name in machine)
    return f"{machine['accelerator']} ({versions})" if versions else machine["accelerator"]


def versions_of(machine: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """'torch 2.15.0' and so on, of those that the machine has; Pillow-SIMD by its own name."""
    called = {"pillow": machine.get("pillow_flavour", "pillow")}
    return [f"{called.get(name, name)} {machine[name]}" for name in names if name in machine]


def machine_line(machine: Mapping[str, str], versions: Iterable[str] = ("torch", "pillow")) -> str:
    """The machine, its accelerator, versions and the date: what goes with every figure."""
    gpu = accelerator_of(machine)
    parts = [machine["cpu"], machine["memory"], "no accelerator" if gpu == "none" else gpu]
    return ", ".join([*parts, *versions_of(machine, versions), machine["date"]])


def say(text: str) -> None:
    """Print a text on lines of at most WIDTH columns, unbroken words apart."""
    click.echo(textwrap.fill(printable(text), WIDTH, break_long_words=False, break_on_hyphens=False))


def milliseconds(seconds: float) -> str:
    """A time in milliseconds: 5.2 ms, 250 ms."""
    return f"{seconds * 1e3:,.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"

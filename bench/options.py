"""What the commands have in common: options, and how their values are read."""

import torch

from bench.machine.precision import resolve_amp
from precache.errors import SettingError


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """`0,2,1` to (0, 1, 2); SettingError if it is something else."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise SettingError(f"{name} must be numbers as in 1,2,4, got {text!r}") from error


def parse_amp(text: str, device: torch.device) -> tuple[str, ...]:
    """`auto,off` to ("bf16", "off"), see `resolve_amp`; SettingError if it is something else."""
    return tuple(dict.fromkeys(resolve_amp(part.strip(), device) for part in text.split(",")))


def parse_switches(name: str, text: str) -> tuple[bool, ...]:
    """`on,off` to (True, False); SettingError if it is something else."""
    values = {"on": True, "off": False}
    parts = [part.strip() for part in text.split(",")]
    if not set(parts) <= values.keys():
        raise SettingError(f"{name} must be on, off or on,off, got {text!r}")
    return tuple(value for word, value in values.items() if word in parts)


def names_of(text: str) -> list[str]:
    """`a, b` to ["a", "b"]."""
    return [name.strip() for name in text.split(",") if name.strip()]

"""What the commands have in common: options, how their values are read, and the `Settings` that they fill.

An option of `SHARED` means the same wherever it is, and has the default of the field of `Settings` that it
fills; a command that needs another says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from bench.machine.hardware import AMP_HELP, WARMUP_HELP, choose_warmup
from bench.measure.settings import Settings
from bench.measure.trainers import CHOICES
from loaders.device import find_device
from precache.cli.commandline import PathOrUrl, combine_options
from precache.engines import worker_count
from precache.errors import SettingError

PATH = click.Path(path_type=Path)
PLACE = PathOrUrl()
_Function = TypeVar("_Function", bound=Callable[..., Any])
_DEFAULTS = {each.name: each.default for each in fields(Settings)}

SHARED: dict[str, dict[str, Any]] = {
    "trainer": {"default": "auto", "help": f"What takes the batches: {CHOICES}."},
    "trainer_rate": {
        "type": float,
        "metavar": "IMAGES_PER_S",
        "help": "Images/s that your own GPU trains on; the same as --trainer emulated:IMAGES_PER_S.",
    },
    "amp": {"default": "auto", "help": AMP_HELP},
    "compiled": {"is_flag": True, "help": "Compile the model with torch.compile."},
    "cache": {"default": "none", "help": "Where later epochs are kept: none, ram or device."},
    "batch_size": {"default": _DEFAULTS["batch_size"], "help": "Samples per batch."},
    "workers": {"type": int, "help": "Processes or threads of the loader.  [default: one per CPU]"},
    "size": {"default": _DEFAULTS["size"], "help": "Side of the served square, pixels."},
    "batches": {"default": _DEFAULTS["batches"], "help": "Batches that are timed in each run."},
    "warmup": {"type": int, "help": WARMUP_HELP},
    "repeats": {
        "default": _DEFAULTS["repeats"],
        "help": "Repeats of each measurement; the loaders take turns.",
    },
    "cold": {"is_flag": True, "help": "Measure each loader with a cold page cache, too."},
    "device": {"default": "auto", "help": "Device that trains: auto, cpu, cuda or cuda:N."},
    "augment": {
        "default": "eval",
        "help": "What happens to pictures: eval (centre crop), train (random crop, flip), crop.",
    },
    "shuffle": {"default": "auto", "help": "How samples are shuffled: auto, full, window or none."},
}
"""By the name of the parameter, what click is told."""
_FLAGS = {"compiled": "--compile"}
"""Flags of options that are not called as their parameter."""
_Own = Mapping[str, Any]


def option(name: str, own: _Own | None = None) -> Callable[[_Function], _Function]:
    """The option of SHARED with that name; what is in `own` differs."""
    told = {**SHARED[name], **(own or {})}
    flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
    return click.option(flag, name, show_default="default" in told, **told)


def run_options(*names: str, **own: _Own) -> Callable[[_Function], _Function]:
    """Options of SHARED, whose values make the parameter `settings`, a Settings.

    Args:
        names: of SHARED; what has no option keeps the default of `Settings`.
        own: what differs from SHARED, by name.
    """
    return combine_options("settings", make_settings, {name: option(name, own.get(name)) for name in names})


def make_settings(
    *,
    trainer: str | None = None,
    trainer_rate: float | None = None,
    device: str = "auto",
    warmup: int | None = None,
    workers: int | None = None,
    **others: Any,
) -> Settings:
    """Settings from the values of options; SettingError as `Settings`."""
    chosen = find_device(device)
    return Settings(
        trainer=chosen_trainer(trainer, trainer_rate) or "none",
        device=chosen,
        warmup=choose_warmup(warmup, chosen),
        workers=worker_count(workers),
        **others,
    )


def chosen_trainer(trainer: str | None, rate: float | None) -> str | None:
    """The name that `--trainer` and `--trainer-rate` together mean; None where neither was asked for.

    Raises:
        SettingError: both were given, or a rate that is not positive.
    """
    if rate is None:
        return trainer
    if trainer not in (None, SHARED["trainer"]["default"]):
        raise SettingError("--trainer and --trainer-rate cannot be combined; give one of them")
    if not 0 < rate < float("inf"):
        raise SettingError(f"trainer_rate must be positive, got {rate}")
    return f"emulated:{rate:.10g}"


def price_option(function: _Function) -> _Function:
    """`--gpu-price`."""
    return click.option(
        "--gpu-price",
        type=click.FloatRange(min=0, min_open=True),
        metavar="DOLLARS",
        help="Price of one accelerator hour in dollars; adds the cost of waiting.",
    )(function)


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """`0,2,1` to (0, 1, 2); SettingError if it is something else."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise SettingError(f"{name} must be numbers as in 1,2,4, got {text!r}") from error


def names_of(text: str) -> list[str]:
    """`a, b` to ["a", "b"]."""
    return [name.strip() for name in text.split(",") if name.strip()]

"""Options that several commands of `bench` take, and the `Settings` that their values make.

An option of `SHARED` means the same in every command, and has the default of the field of `Settings` that it
fills; a command that needs another default gives it to `option` or `run_options`.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_args

import click

from bench.machine.hardware import AMP_HELP, WARMUP_HELP, choose_warmup
from bench.measure.settings import Settings
from bench.measure.trainers import CHOICES, EAGER_LAUNCHES, NullTrainer, choose_launches, resolve_trainer
from loaders.device import find_device
from loaders.settings import AugmentName
from precache.cli.commandline import combine_options
from precache.engines import worker_count
from precache.errors import SettingError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_DEFAULTS = {field.name: field.default for field in fields(Settings)}

SHARED: dict[str, dict[str, Any]] = {
    "trainer": {"default": "auto", "help": f"What takes the batches: {CHOICES}."},
    "trainer_rate": {
        "type": float,
        "metavar": "IMAGES_PER_S",
        "help": "Images/s that your own GPU trains on; the same as --trainer emulated:IMAGES_PER_S.",
    },
    "launches": {
        "type": int,
        "help": "Torch operations that each step of an emulated trainer launches from Python.  [default: "
        f"{EAGER_LAUNCHES} for IMAGES_PER_S, as an eager ResNet-50; 0 for a named accelerator]",
    },
    "amp": {"default": "auto", "help": AMP_HELP},
    "compiled": {"is_flag": True, "help": "Compile the model with torch.compile."},
    "cache": {"metavar": "device", "help": "Keep decoded pictures in the memory of the GPU."},
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
        "help": f"What happens to pictures: {', '.join(get_args(AugmentName))}; see help(loaders.build).",
    },
    "shuffle": {"default": "auto", "help": "How samples are shuffled: auto, full, window or none."},
}
"""Arguments of `click.option` for each shared option, by the name of its parameter."""
_FLAGS = {"compiled": "--compile"}
"""Flags of the options whose flag is not made from the name of their parameter."""
_Attributes = Mapping[str, Any]


def option(name: str, changes: _Attributes | None = None) -> Callable[[_Function], _Function]:
    """Return the decorator of the shared option `name`, with `changes` to its arguments of SHARED."""
    attributes = {**SHARED[name], **(changes or {})}
    flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
    return click.option(flag, name, show_default="default" in attributes, **attributes)


def run_options(*names: str, **changes: _Attributes) -> Callable[[_Function], _Function]:
    """Return the decorator of shared options whose values make the parameter `settings`, a Settings.

    Args:
        names: names of SHARED; a setting without an option keeps the default of `Settings`.
        changes: arguments that differ from those of SHARED, by the option's name.
    """
    return combine_options(
        "settings", make_settings, {name: option(name, changes.get(name)) for name in names}
    )


def make_settings(
    *,
    trainer: str | None = None,
    trainer_rate: float | None = None,
    launches: int | None = None,
    device: str = "auto",
    warmup: int | None = None,
    workers: int | None = None,
    **others: Any,
) -> Settings:
    """Return the Settings that values of options mean.

    Raises:
        SettingError: a value is not allowed, or a device is missing.
    """
    torch_device = find_device(device)
    name = choose_trainer(trainer, trainer_rate) or NullTrainer.name
    return Settings(
        trainer=name,
        launches=choose_launches(launches, resolve_trainer(name, torch_device)),
        device=torch_device,
        warmup=choose_warmup(warmup, torch_device),
        workers=worker_count(workers),
        **others,
    )


def choose_trainer(trainer: str | None, rate: float | None) -> str | None:
    """Return the trainer that `--trainer` and `--trainer-rate` together name; None where both are missing.

    Raises:
        SettingError: both were given, or a rate that is not positive.
    """
    if rate is None:
        return trainer
    if trainer not in (None, SHARED["trainer"]["default"]):
        raise SettingError("--trainer and --trainer-rate cannot be combined", remedy="give one of them")
    if not 0 < rate < float("inf"):
        raise SettingError(f"trainer_rate must be positive, got {rate}")
    return f"emulated:{rate:.10g}"


def price_option(function: _Function) -> _Function:
    """Add the option `--gpu-price` to a command."""
    return click.option(
        "--gpu-price",
        type=click.FloatRange(min=0, min_open=True),
        metavar="DOLLARS",
        help="Price of one accelerator hour in dollars; adds the cost of waiting.",
    )(function)


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `0,2,1`, sorted: (0, 1, 2).

    Args:
        name: the flag that has this value, for the message.

    Raises:
        SettingError: `text` is no such list.
    """
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise SettingError(f"{name} must be numbers as in 1,2,4, got {text!r}") from error


def split_names(text: str) -> list[str]:
    """Return the names of a list such as `a, b`: ["a", "b"]."""
    return [name.strip() for name in text.split(",") if name.strip()]

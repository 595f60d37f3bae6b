"""What the commands have in common: options, how their values are read, and what they make.

An option of `SHARED` means the same wherever it is, and has the same default and help; a command that needs
others says which. `run_options` makes them one `RunSettings`, `showing_options` make a `Showing`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from bench.machine.precision import AMP_HELP, resolve_amp
from bench.measure.device import WARMUP_HELP, choose_device, choose_warmup
from bench.measure.spec import RunSettings
from bench.measure.trainers import CHOICES
from bench.report import events
from bench.report.terminal import Showing
from precache.console.commandline import Place, gathered
from precache.errors import SettingError
from precache.executors import worker_count

PATH = click.Path(path_type=Path)
PLACE = Place()
_Function = TypeVar("_Function", bound=Callable[..., Any])

SHARED: dict[str, dict[str, Any]] = {
    "trainer": {"default": "auto", "help": f"One of: {CHOICES}."},
    "trainer_rate": {
        "type": float,
        "metavar": "IMAGES_PER_S",
        "help": "What your own GPU trains on: the same as --trainer emulated:IMAGES_PER_S.",
    },
    "amp": {"default": "auto", "help": AMP_HELP},
    "compiled": {"is_flag": True, "help": "Compile the model with torch.compile."},
    "cache": {"default": "none", "help": "none, ram or device, of loaders.Reading."},
    "batch_size": {"default": 64, "help": "Samples per batch."},
    "workers": {"type": int, "help": "Processes or threads of the loader.  [default: one per CPU]"},
    "size": {"default": 224, "help": "Side of the served square, pixels."},
    "batches": {"default": 40, "help": "Timed batches of each run."},
    "warmup": {"type": int, "help": WARMUP_HELP},
    "repeats": {"default": 3, "help": "Runs of each kind, taking turns."},
    "cold": {"is_flag": True, "help": "Measure each loader with a cold page cache, too."},
    "device": {"default": "auto", "help": "auto, cpu or cuda."},
    "augment": {"default": "eval", "help": "eval, train or crop, of loaders.build."},
    "shuffle": {"default": "auto", "help": "auto, full, window or none."},
    "json_path": {"type": PATH, "help": "Write the result here; '-' prints it alone."},
    "html_path": {"type": PATH, "help": "Write the report here."},
}
"""By the name of the parameter, what click is told."""
_FLAGS = {"compiled": "--compile", "json_path": "--json", "html_path": "--html"}
"""Of those that are not called as their parameter."""
_Own = Mapping[str, Any]


def option(name: str, own: _Own | None = None) -> Callable[[_Function], _Function]:
    """The option of SHARED with that name; what is in `own` differs."""
    told = {**SHARED[name], **(own or {})}
    flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
    return click.option(flag, name, show_default="default" in told, **told)


def run_options(*names: str, **own: _Own) -> Callable[[_Function], _Function]:
    """Options of SHARED, whose values make the parameter `settings`, a RunSettings.

    Those without an option have the value that SHARED gives; without `--trainer` there is none yet.

    Args:
        names: of SHARED.
        own: what differs from there, by name.
    """
    return gathered("settings", _settings, {name: option(name, own.get(name)) for name in names})


def _settings(
    *,
    trainer: str | None = None,
    trainer_rate: float | None = None,
    device: str = "auto",
    warmup: int | None = None,
    workers: int | None = None,
    **others: Any,
) -> RunSettings:
    chosen = choose_device(device)
    trainer = chosen_trainer(trainer, trainer_rate)
    usual = {name: SHARED[name]["default"] for name in ("batch_size", "size", "batches", "repeats")}
    return RunSettings(
        trainers=() if trainer is None else (trainer,),
        device=chosen,
        warmup=choose_warmup(warmup, chosen),
        workers=worker_count(workers),
        **{**usual, **others},
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
        help="Of an hour of the accelerator: say what is saved.",
    )(function)


def showing_options(function: _Function) -> _Function:
    """`--markdown`, `--details` and `--gpu-price`, whose values make the parameter `showing`."""
    options = {
        "markdown": click.option("--markdown", is_flag=True, help="Print the table as Markdown."),
        "details": click.option("--details", is_flag=True, help="Print every column and finding."),
        "gpu_price": price_option,
    }
    return gathered("showing", Showing, options)(function)


def _choose_events(context: click.Context, _: click.Parameter, folder: Path | None) -> None:
    if folder is not None:
        events.writer_class()  # its absence is an error now, not after minutes of measuring
        context.meta[events.__name__] = folder


tensorboard_option = click.option(
    "--tensorboard",
    type=PATH,
    metavar="DIR",
    callback=_choose_events,
    expose_value=False,
    help="Write events for TensorBoard here: batch times, and what ran meanwhile.",
)


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

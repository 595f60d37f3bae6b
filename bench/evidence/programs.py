"""What the programs of the steps share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from bench.machine.hardware import describe_machine
from precache.errors import PrecacheError, printable

_PATH = click.Path(path_type=Path)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def feed_options(function: _Function) -> _Function:
    """DATA, RESULT, `--device`, `--batch-size` and `--size`: what a program takes that goes through FEEDS."""
    for option in (
        click.option("--size", default=224, show_default=True, help="Side of the served square, pixels."),
        click.option("--batch-size", default=32, show_default=True),
        click.option("--device", default="cuda", show_default=True),
        click.argument("result", type=_PATH),
        click.argument("data", type=_PATH),
    ):
        function = option(function)
    return function


def write_result(path: Path, device: str, **found: Any) -> None:
    """Write what a step found, with the machine that it is of."""
    machine = describe_machine(torch.device(device))
    path.write_text(json.dumps({"machine": machine, **found}, indent=1) + "\n", encoding="utf-8")


def failure(error: BaseException) -> str:
    """An exception as one line."""
    text = str(error) if isinstance(error, PrecacheError) else f"{type(error).__name__}: {error}"
    return printable(" ".join(text.split()))[:300]

"""What the programs of the steps share."""

import json
from pathlib import Path
from typing import Any

import torch

from bench.machine.hardware import describe_machine
from precache.errors import PrecacheError, printable


def write_result(path: Path, device: str, **found: Any) -> None:
    """Write what a step found, with the machine that it is of."""
    machine = describe_machine(torch.device(device))
    path.write_text(json.dumps({"machine": machine, **found}, indent=1) + "\n", encoding="utf-8")


def failure(error: BaseException) -> str:
    """An exception as one line."""
    text = str(error) if isinstance(error, PrecacheError) else f"{type(error).__name__}: {error}"
    return printable(" ".join(text.split()))[:300]

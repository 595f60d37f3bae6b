"""What the examples go on from: a file that torch saved."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch

import loaders
from precache.errors import PrecacheError, SettingError


def save(path: Path, content: dict[str, Any]) -> None:
    """Write beside, then rename: whenever this is killed, there is a whole checkpoint."""
    with open(path.with_suffix(".partial"), "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def read(path: Path, args: argparse.Namespace) -> dict[str, Any] | None:
    """What torch saved at `path`, for --resume, with the model's `name`; None: there is nothing.

    Raises:
        SettingError: it is there, and --resume was not given, or it is of another model than --model.
        PrecacheError: it cannot be read.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return None
    if not args.resume:
        raise SettingError(f"{path}: is there already; add --resume to go on, or give another --out")
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        name = content["name"]
    except Exception as error:  # there are many kinds of damage
        raise PrecacheError(f"{path}: damaged, or no checkpoint; remove it to start anew") from error
    if name != args.model:
        raise SettingError(f"{path}: is of {name}, not of {args.model}; give --model {name}")
    return content


def restore(loader: loaders.Loader, state: dict[str, Any], path: Path) -> None:
    """Have `loader` go on where `state`, which was read from `path`, was taken; SettingError names `path`."""
    try:
        loader.load_state_dict(state)
    except SettingError as error:
        raise SettingError(f"{path}: {error}, or give another --out") from None

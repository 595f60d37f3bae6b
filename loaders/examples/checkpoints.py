"""What the examples go on from: a file that torch saved, or a folder that a library filled."""

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

import loaders
from precache.errors import PrecacheError, SettingError

_STATE = "loader.json"


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
    if not _asked(path, args):
        return None
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        name = content["name"]
    except Exception as error:  # there are many kinds of damage
        raise PrecacheError(f"{path}: damaged, or no checkpoint; remove it to start anew") from error
    _check_model(name, path, args)
    return content


def finish(folder: Path, state: dict[str, Any], args: argparse.Namespace) -> None:
    """Write the loader's state into OUT/checkpoint-N, which a library has filled: now it is one.

    Older ones are removed.
    """
    (folder / ".partial").write_text(json.dumps({"name": args.model, "loader": state}))
    os.replace(folder / ".partial", folder / _STATE)
    for older in folder.parent.glob("checkpoint-*"):
        if older != folder:
            shutil.rmtree(older)


def find(args: argparse.Namespace) -> tuple[Path, dict[str, Any]] | None:
    """The folder OUT/checkpoint-N that was finished, and the loader's state, for --resume.

    Raises:
        SettingError, PrecacheError: as of `read`.
    """
    states = sorted(args.out.glob(f"checkpoint-*/{_STATE}"), key=os.path.getmtime)
    path = states[-1] if states else args.out / "checkpoint-0" / _STATE
    if not _asked(path, args):
        return None
    try:
        content = json.loads(path.read_text())
        name, state = content["name"], content["loader"]
    except (ValueError, LookupError, TypeError) as error:
        raise PrecacheError(f"{path}: damaged; remove {path.parent} to start anew") from error
    _check_model(name, path, args)
    return path.parent, state


def restore(loader: loaders.Loader, state: dict[str, Any], path: Path) -> None:
    """Have `loader` go on where `state`, which was read from `path`, was taken; SettingError names `path`."""
    try:
        loader.load_state_dict(state)
    except SettingError as error:
        raise SettingError(f"{path}: {error}, or give another --out") from None


def _asked(path: Path, args: argparse.Namespace) -> bool:
    """Whether there is a checkpoint to go on from; the folder OUT is made."""
    args.out.mkdir(parents=True, exist_ok=True)
    if path.exists() and not args.resume:
        raise SettingError(f"{path}: is there already; add --resume to go on, or give another --out")
    return path.exists()


def _check_model(name: str, path: Path, args: argparse.Namespace) -> None:
    if name != args.model:
        raise SettingError(f"{path}: is of {name}, not of {args.model}; give --model {name}")

"""What the examples go on from: a file that torch saved, or a folder that a library filled."""

import argparse
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

import loaders
from precache.errors import PrecacheError, SettingError

_RECORD = ".precache-checkpoint.json"


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


def filling(args: argparse.Namespace) -> Path:
    """A folder in OUT for a library to fill; what it holds is not a checkpoint yet."""
    folder: Path = args.out / ".precache-checkpoint"
    return folder


def finish(filled: Path, state: dict[str, Any], args: argparse.Namespace) -> None:
    """Make OUT/checkpoint-N of a folder that a library has filled, N a number that is free, and record it.

    Of others only the one that was recorded before is removed: the rest is the user's.
    """
    record, before = args.out / _RECORD, _recorded(args.out)
    number = 1
    while os.path.lexists(folder := args.out / f"checkpoint-{number}"):
        number += 1
    os.rename(filled, folder)
    content = {"name": args.model, "loader": state, "folder": folder.name}
    record.with_suffix(".partial").write_text(json.dumps(content))
    os.replace(record.with_suffix(".partial"), record)
    for old in (filling(args), *(() if before is None else before[:1])):
        shutil.rmtree(old, ignore_errors=True)


def find(args: argparse.Namespace) -> tuple[Path, dict[str, Any]] | None:
    """The folder OUT/checkpoint-N that was recorded, if it is there, and the loader's state, for --resume.

    Raises:
        SettingError, PrecacheError: as of `read`.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    found = _recorded(args.out)
    if found is None or not _asked(found[0], args):
        return None
    _check_model(found[1]["name"], found[0], args)
    return found[0], found[1]["loader"]


def _recorded(out: Path) -> tuple[Path, dict[str, Any]] | None:
    """The folder of the last checkpoint, and what is recorded of it; None: there is none."""
    record = out / _RECORD
    if not record.exists():
        return None
    try:
        content = json.loads(record.read_text())
        folder, _, _ = out / content["folder"], content["name"], content["loader"]
        if not re.fullmatch(r"checkpoint-\d+", content["folder"]):
            raise ValueError(content["folder"])
    except (ValueError, LookupError, TypeError) as error:
        raise PrecacheError(f"{record}: damaged; remove it to start anew") from error
    return folder, content


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

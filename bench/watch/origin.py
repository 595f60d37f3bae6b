"""Line in a script where a loader is made, found among the calls that are running; no source is read.

This module runs in the processes of a script that `bench watch` started, and imports the standard library
alone.
"""

import os
import re
from dataclasses import dataclass
from enum import Enum
from types import FrameType

FOLDER = os.getcwd()
"""Working folder when the script began, in which `bench watch` was typed."""
_HERE = os.path.dirname(os.path.abspath(__file__))
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_LOADERS = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "loaders") + os.sep
_PACKAGES = ("site-packages", "dist-packages")
_LIBRARIES = ("accelerate", "fastai", "lightning", "timm", "transformers", "ultralytics")
"""Packages that are libraries even where they are run from a checkout, and not installed."""
_SPLITS = {"train", "training", "val", "valid", "validation", "test", "eval", "evaluation"}
_SWITCHES = {*_SPLITS, "augment", "shuffle"}
"""Words in names of parameters that are True for one split and False for another."""
_CHOSEN = ("torch.utils.data.", "torchvision.transforms.")
"""Modules of the datasets and transforms that a function may be given."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Call that makes a loader.

    Attributes:
        where: 'file:line' of the script; "" where that is not known. Where no call is of the script, as in a
            command that a package installs, it is the outermost call of a library.
        libraries: libraries between that line and the loader, the outermost first: ("transformers",).
        choice: argument by which the script's function may choose another dataset in another call, as
            'make_loader(train=True)'; "" where it has none.
    """

    where: str
    libraries: tuple[str, ...]
    choice: str


def find_origin(frame: FrameType | None) -> Origin:
    """Find the call of the script that is running, from its innermost frame."""
    outermost = ""
    libraries: list[str] = []
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith("<") and os.path.dirname(os.path.abspath(path)) != _HERE:
            where = f"{relative_path(os.path.abspath(path))}:{frame.f_lineno}"
            if not _is_library(frame):
                return Origin(where, tuple(libraries), _find_choice(frame))
            library = _library(frame)
            if library not in ("", "torch", "torchvision") and library not in libraries:
                libraries.insert(0, library)
            outermost = where
        frame = frame.f_back
    return Origin(outermost, tuple(libraries), "")


def relative_path(path: str) -> str:
    """Path as one writes it where `bench watch` was typed: relative to that folder, if it is below."""
    return path.removeprefix(os.path.join(FOLDER, ""))


def _find_choice(frame: FrameType) -> str:
    """Find an argument that says a split, is True for one alone, or is a dataset or a transform."""
    code = frame.f_code
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        value = frame.f_locals.get(name)
        if isinstance(value, bool):
            is_choice = bool(_SWITCHES & set(name.lower().split("_")))
        elif isinstance(value, (str, os.PathLike, Enum)):
            value = str(value)
            is_choice = not _SPLITS.isdisjoint(re.split(r"[\W_]", os.path.basename(value).lower()))
        else:
            is_choice = any(base.__module__.startswith(_CHOSEN) for base in type(value).__mro__)
        if is_choice:
            text = repr(value) if isinstance(value, (bool, str)) else "..."
            return f"{code.co_name}({name}={text})"
    return ""


def _is_library(frame: FrameType) -> bool:
    """Whether a frame is of Python or a package, rather than of the script or a module of its project."""
    path = frame.f_code.co_filename
    is_installed = any(f"{os.sep}{name}{os.sep}" in path for name in _PACKAGES)
    is_installed = is_installed or path.startswith(_LOADERS)
    return is_installed or path.startswith(_STANDARD_LIBRARY) or _package(frame) in _LIBRARIES


def _library(frame: FrameType) -> str:
    """Package of a library's frame; "" for Python's own, and for a wrapper that only passes a call on."""
    if frame.f_code.co_filename.startswith(_STANDARD_LIBRARY) and "-packages" not in frame.f_code.co_filename:
        return ""
    if "lightning" in _package(frame) and frame.f_code.co_name == "wrapper":  # wraps `DataLoader.__init__`
        return ""
    return _package(frame)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]

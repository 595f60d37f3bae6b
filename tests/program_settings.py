"""Settings of the program that imports this project: globals that it may change at any time.

`SETTINGS` changes each; `program_state` is what nothing of this project may change.
"""

import csv
import decimal
import gc
import locale
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
from PIL import GifImagePlugin, Image, ImageFile, PngImagePlugin, TiffImagePlugin


def _setter(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


SETTINGS: dict[str, Callable[[], Any]] = {
    "LOAD_TRUNCATED_IMAGES": _setter(ImageFile, "LOAD_TRUNCATED_IMAGES", True),
    "MAX_IMAGE_PIXELS": _setter(Image, "MAX_IMAGE_PIXELS", 10),
    "MAX_TEXT_CHUNK": _setter(PngImagePlugin, "MAX_TEXT_CHUNK", 10),
    "MAX_TEXT_MEMORY": _setter(PngImagePlugin, "MAX_TEXT_MEMORY", 10),
    "LOADING_STRATEGY": _setter(
        GifImagePlugin, "LOADING_STRATEGY", GifImagePlugin.LoadingStrategy.RGB_ALWAYS
    ),
    "READ_LIBTIFF": _setter(TiffImagePlugin, "READ_LIBTIFF", True),
    "opener of PNG": lambda: Image.register_open("PNG", lambda *_: Image.new("L", (9, 9)), lambda _: True),
    "warnings as errors": lambda: warnings.simplefilter("error"),
    "printoptions": lambda: np.set_printoptions(precision=1, threshold=2, legacy="1.13"),
    "errstate": lambda: np.seterr(all="raise"),
    "OpenCV's optimisation": lambda: cv2.setUseOptimized(False),
    "OpenCV's threads": lambda: cv2.setNumThreads(1),
    "locale": lambda: locale.setlocale(locale.LC_ALL, "C"),
    "SIGTERM": lambda: signal.signal(signal.SIGTERM, lambda *_: None),
    "SIGCHLD": lambda: signal.signal(signal.SIGCHLD, lambda *_: None),
    "field_size_limit": lambda: csv.field_size_limit(100),
    "decimal": lambda: setattr(decimal.getcontext(), "prec", 2),
    "random": lambda: random.seed(1),
    "NumPy's random": lambda: np.random.seed(1),
    "garbage collector": gc.disable,
    "timeout of sockets": lambda: socket.setdefaulttimeout(0.001),
    "start method": lambda: multiprocessing.set_start_method("spawn", force=True),
    "log level": lambda: logging.basicConfig(level=logging.CRITICAL),
}
"""Name -> function that changes one global."""


def program_state() -> dict[str, Any]:
    """Return the values of the program's globals, comparable with those of another time."""
    umask = os.umask(0)
    os.umask(umask)
    return {
        "Pillow": [
            ImageFile.LOAD_TRUNCATED_IMAGES,
            ImageFile.MAXBLOCK,
            Image.MAX_IMAGE_PIXELS,
            PngImagePlugin.MAX_TEXT_CHUNK,
            PngImagePlugin.MAX_TEXT_MEMORY,
            GifImagePlugin.LOADING_STRATEGY,
            TiffImagePlugin.READ_LIBTIFF,
            dict(Image.OPEN),
            dict(Image.EXTENSION),
        ],
        "warnings": [list(warnings.filters), warnings.showwarning],
        "NumPy": [np.get_printoptions(), np.geterr(), repr(np.random.get_state())],
        "OpenCV": [cv2.getNumThreads(), cv2.useOptimized()],
        "locale": locale.setlocale(locale.LC_ALL),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "csv": csv.field_size_limit(),
        "decimal": str(decimal.getcontext()),
        "random": random.getstate(),
        "gc": gc.isenabled(),
        "sockets": socket.getdefaulttimeout(),
        "multiprocessing": multiprocessing.get_start_method(allow_none=True),
        "logging": [logging.root.level, *logging.root.handlers],
        "process": [umask, os.getcwd(), dict(os.environ), sys.getrecursionlimit(), sys.path[:]],
    }

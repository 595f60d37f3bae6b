"""Modules of this project run as programs of their own, from whatever folder."""

import os
import sys
from pathlib import Path

import bench
from bench.measure.processes import run_watched


def environment() -> dict[str, str]:
    """This process's, in which Python finds the packages that this process uses."""
    root = str(Path(bench.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, path] if path else [root])}


def run_module(module: str, *arguments: str) -> str:
    """`python -m module arguments` to its end: what it printed.

    Raises:
        WorkerError: it ended with another exit code than 0; holds the last line that it printed.
    """
    return run_watched([sys.executable, "-m", module, *arguments], environment()).output

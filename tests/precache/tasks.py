"""Tasks over which workers die or fail.

Each worker imports this file again, so it imports no module that takes time.
"""

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from precache.engines import Ticks

UNITS = 6


class Deadly:
    """A task of 6 units, of which `deadly` kill the process that runs them.

    Attributes:
        tries: file that grows by a byte with each try.
    """

    def __init__(self, name: str, *deadly: int, tries: Path | None = None) -> None:
        self.name, self.deadly, self.tries = name, deadly, tries


def do(task: Deadly, tick: Ticks) -> tuple[str, list[int]]:
    done = []
    for unit in range(UNITS):
        if unit not in tick.fatal:
            tick.begin(unit)
            if unit in task.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(unit)
        tick()
    return task.name, done


def die(task: Any, tick: Ticks) -> None:
    """Kill the process before it begins a unit."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_over_other_units(task: Deadly, tick: Ticks) -> None:
    """Kill the process over another unit each time."""
    assert task.tries is not None
    with open(task.tries, "ab") as file:
        file.write(b".")
    tick.begin(task.tries.stat().st_size)
    os.kill(os.getpid(), signal.SIGKILL)


def die_over_a_fatal_unit(task: Deadly, tick: Ticks) -> None:
    """Kill the process over the same unit each time, although it is to be left out."""
    tick.begin(0)
    os.kill(os.getpid(), signal.SIGKILL)


def die_beside_a_child(task: Deadly, tick: Ticks) -> str:
    """Kill the process, the first time, while a child of it lives on with its open files."""
    assert task.tries is not None
    if task.tries.exists():
        return task.name
    child = os.fork()
    if child == 0:
        time.sleep(120)
        os._exit(0)
    task.tries.write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def die_while_answering(task: Deadly, tick: Ticks) -> bytes:
    """Kill the process, the first time, while it sends an answer of more bytes than a pipe holds."""
    assert task.tries is not None
    if not task.tries.exists():
        task.tries.touch()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    return bytes(100_000_000)


def note_process_and_sleep(task: Path, tick: Ticks) -> None:
    task.write_text(str(os.getpid()))
    time.sleep(60)


def log_badly(task: str, tick: Ticks) -> str:
    """Log an error of a library with its traceback, and a message whose arguments do not fit."""
    logger = logging.getLogger("library")
    logger.warning("%d pictures", "several")
    try:
        raise Odd("first", "second")
    except Odd:
        logger.exception("%s failed", task)
    return task


class Odd(Exception):
    """An exception that cannot be unpickled, like many of libraries."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def return_task(task: Any, tick: Ticks) -> Any:
    return task


def raise_odd(task: int, tick: object = None) -> None:
    if task:
        raise Odd("first", "second")
    raise ConnectionResetError("the disk's, not the worker's")

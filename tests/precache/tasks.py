"""Tasks at which workers die or fail.

Each worker imports this file anew, so it imports nothing that takes time.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from precache.engines import Ticks

UNITS = 6


class Deadly:
    """A task of 6 units, of which `deadly` kill the process that does them.

    Attributes:
        tries: a file that grows by a byte with each try.
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
    """Before it begins a unit."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_over_other_units(task: Deadly, tick: Ticks) -> None:
    """Never twice over the same one."""
    assert task.tries is not None
    with open(task.tries, "ab") as file:
        file.write(b".")
    tick.begin(task.tries.stat().st_size)
    os.kill(os.getpid(), signal.SIGKILL)


def die_stubbornly(task: Deadly, tick: Ticks) -> None:
    """Over a unit that is left out."""
    tick.begin(0)
    os.kill(os.getpid(), signal.SIGKILL)


def die_beside_a_child(task: Deadly, tick: Ticks) -> str:
    """The first time: of a child that goes on, and has all that was open."""
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
    """The first time, with more than a pipe holds."""
    assert task.tries is not None
    if not task.tries.exists():
        task.tries.touch()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    return bytes(100_000_000)


def note_process(task: Path, tick: Ticks) -> Path:
    task.write_text(str(os.getpid()))
    return task


def sleep(task: Path) -> None:
    time.sleep(60)


class Odd(Exception):
    """Does not survive pickling, as many exceptions of libraries."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def same(task: Any, tick: Ticks) -> Any:
    return task


def raise_odd(task: int, tick: object = None) -> None:
    raise Odd("one", "other") if task else ConnectionResetError("the disk's, not the worker's")

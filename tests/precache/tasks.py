"""Tasks at which workers die or fail.

Each worker imports this file anew, so it imports nothing that takes time.
"""

import os
import signal

from precache.executors.workers import Ticks

UNITS = 6


class Deadly:
    """A task of 6 units, of which `deadly` kill the process that does them."""

    def __init__(self, name: str, *deadly: int) -> None:
        self.name, self.deadly = name, deadly


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


def die(task: int, tick: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_the_end(task: Deadly, tick: Ticks) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_anywhere(task: str, tick: Ticks) -> None:
    """Never twice over the same unit: the number of tries is kept in a file."""
    with open(task, "ab") as tries:
        tries.write(b".")
    tick.begin(os.stat(task).st_size)
    os.kill(os.getpid(), signal.SIGKILL)


def die_over_all(task: str, tick: Ticks) -> None:
    for unit in range(1000):
        if unit not in tick.fatal:
            tick.begin(unit)
            os.kill(os.getpid(), signal.SIGKILL)


def die_stubbornly(task: Deadly, tick: Ticks) -> None:
    """Over a unit that is left out."""
    tick.begin(0)
    os.kill(os.getpid(), signal.SIGKILL)


class Odd(Exception):
    """Does not survive pickling, as many exceptions of libraries."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def raise_odd(task: int, tick: Ticks) -> None:
    raise Odd("one", "other") if task else ConnectionResetError("the disk's, not the worker's")

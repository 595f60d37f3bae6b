"""Stop a run in this process at its N-th change of a file.

There are three ways: `kill`, after which nothing is written any more, whatever handlers of errors try;
`Ctrl-C`; `error`, of the disk.
"""

import errno
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

CHANGES = (
    "open", "write", "fsync", "ftruncate", "rename", "replace", "unlink", "mkdir", "rmdir",
)  # fmt: skip
"""Functions of `os` that change files (`open` only if it may write): between two calls no folder changes."""
WAYS = ("kill", "Ctrl-C", "error")


class KilledError(BaseException):
    """Stands for SIGKILL; a BaseException, so that no handler of errors catches it."""


class Stop:
    """Moment at which to stop a run, and the way.

    Attributes:
        moment: number of the moment to stop at, from 1; 0: never.
        way: one of WAYS.
        count: moments so far.
        where: description of the call at `moment`; empty if the run ended before.
    """

    def __init__(self, moment: int = 0, way: str = "kill") -> None:
        self.moment, self.way = moment, way
        self.count = 0
        self.where = ""

    def count_moment(self, description: str) -> None:
        """Count a moment, and stop the run if it is the one; a killed run is stopped again at each call."""
        if self.where and self.way == "kill":
            raise OSError(errno.EIO, "is dead")
        self.count += 1
        if self.count == self.moment:
            self.where = description
            if self.way == "kill":
                raise KilledError
            if self.way == "Ctrl-C":
                raise KeyboardInterrupt
            raise OSError(errno.EIO, os.strerror(errno.EIO), description)


@contextmanager
def stopping(folder: Path, stop: Stop) -> Iterator[Stop]:
    """Count the moments of the block for `stop`; close files below `folder` that a stopped run left open."""

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if name != "open" or arguments[1] & (os.O_WRONLY | os.O_RDWR):
                stop.count_moment(f"{name} {arguments[0]}")
            if name == "fsync":  # not needed: a killed process loses no page of the system's cache
                return None
            return function(*arguments, **options)

        return call

    try:
        with mock.patch.multiple(os, **{name: counting(name, getattr(os, name)) for name in CHANGES}):
            yield stop
    finally:
        if stop.where:
            _close_all_below(folder)


def _close_all_below(folder: Path) -> None:
    """Close files below `folder`, and with them their locks, as the system does for a process that is gone.

    Their descriptors stay open on /dev/null: objects that still exist, such as a mapped file, close them
    later.
    """
    gc.collect()
    with open(os.devnull, "rb") as null:
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if Path(os.readlink(descriptor)).is_relative_to(folder):
                    os.dup2(null.fileno(), int(descriptor.name), inheritable=False)

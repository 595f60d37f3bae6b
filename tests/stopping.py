"""Runs that are stopped in this process: at their N-th change of a file, or at their N-th request.

Three ways: killed, after which nothing is written any more, whatever handlers try; Ctrl-C; an error of the
disk or the storage.
"""

import errno
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from precache.errors import StorageError
from precache.storage import objects

CHANGES = (
    "open", "write", "fsync", "ftruncate", "rename", "replace", "unlink", "mkdir", "rmdir",
)  # fmt: skip
"""Functions of `os`; of `open`, only those that may write. Between two of them a folder stays as it is."""
WAYS = ("kill", "Ctrl-C", "error")


class KilledError(BaseException):
    """What stands for SIGKILL: no handler of errors takes it for its own."""


class Stop:
    """One run that is stopped at `moment`, counted from 1; 0: never.

    Attributes:
        counts: `changes` of files; or `requests` to storages: odd moments are before one is sent, even ones
            when it was answered.
        count: so far.
        where: what was about to be done at `moment`; empty if the run ended before.
    """

    def __init__(self, moment: int = 0, way: str = "kill", counts: str = "changes") -> None:
        self.moment, self.way, self.counts = moment, way, counts
        self.count = 0
        self.where = ""

    def passes(self, kind: str, what: str) -> None:
        """Stop the run if this is the one that counts; or if it is dead already."""
        if self.where and self.way == "kill":
            raise OSError(errno.EIO, "is dead")
        self.count += kind == self.counts
        if kind == self.counts and self.count == self.moment:
            self.where = what
            if self.way == "kill":
                raise KilledError
            if self.way == "Ctrl-C":
                raise KeyboardInterrupt
            if kind == "requests":
                raise StorageError(f"{what}: no answer")
            raise OSError(errno.EIO, os.strerror(errno.EIO), what)


@contextmanager
def stopping(folder: Path, stop: Stop) -> Iterator[Stop]:
    """Let `stop` count what the block does; files below `folder` that the dead leave open are closed."""

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if name != "open" or arguments[1] & (os.O_WRONLY | os.O_RDWR):
                stop.passes("changes", f"{name} {arguments[0]}")
            # what is killed loses no page of the system's cache
            return None if name == "fsync" else function(*arguments, **options)

        return call

    def asked(*arguments: Any) -> Any:
        stop.passes("requests", f"{arguments[0]} is asked for")
        answer = inner(*arguments)
        stop.passes("requests", f"{arguments[0]} was answered")
        return answer

    inner = objects.request_with_retries
    try:
        with (
            mock.patch.multiple(os, **{name: counted(name, getattr(os, name)) for name in CHANGES}),
            mock.patch.object(objects, "request_with_retries", asked),
        ):
            yield stop
    finally:
        if stop.where:
            _close_all_below(folder)


def _close_all_below(folder: Path) -> None:
    """Close what is open below `folder`, as the system does for a process that is gone; locks end with it.

    The numbers stay taken: an object that has not gone yet, such as a mapped file, closes its own later.
    """
    gc.collect()
    with open(os.devnull, "rb") as nothing:
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if Path(os.readlink(descriptor)).is_relative_to(folder):
                    os.dup2(nothing.fileno(), int(descriptor.name), inheritable=False)

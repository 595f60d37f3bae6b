"""Several files at a time, in threads that Ctrl-C ends, whatever they wait for."""

import time
from collections.abc import Callable, Sequence
from threading import Event, Thread

from precache.dataset.files import FileEntry
from precache.storage.retries import Check

_AT_A_TIME = 4
_END_S = 2.0  # for threads whose work nobody wants any more; what they do then is of no effect


class _UnwantedError(Exception):
    """Ctrl-C came."""


def each_file(function: Callable[[FileEntry, Check], None], files: Sequence[FileEntry]) -> None:
    """Call `function` for each file, several at a time; after the first error what is begun is ended.

    Args:
        function: gets what raises where Ctrl-C came, and nobody waits for its work.
    """
    waiting, end = iter(files), Event()
    errors: list[BaseException] = []

    def check() -> None:
        if end.is_set():
            raise _UnwantedError

    def work() -> None:
        try:
            while not errors and not end.is_set() and (file := next(waiting, None)) is not None:
                function(file, check)
        except BaseException as error:
            errors.append(error)

    # daemons: one that waits, in somebody else's library, for a silent host does not keep the program
    threads = [Thread(target=work, daemon=True) for _ in range(_AT_A_TIME)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        end.set()
        until_s = time.monotonic() + _END_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
    if errors:
        raise errors[0]

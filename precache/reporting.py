"""Report what a run does: warnings, progress, numbers in words, and what an interruption leaves."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from precache.errors import DatasetError, check_open_files, os_reason, printable

_LOGGER = logging.getLogger("precache")
_CALLBACK_MARK = "_precache_callback_error"


def warn(message: str) -> None:
    """Log `message` as a warning on one line, with its control characters escaped."""
    _LOGGER.warning("%s", printable(message))


def abridge(names: list[str]) -> str:
    """Return the first three of `names`, and how many more there are: 'a, b, c and 4 more'."""
    rest = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{rest}"


def quantity(number: int, noun: str, plural: str = "") -> str:
    """Return a number and its noun: '1 picture', '9,144 pictures'; by default the plural is `noun` + 's'."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def human_bytes(count: float) -> str:
    """Return bytes in binary units with three digits: '1.67 GiB' for 1,798,237,072."""
    power = 0
    while abs(count) >= 1024 and power < 4:
        count, power = count / 1024, power + 1
    digits = f"{count:.3g}" if power and abs(count) < 999.5 else f"{count:.0f}"
    return f"{digits} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


Progress = Callable[[int, int], None]
"""Function called with (units done, units in all) a few times a second; what it raises ends the work."""


def no_progress(done: int, total: int) -> None:
    """Report nothing: the default of `on_progress`."""


def progress_counter(on_progress: Progress, total: int, done: int = 0) -> Callable[[int], None]:
    """Return a function that adds up the units done, and calls `on_progress(done, total)`."""
    on_progress = mark_callback_errors(on_progress)

    def report(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    return report


def mark_callback_errors(callback: Callable[..., None]) -> Callable[..., None]:
    """Return `callback`, wrapped so that `explain_failed_writing` passes the errors on that it raises."""

    def call(*arguments: Any) -> None:
        try:
            callback(*arguments)
        except Exception as error:
            error.__dict__[_CALLBACK_MARK] = True
            raise

    return call


@contextmanager
def explain_failed_writing(
    path: object, remedy: str, describe_kept: Callable[[], str] | None = None
) -> Iterator[None]:
    """Raise DatasetError for an OSError of the block, unless a callback of the caller has raised that.

    Args:
        path: the folder that is written, which the error names if the OSError names no file.
        remedy: see `PrecacheError`.
        describe_kept: returns what is kept of an unfinished work, for the message.
    """
    try:
        yield
    except OSError as error:
        if _CALLBACK_MARK in error.__dict__:
            raise
        check_open_files(error, error.filename)
        note = f" {describe_kept()}" if describe_kept is not None else ""
        raise DatasetError(
            f"cannot be written ({os_reason(error)}){note}", path=error.filename or path, remedy=remedy
        ) from error


@contextmanager
def explain_interruption(describe_kept: Callable[[], str]) -> Iterator[None]:
    """Give an interruption, such as Ctrl-C, a message that says what is kept, unless it has one."""
    try:
        yield
    except Exception:
        raise
    except BaseException as stop:
        if not stop.args:
            stop.args = (describe_kept(),)
        raise


def nothing_lost_message() -> str:
    """Return the message of an interruption before or after the conversion of pictures."""
    return "while nothing was being converted; nothing is lost"

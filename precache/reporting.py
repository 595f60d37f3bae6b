"""What a run reports: warnings, progress, and what is kept when it is interrupted."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from precache.errors import printable

_LOGGER = logging.getLogger("precache")


def warn(message: str) -> None:
    """Say `message` on one line; control characters of the names in it as escapes."""
    _LOGGER.warning("%s", printable(message))


def abridge(names: list[str]) -> str:
    """The first three of `names`, and how many more there are."""
    rest = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{rest}"


def quantity(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun: '1 picture', '9,144 pictures'; `plural` where an s does not make it."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def human_bytes(count: float) -> str:
    """Bytes in binary units, three digits: 1,798,237,072 -> '1.67 GiB'."""
    power = 0
    while abs(count) >= 1024 and power < 4:
        count, power = count / 1024, power + 1
    digits = f"{count:.3g}" if power and abs(count) < 999.5 else f"{count:.0f}"
    return f"{digits} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


Progress = Callable[[int, int], None]
"""Called with (units done, units in all), a few times a second; an exception that it raises ends the work."""


def no_progress(done: int, total: int) -> None:
    """Report no progress."""


@contextmanager
def explain_interruption(what_is_kept: Callable[[], str]) -> Iterator[None]:
    """Add `what_is_kept` to the message of what ends the work from outside, as Ctrl-C does."""
    try:
        yield
    except Exception:
        raise
    except BaseException as stop:
        if not stop.args:
            stop.args = (what_is_kept(),)
        raise


def nothing_lost() -> str:
    """For `tells`: the message for a moment when nothing is half done."""
    return "while nothing was being converted; nothing is lost, and the same command goes on"

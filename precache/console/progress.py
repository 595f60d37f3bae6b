"""How long work reports how far it is: a function that its caller gives."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]
"""Called with (units done, units in all), a few times a second; an exception that it raises ends the work."""


def unseen(done: int, total: int) -> None:
    """The progress that nobody asked for."""


@contextmanager
def tells(what_is_kept: Callable[[], str]) -> Iterator[None]:
    """Add `what_is_kept` to what ends the work from outside, as Ctrl-C does, for whoever reports it."""
    try:
        yield
    except Exception:
        raise
    except BaseException as stop:
        if not stop.args:
            stop.args = (what_is_kept(),)
        raise


def nothing_lost() -> str:
    """For `tells`, of a moment at which nothing is half done."""
    return "while nothing was being converted; nothing is lost, and the same command goes on"

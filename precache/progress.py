"""How long work reports how far it is: a function that its caller gives."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (units done, units in all), a few times a second; an exception that it raises ends the work."""


def unseen(done: int, total: int) -> None:
    """The progress that nobody asked for."""
